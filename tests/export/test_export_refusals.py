"""What cannot be exported, or was exported wrongly, is told by tensor and file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_models import changed, masters_of, save_checkpoint, save_model
from safetensors.torch import load_file, save_file

from s2rl.errors import CheckpointError, ConfigError, ModelError, StorageError, UserError
from s2rl.export import Finding, export_model, verify_export


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and a run that was trained from it."""
    folder = tmp_path_factory.mktemp("export")
    source = save_model(folder / "source", "fused_with_extras")
    save_checkpoint(folder / "run", changed(masters_of(source)))
    return source, folder / "run"


@pytest.fixture
def source(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "source"))


@pytest.fixture
def run(made: tuple[Path, Path]) -> Path:
    return made[1]


def edit(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})


MAIN = "model-00001-of-00001.safetensors"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def cut(source: Path) -> None:
    file = source / MAIN
    file.write_bytes(file.read_bytes()[:-100])


def long_header(source: Path) -> None:
    file = source / MAIN
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def missing_file(source: Path) -> None:
    (source / MAIN).unlink()


def twice(source: Path) -> None:
    save_file({EXPERTS: torch.zeros(2)}, source / "old.safetensors")


def no_tensor(source: Path) -> None:
    edit(source / MAIN, lambda tensors: tensors.pop(EXPERTS))
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"][EXPERTS]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def other_shape(source: Path) -> None:
    edit(source / MAIN, lambda tensors: tensors.update({EXPERTS: tensors[EXPERTS].transpose(1, 2)}))


def integers(source: Path) -> None:
    edit(source / MAIN, lambda tensors: tensors.update({EXPERTS: tensors[EXPERTS].to(torch.int8)}))


def other_architecture(source: Path) -> None:
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (source / "config.json").write_text(json.dumps(config))


def dangling(source: Path) -> None:
    (source / "tokenizer.json").symlink_to(source / "nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is damaged: .* bytes, .* expected"),
        (long_header, "is not a safetensors file or is damaged"),
        (missing_file, f"{MAIN}"),
        (twice, f"old.safetensors holds {EXPERTS}, and {MAIN} does too"),
        (no_tensor, rf"has no {EXPERTS.rpartition('experts')[0]}experts.0.down_proj.weight"),
        (other_shape, rf"{EXPERTS} has shape \[5, 32, 24\], in .* it is \[5, 24, 32\]"),
        (integers, f"{EXPERTS} is stored as I8"),
        (other_architecture, "GPT2LMHeadModel is not known; known are"),
        (dangling, "tokenizer.json is a link to a file that is not there"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_and_nothing_is_left(
    source: Path, run: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(source)
    with pytest.raises(UserError, match=message):
        export_model(run, source=source, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_source_of_another_size_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give the model folder that this run was trained from"):
        export_model(run, source=save_model(tmp_path / "other", "untied"), out=tmp_path / "out")


def test_folders_that_hold_something_are_never_written_over(source: Path, run: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    for out, message in (
        (source, "the source model's own folder"),
        (source / "inside", "the source model's own folder"),
        (tmp_path, "the source model's own folder, or around it"),
        (full, "is not empty"),
        (full / "mine.txt", "is no folder"),
        (tmp_path / "no" / "such", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            export_model(run, source=source, out=out)
    assert (full / "mine.txt").read_text() == "keep"


def test_a_folder_without_a_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run folder"):
        export_model(source, source=source, out=tmp_path / "out")
    with pytest.raises(CheckpointError, match="no such folder"):
        export_model(tmp_path / "none", source=source, out=tmp_path / "out")


def test_a_damaged_checkpoint_is_refused(source: Path, run: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    shards = next(broken.rglob("*.distcp"))
    data = bytearray(shards.read_bytes())
    data[len(data) // 2] ^= 1
    shards.write_bytes(data)
    with pytest.raises(CheckpointError, match="its checksum differs"):
        export_model(broken, source=source, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_unless_told_otherwise(
    source: Path, tmp_path: Path, value: float
) -> None:
    masters = masters_of(source)
    masters["model.layers.0.self_attn.q_proj.weight"][3, 3] = value
    save_checkpoint(tmp_path / "bad", masters)
    with pytest.raises(CheckpointError, match=r"q_proj.weight of the checkpoint holds values that are not finite"):
        export_model(tmp_path / "bad", source=source, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_model(tmp_path / "bad", source=source, out=tmp_path / "out", allow_nonfinite=True)
    report = verify_export(tmp_path / "out", source=source)
    assert [t.name for t in report.tensors if t.finding is Finding.NOT_FINITE] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    source: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"the export takes .* MiB and .* has 0 MiB free"):
        export_model(run, source=source, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


# ---- what verify finds ----------------------------------------------------------------------------------------------


@pytest.fixture
def exported(source: Path, run: Path, tmp_path: Path) -> Path:
    export_model(run, source=source, out=tmp_path / "out")
    return tmp_path / "out"


def found(exported: Path, source: Path, run: Path) -> dict[str, Finding]:
    report = verify_export(exported, source=source, ckpt=run)
    assert report.is_broken
    return {t.name: t.finding for t in report.tensors if t.finding.is_broken}


MTP = "mtp.layers.0.mlp.experts.2.up_proj.weight"


def flip(file: Path, name: str) -> None:
    edit(file, lambda tensors: tensors[name].view(torch.uint8).view(-1)[5:6].bitwise_xor_(4))


def test_a_bit_that_changed_in_a_trained_or_an_untrained_tensor_is_found(
    exported: Path, source: Path, run: Path
) -> None:
    flip(exported / MAIN, EXPERTS)
    assert found(exported, source, run) == {EXPERTS: Finding.DIFFERS}
    data = bytearray((exported / "mtp.safetensors").read_bytes())
    data[-3] ^= 1
    (exported / "mtp.safetensors").write_bytes(data)
    assert sorted(found(exported, source, run).values()) == sorted([Finding.DIFFERS, Finding.NOT_TRAINED])


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda tensors: tensors.update({EXPERTS: tensors[EXPERTS].float()}), Finding.DTYPE),
        (lambda tensors: tensors.update({EXPERTS: tensors[EXPERTS].transpose(1, 2)}), Finding.ORIENTATION),
        (lambda tensors: tensors.update({EXPERTS: tensors[EXPERTS][:3]}), Finding.SHAPE),
    ],
)
def test_other_types_shapes_and_orientations_are_found(
    exported: Path, source: Path, run: Path, change: Callable[[dict[str, torch.Tensor]], object], finding: Finding
) -> None:
    edit(exported / MAIN, change)
    assert found(exported, source, run) == {EXPERTS: finding}


def test_lost_and_added_tensors_and_files_are_found(exported: Path, source: Path, run: Path) -> None:
    index = exported / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(exported / "mtp.safetensors", lambda t: (t.pop(MTP), t.update({"mtp.more": torch.ones(2)})))
    del weight_map[MTP]
    index.write_text(json.dumps({"weight_map": weight_map | {"mtp.more": "mtp.safetensors"}}))
    (exported / "empty.txt").unlink()
    (exported / "notes.txt").write_text("more")
    assert found(exported, source, run) == {MTP: Finding.MISSING, "mtp.more": Finding.EXTRA}
    assert verify_export(exported, source=source).files == {
        "empty.txt": "missing",
        "model.safetensors.index.json": "other content",
        "mtp.safetensors": "other metadata in the header",
        "notes.txt": "extra",
    }


def test_the_source_is_not_compared_with_itself(source: Path) -> None:
    with pytest.raises(ConfigError, match="is the source itself"):
        verify_export(source, source=source)
    with pytest.raises(ModelError, match="is not a folder"):
        verify_export(source / "none", source=source)
