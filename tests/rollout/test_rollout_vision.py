"""vLLM samples prompts with images, and its log-probabilities are those of transformers' forward on the same pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from rollout_process import WorkerProcess

from s2rl.config.schema import ModelConfig, RolloutConfig
from s2rl.models.small import SmallModel, save_small_model
from s2rl.types import Completion, Encoded, GroupRequest, Prompt, SamplingSpec

pytestmark = pytest.mark.dist

SIDE = {"qwen2_5_vl": 28}
FP32 = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
BF16_ONLY = ("qwen3_5", "qwen3_5_moe")
"""vLLM's gated delta net on the CPU takes nothing else."""


def started(made: SmallModel, dtype: str) -> WorkerProcess:
    config = RolloutConfig(dtype=dtype, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256, kv_cache_gb=0.1)
    worker = WorkerProcess(index=0, model=ModelConfig(path=made.folder), config=config, device="cpu", seed=0)
    worker.call("start")
    return worker


def encoded(made: SmallModel, sizes: list[tuple[int, int]], *, length_error: int = 0) -> Encoded:
    """A prompt with images of `sizes` in merged patches. `length_error` is added to each run of placeholders."""
    rng = np.random.default_rng(len(sizes))
    side = SIDE.get(made.family, 32)
    ids, images, spans = [5, 6, 7], [], []
    for height, width in sizes:
        ids.append(made.config["vision_start_token_id"])
        spans.append((len(ids), height * width + length_error))
        ids += [made.config["image_token_id"]] * (height * width + length_error)
        ids.append(made.config["vision_end_token_id"])
        images.append(rng.integers(0, 256, (height * side, width * side, 3), dtype=np.uint8))
    return Encoded(
        prompt=Prompt(prompt_id="p", row=0, epoch=0, text="", answer=""),
        token_ids=(*ids, 8, 9),
        images=tuple(images),
        image_spans=tuple(spans),
    )


def request(group_id: str, prompt: Encoded, *, banned: tuple[int, ...] = ()) -> GroupRequest:
    sampling = SamplingSpec(max_new_tokens=6, ignore_eos=True, banned_token_ids=banned)
    return GroupRequest(group_id=group_id, encoded=prompt, num_completions=2, sampling=sampling, seed=1)


def collect(worker: WorkerProcess, requests: list[GroupRequest]) -> tuple[list[Completion], dict[str, str]]:
    """All completions and the reasons of failed groups."""
    worker.call("submit", requests)
    completions, failed = [], {}
    expected = sum(r.num_completions for r in requests)
    while len(completions) + 2 * len(failed) < expected:
        report = worker.call("collect", 5.0)
        completions += report.completions
        failed |= {f.group_id: f.reason for f in report.failed}
    return completions, failed


def reference(made: SmallModel, prompt: Encoded, completion: Completion, *, banned: list[int], dtype: torch.dtype):
    model = getattr(transformers, made.architecture).from_pretrained(made.folder, dtype=dtype).eval()
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids.tolist()]])
    inputs = {}
    if prompt.images:
        processor = transformers.AutoImageProcessor.from_pretrained(made.folder)
        inputs = dict(processor(images=[Image.fromarray(i) for i in prompt.images], return_tensors="pt"))
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == made.config["image_token_id"]).int(),
            use_cache=False,
            **inputs,
        ).logits.float()
    logits[..., banned] = -torch.inf
    start = len(prompt.token_ids)
    return logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None]).squeeze(1).numpy()


@pytest.mark.parametrize("family", [*FP32, *BF16_ONLY])
def test_the_engine_sees_what_the_learner_sees(family: str, tmp_path: Path) -> None:
    made = save_small_model(tmp_path, family=family)
    dtype = "float32" if family in FP32 else "bfloat16"
    banned = [made.config["image_token_id"], made.config["video_token_id"]]
    prompts = {"text": encoded(made, []), "one": encoded(made, [(2, 3)]), "two": encoded(made, [(4, 2), (2, 2)])}
    worker = started(made, dtype)
    try:
        completions, failed = collect(worker, [request(n, p, banned=tuple(banned)) for n, p in prompts.items()])
    finally:
        worker.close()
    assert not failed
    differences = np.concatenate(
        [
            np.abs(c.logprobs - reference(made, prompts[c.group_id], c, banned=banned, dtype=getattr(torch, dtype)))
            for c in completions
        ]
    )
    assert len(differences) == 36
    assert differences.mean() < (1e-4 if family in FP32 else 2e-2)


def test_a_prompt_that_the_engine_would_expand_otherwise_fails_alone(tmp_path: Path) -> None:
    made = save_small_model(tmp_path / "model", family="qwen3_vl_moe")
    good, long = encoded(made, [(2, 2)]), encoded(made, [(2, 2)], length_error=1)
    unmarked = Encoded(prompt=good.prompt, token_ids=(1, 2, 3), images=good.images, image_spans=())
    worker = started(made, "float32")
    try:
        completions, failed = collect(
            worker, [request("long", long), request("unmarked", unmarked), request("good", good)]
        )
    finally:
        worker.close()
    assert {c.group_id for c in completions} == {"good"}
    assert "has 12 for the learner" in failed["long"]
    assert "unmarked" in failed


def test_images_for_a_text_model_fail_alone(tmp_path: Path) -> None:
    made = save_small_model(tmp_path, family="qwen3")
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    prompt = Prompt(prompt_id="p", row=0, epoch=0, text="", answer="")
    seeing = Encoded(prompt=prompt, token_ids=(1, 2, 3), images=(image,), image_spans=((1, 1),))
    worker = started(made, "float32")
    try:
        completions, failed = collect(
            worker,
            [request("image", seeing), request("text", Encoded(prompt=prompt, token_ids=(1, 2, 3)))],
        )
    finally:
        worker.close()
    assert {c.group_id for c in completions} == {"text"}
    assert "takes text only" in failed["image"]
