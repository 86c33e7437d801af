"""Requests, stop strings, engine arguments and tokenizer facts: the parts that need no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_models import EOS, VOCAB_SIZE, save_tokenizer
from transformers import AutoTokenizer

from s2rl.config.schema import ModelConfig, RolloutConfig
from s2rl.data.tokenizer import eos_token_ids, has_tokenizer, load_tokenizer, tokenizer_facts
from s2rl.errors import ConfigError, ModelError
from s2rl.rollout import vllm_compat
from s2rl.rollout.requests import EngineLimits, refusal, sequence_params
from s2rl.rollout.stopping import StopStrings, cut_at_stop
from s2rl.types import Encoded, GroupRequest, Prompt, SamplingSpec

LIMITS = EngineLimits(vocab_size=50, max_model_len=20, eos_token_ids=(1, 2), can_stop_at_strings=True)


def request(ids: tuple[int, ...] = (5, 6, 7), *, n: int = 2, **sampling: object):
    return GroupRequest(
        group_id="g",
        encoded=Encoded(
            prompt=Prompt(prompt_id="p", row=0, epoch=0, text="", answer=""),
            token_ids=ids,
        ),
        num_completions=n,
        sampling=SamplingSpec(**({"max_new_tokens": 8} | sampling)),
        seed=40,
    )


def test_end_of_sequence_ids_stop_unless_they_are_to_be_ignored() -> None:
    params = sequence_params(request(stop_token_ids=(9, 2)), index=3, limits=LIMITS)
    assert params.stop_token_ids == (1, 2, 9)
    assert params.seed == 43
    assert sequence_params(request(stop_token_ids=(9,), ignore_eos=True), index=0, limits=LIMITS).stop_token_ids == (9,)


def test_the_budget_is_cut_to_what_the_engine_has_room_for() -> None:
    assert sequence_params(request(), index=0, limits=LIMITS).max_tokens == 8
    assert sequence_params(request((5,) * 15), index=0, limits=LIMITS).max_tokens == 5


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request(()), "the prompt is empty"),
        (request((5,) * 20), "no room for a completion"),
        (request((5, -1, 50)), r"the prompt: token ids [-1, 50] are outside the vocabulary of 50"),
        (request(n=0), "num_completions is 0"),
        (request(max_new_tokens=0), "max_new_tokens is 0"),
        (request(temperature=0.005), "temperature is 0.005; the engine takes 0 or 0.01 to 2.0"),
        (request(temperature=2.5), "temperature is 2.5"),
        (request(top_p=0.0), "top_p is 0.0"),
        (request(top_k=-1), "top_k is -1"),
        (request(stop=("a", "")), "a stop string is empty"),
        (request(stop_token_ids=(50,)), "stop_token_ids: token ids [50]"),
        (request(banned_token_ids=(99,)), "banned_token_ids: token ids [99]"),
        (request(banned_token_ids=tuple(range(50))), "every token is banned"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_refused_with_the_reason(bad: GroupRequest, reason: str) -> None:
    assert reason in (refusal(bad, LIMITS) or "")


def test_good_requests_pass_and_stop_strings_need_a_tokenizer() -> None:
    assert refusal(request(temperature=0.0, top_p=0.5, top_k=3, stop=("x",), banned_token_ids=(3,)), LIMITS) is None
    bare = EngineLimits(vocab_size=50, max_model_len=20, eos_token_ids=(), can_stop_at_strings=False)
    assert refusal(request(stop=("x",)), bare) == "stop strings need a tokenizer, and the model folder has none"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, "pad_token_id": 3, "bos_token_id": 4}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    return folder


class SlowTokenizer:
    """As a tokenizer without a Rust backend."""

    is_fast = False

    def __init__(self, fast: object) -> None:
        self._fast = fast

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("slow", [False, True])
def test_a_stop_string_is_found_at_the_token_that_completes_it(tokenizer_dir: Path, slow: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    used = SlowTokenizer(tokenizer) if slow else tokenizer

    def found_at(text: str, *stop: str) -> int | None:
        watch = StopStrings(stop, used)
        return next((i for i, t in enumerate(tokenizer.encode(text)) if watch.feed(t)), None)

    assert found_at("abcabd.", "abd") == 5
    assert found_at("abcabd.", "xx", "c", "abd") == 2
    assert found_at("abcabd", "abdx") is None
    assert found_at("aé→b", "é→") == 5, "characters of several bytes, one token each"
    assert found_at("a€", "€") == 3


def test_text_is_cut_at_the_earliest_stop_string() -> None:
    assert cut_at_stop("one\ntwo\n\nthree", ("\n\n", "two")) == "one\n"
    assert cut_at_stop("one", ("two",)) == "one"
    assert cut_at_stop("one", ()) == "one"


def test_facts_name_all_ids_that_end_a_completion(tokenizer_dir: Path) -> None:
    model = ModelConfig(path=tokenizer_dir)
    facts = tokenizer_facts(model, vocab_size=VOCAB_SIZE)
    assert facts.eos_token_ids == (7, 8, 9, EOS)
    assert (facts.vocab_size, facts.tokenizer_size) == (VOCAB_SIZE, 258)
    assert (facts.pad_token_id, facts.bos_token_id) == (257, 4), "the tokenizer's own, else the model's"
    assert eos_token_ids(model, None) == (7, 8, 9)


def test_the_digest_changes_with_the_vocabulary_and_with_the_chat_template(tokenizer_dir: Path) -> None:
    model = ModelConfig(path=tokenizer_dir)
    digest = tokenizer_facts(model, vocab_size=1).digest
    assert digest == tokenizer_facts(model, vocab_size=2).digest
    other = tokenizer_dir / "other"
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template += "!"
    tokenizer.save_pretrained(other)
    changed = tokenizer_facts(ModelConfig(path=tokenizer_dir, tokenizer=other), vocab_size=1).digest
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(other)
    again = tokenizer_facts(ModelConfig(path=tokenizer_dir, tokenizer=other), vocab_size=1).digest
    assert len({digest, changed, again}) == 3


def test_a_folder_without_a_usable_tokenizer_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    model = ModelConfig(path=tmp_path)
    assert not has_tokenizer(model)
    with pytest.raises(ModelError, match=r"model.path: .* holds no tokenizer .*set model.tokenizer"):
        load_tokenizer(model)
    with pytest.raises(ModelError, match=r"model.tokenizer: .*nowhere is not a folder"):
        load_tokenizer(ModelConfig(path=tmp_path, tokenizer=tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded .*check that its files are complete"):
        load_tokenizer(model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read as JSON"):
        eos_token_ids(model, None)


def test_engine_arguments_pass_through_but_not_those_of_s2rl() -> None:
    model = ModelConfig(path=Path("m"))

    def args(device: str = "cpu", **changes: object) -> dict:
        config = RolloutConfig(**({"kv_cache_gb": 0.5} | changes))
        return vllm_compat.engine_args(model=model, config=config, device=device, seed=1, extension_cls="a.B")

    cpu = args(engine_args={"num_gpu_blocks_override": 3})
    assert (cpu["num_gpu_blocks_override"], cpu["kv_cache_memory_bytes"], cpu["block_size"]) == (3, 2**29, 32)
    assert (cpu["async_scheduling"], cpu["logprobs_mode"], cpu["enforce_eager"]) == (False, "processed_logprobs", True)
    cuda = args("cuda", tensor_parallel=2, memory_fraction=0.5)
    assert (cuda["distributed_executor_backend"], cuda["gpu_memory_utilization"]) == ("mp", 0.5)
    assert "block_size" not in cuda
    assert not cuda["enforce_eager"]
    with pytest.raises(ConfigError, match=r"rollout.engine_args.async_scheduling: this argument is set by s2rl"):
        args(engine_args={"async_scheduling": True})


def test_the_environment_is_that_of_one_process_and_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    found = vllm_compat.environment(RolloutConfig(threads=3), device="cpu")
    assert (found["VLLM_ENABLE_V1_MULTIPROCESSING"], found["OMP_NUM_THREADS"]) == ("0", "3")
    assert found["VLLM_LOGGING_LEVEL"] == "ERROR"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert "VLLM_LOGGING_LEVEL" not in vllm_compat.environment(RolloutConfig(), device="cpu")
    assert vllm_compat.environment(RolloutConfig(), device="npu")["VLLM_ASCEND_ENABLE_NZ"] == "0"


def test_importing_the_worker_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, s2rl.rollout; sys.exit(any(m in sys.modules for m in ('vllm', 'torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
