"""A checkpoint is complete or does not count; what happens to a half-written, damaged, old or unwritable one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from s2rl.ckpt import CheckpointInfo, CheckpointStore, find_checkpoint, verify
from s2rl.ckpt.groups import Outstanding
from s2rl.errors import CheckpointError
from s2rl.types import Completion, Encoded, FinishReason, Prompt, Rollout, RolloutGroup, Score


def make_store(run_dir: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(run_dir / "checkpoints", keep=keep, config_digest="d" * 64)


def make_outstanding(count: int = 2) -> list[Outstanding]:
    result: list[Outstanding] = []
    for row in range(count):
        prompt = Prompt(prompt_id=f"0-{row}", row=row, epoch=0, text="1 + 1", answer="2", extra={"a": [1]})
        encoded = Encoded(prompt=prompt, token_ids=(3, 4))
        completion = Completion(
            group_id=prompt.prompt_id,
            index=0,
            token_ids=np.arange(5, dtype=np.int32),
            logprobs=np.linspace(-1, 0, 5, dtype=np.float32),
            versions=np.full(5, row, dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text="two",
        )
        rollout = Rollout(completion=completion, score=Score(total=1.0))
        group = RolloutGroup(
            group_id=prompt.prompt_id, encoded=encoded, rollouts_G=(rollout,), worker=0, taken_version=row
        )
        result.append((encoded, group if row else None))
    return result


def write_checkpoint(store: CheckpointStore, step: int, num_bytes: int = 1000) -> CheckpointInfo:
    learner = store.begin(step)
    rng = np.random.default_rng(step)
    for rank in range(2):
        (learner / f"__{rank}_0.distcp").write_bytes(rng.bytes(num_bytes))
    path = store.commit(step, state={"step": step, "counters": {"x": 0.5}}, outstanding=make_outstanding())
    return CheckpointInfo(path=path, step=step)


def test_a_checkpoint_is_verified_and_gives_back_what_was_stored(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.latest() is None
    info = write_checkpoint(store, 12)
    assert store.latest() == info and info.path == tmp_path / "checkpoints" / "step_00000012"
    verify(info)
    state, outstanding = store.load_trainer_state(info)
    assert state == {"step": 12, "counters": {"x": 0.5}}
    assert [group is None for _, group in outstanding] == [True, False]
    assert sorted(p.name for p in info.learner_dir.iterdir()) == ["__0_0.distcp", "__1_0.distcp"]
    manifest = json.loads((info.path / "manifest.json").read_text())
    assert manifest["step"] == 12 and manifest["config_digest"] == "d" * 64 and "numpy" in manifest["versions"]


def test_the_newest_are_kept_and_steps_count_as_numbers(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    for step in (9, 10, 99_999_999, 100_000_000):
        write_checkpoint(store, step)
    assert [info.step for info in store.complete()] == [99_999_999, 100_000_000]
    assert len(list(store.root.iterdir())) == 2


def test_an_older_one_is_pruned_only_after_the_newer_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, keep=1)
    write_checkpoint(store, 1)
    seen: list[list[int]] = []
    real_sync = CheckpointStore.commit.__globals__["_sync"]

    def watching_sync(path: Path) -> None:
        seen.append([info.step for info in store.complete()])
        real_sync(path)

    monkeypatch.setitem(CheckpointStore.commit.__globals__, "_sync", watching_sync)
    write_checkpoint(store, 2)
    assert seen[0] == [1] and seen[-1] == [2]
    assert all(steps for steps in seen), "there was a moment without a complete checkpoint"
    assert [1, 2] in seen


def test_an_unfinished_checkpoint_does_not_count_and_is_cleaned_up(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    good = write_checkpoint(store, 5)
    store.begin(6)
    renamed = write_checkpoint(store, 7)
    (renamed.path / "COMPLETE").unlink()
    assert store.latest() == good
    store.clean_partial()
    assert [p.name for p in store.root.iterdir()] == ["step_00000005"]
    verify(good)
    store.begin(8)
    store.discard(8)
    assert store.latest() == good and not list(store.root.glob("*.partial"))


def test_a_step_that_is_written_again_replaces_the_first(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_checkpoint(store, 3)
    store.begin(3)
    path = store.commit(3, state={"second": True}, outstanding=[])
    verify(CheckpointInfo(path=path, step=3))
    assert store.load_trainer_state(CheckpointInfo(path=path, step=3)) == ({"second": True}, [])


ALL_FILES = [
    "trainer.json",
    "outstanding.json",
    "outstanding.safetensors",
    "manifest.json",
    "COMPLETE",
    "learner/__0_0.distcp",
    "learner/__1_0.distcp",
]


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "removed", "longer"])
def test_any_damage_to_any_file_is_found_and_named(name: str, damage: str, tmp_path: Path) -> None:
    info = write_checkpoint(make_store(tmp_path), 4)
    file = info.path / name
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "emptied":
        file.write_bytes(b"")
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "longer":
        file.write_bytes(content + b"x")
    else:
        file.unlink()
    if name == "COMPLETE" and damage == "truncated":  # the line end: nothing is lost
        verify(info)
        return
    # Marker and manifest vouch for each other, so damage to either is reported as that of the manifest.
    named = file if name.startswith(("trainer", "outstanding", "learner")) else info.path / "manifest.json"
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        verify(info)
    assert str(caught.value).startswith(str(named)) and "Remove this checkpoint folder" in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_single_flipped_bit_of_a_learner_file_is_found(tmp_path: Path) -> None:
    info = write_checkpoint(make_store(tmp_path), 4, num_bytes=300)
    file = info.learner_dir / "__1_0.distcp"
    content = file.read_bytes()
    for bit in range(0, 8 * len(content), 7):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="checksum differs"):
            verify(info)
    file.write_bytes(content)
    verify(info)


def test_another_format_is_refused_with_the_version_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CheckpointStore.commit.__globals__, "FORMAT_VERSION", 99)
    info = write_checkpoint(make_store(tmp_path), 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"checkpoint format 99, this version of s2rl reads 1"):
        verify(info)


def test_what_a_user_may_point_at(tmp_path: Path) -> None:
    store = make_store(tmp_path / "run")
    write_checkpoint(store, 1)
    info = write_checkpoint(store, 2)
    assert find_checkpoint(info.path) == find_checkpoint(store.root) == find_checkpoint(tmp_path / "run") == info
    assert info.run_dir == tmp_path / "run"
    assert find_checkpoint(tmp_path) is None
    (info.path / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="not complete"):
        find_checkpoint(info.path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(tmp_path / "nothing")


WRITER = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from test_store import make_store, write_checkpoint
store = make_store(pathlib.Path(sys.argv[2]), keep=2)
step = int(sys.argv[3])
print("ready", flush=True)
while True:
    write_checkpoint(store, step, num_bytes=300_000)
    print(step, flush=True)
    step += 1
"""


@pytest.mark.timeout(240)
def test_a_writer_killed_at_any_moment_leaves_the_last_complete_one_usable(tmp_path: Path) -> None:
    rng = random.Random(0)
    store = make_store(tmp_path)
    step, seen_partial = 1, 0
    for _ in range(30):
        command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(tmp_path), str(step)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.06))
            writer.send_signal(signal.SIGKILL)
            reported = [int(line) for line in writer.stdout.read().split()]
        seen_partial += any(p.name.endswith(".partial") or not (p / "COMPLETE").exists() for p in store.root.iterdir())
        latest = store.latest()
        if reported:
            assert latest is not None and latest.step >= reported[-1], "a checkpoint that was complete is gone"
        if latest is not None:
            for info in store.complete():
                verify(info)
            state, outstanding = store.load_trainer_state(latest)
            assert state["step"] == latest.step and len(outstanding) == 2
            assert latest.step >= step - 1
            step = latest.step + 1
        store.clean_partial()
        assert store.latest() == latest
    assert seen_partial >= 5, "the kills did not hit a write"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_and_the_earlier_checkpoint_stays_good(small_disk: Path) -> None:
    store = make_store(small_disk)
    good = write_checkpoint(store, 1, num_bytes=400_000)
    for room in range(0, 40_000, 1500):  # the disk fills up at every stage of the commit
        learner = store.begin(2)
        free = shutil.disk_usage(small_disk).free
        (learner / "__0_0.distcp").write_bytes(b"\0" * max(0, free - room))
        try:
            store.commit(2, state={"padding": "x" * 5000}, outstanding=make_outstanding(20))
        except CheckpointError as error:
            assert error.exit_code == 2
            for part in ("step_00000002", str(store.root), "No space left", "MiB free", "make room", "unharmed"):
                assert part in str(error)
        else:
            assert room > 10_000
            break
        assert [p.name for p in store.root.iterdir()] == ["step_00000001"], "something half-written is left"
        assert store.latest() == good
        verify(good)
    else:
        pytest.fail("the disk was always full")


STAGES = ["write_text", "write_bytes", "rename"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_any_write_leaves_nothing_half_written(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    good = write_checkpoint(store, 1)
    for failing in range(1, 4):
        store.begin(2)
        real, calls = getattr(Path, stage), []

        def fail(self: Path, *args, real=real, calls=calls, failing=failing, **kwargs):
            calls.append(self)
            if len(calls) == failing:
                raise OSError(28, "No space left on device")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Path, stage, fail)
            try:
                store.commit(2, state={}, outstanding=make_outstanding())
            except CheckpointError as error:
                assert "No space left" in str(error)
            else:
                assert failing > len(calls)
                shutil.rmtree(store.root / "step_00000002")
        assert [p.name for p in store.root.iterdir()] == ["step_00000001"]
        verify(good)
    assert store.latest() == good


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"could not be written to .*checkpoints: (File exists|Not a directory)"):
        make_store(tmp_path).begin(1)
