"""An export has the format of its source, byte for byte, and the values of its checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from export_models import LAYOUTS, changed, digests, masters_of, save_checkpoint, save_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from s2rl.export import Finding, export_model, verify_export


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_of_an_untrained_model_is_the_source_itself(tmp_path: Path, layout: str) -> None:
    source = save_model(tmp_path / "source", layout)
    checkpoint = save_checkpoint(tmp_path / "run", masters_of(source), step=0)
    result = export_model(checkpoint, source=source, out=tmp_path / "out")
    assert digests(tmp_path / "out") == digests(source)
    assert result.num_files == len(digests(source))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert not verify_export(tmp_path / "out", source=source, ckpt=checkpoint).is_broken


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_loads_with_the_values_of_the_checkpoint(tmp_path: Path, layout: str) -> None:
    source = save_model(tmp_path / "source", layout)
    masters = changed(masters_of(source))
    checkpoint = save_checkpoint(tmp_path / "run", masters)
    out = tmp_path / "out"
    result = export_model(tmp_path / "run", source=source, out=out)
    loaded = masters_of(out)
    assert loaded.keys() == masters.keys()
    for name, master in masters.items():
        stored = torch.float32 if name == "lm_head.weight" and layout == "untied" else torch.bfloat16
        assert torch.equal(loaded[name], master.to(stored).float()), name
    assert digests(out).keys() == digests(source).keys()
    report = verify_export(out, source=source, ckpt=checkpoint)
    assert not report.is_broken and report.files == {}
    assert report.count(Finding.TRAINED) == result.num_trained
    assert report.count(Finding.IDENTICAL) == result.num_copied == (6 if layout == "fused_with_extras" else 0)
    for file in source.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert (out / file.relative_to(source)).read_bytes() == file.read_bytes()


def test_a_head_that_is_stored_though_tied_gets_the_embedding(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "tied_and_stored")
    save_checkpoint(tmp_path / "run", changed(masters_of(source)))
    export_model(tmp_path / "run", source=source, out=tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        head, embedding = file.get_tensor("lm_head.weight"), file.get_tensor("model.embed_tokens.weight")
    assert torch.equal(head, embedding)
    with safe_open(source / "model.safetensors", "pt") as file:
        assert not torch.equal(head, file.get_tensor("lm_head.weight"))


def test_the_exported_model_computes_what_the_masters_compute(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "per_expert")
    masters = {n: t.bfloat16().float() for n, t in changed(masters_of(source)).items()}
    save_checkpoint(tmp_path / "run", masters)
    export_model(tmp_path / "run", source=source, out=tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    reference.load_state_dict(masters)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, reference(ids).logits)


def test_rows_are_written_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "source", "fused_with_extras")
    checkpoint = save_checkpoint(tmp_path / "run", changed(masters_of(source)))
    export_model(checkpoint, source=source, out=tmp_path / "whole")
    monkeypatch.setattr("s2rl.export.write._COPY_BYTES", 1000)
    monkeypatch.setattr("s2rl.export.write._CAST_BYTES", 700)
    seen: list[tuple[int, int]] = []
    export_model(
        checkpoint, source=source, out=tmp_path / "pieces", workers=5, progress=lambda d, t: seen.append((d, t))
    )
    assert digests(tmp_path / "pieces") == digests(tmp_path / "whole")
    total = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
    assert [d for d, _ in seen] == sorted(d for d, _ in seen) and seen[-1] == (total, total)


def test_a_cache_of_links_and_a_path_with_spaces_and_letters_of_other_alphabets(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "blobs", "untied")
    source = tmp_path / "modèle d'origine" / "快照 1"
    source.mkdir(parents=True)
    for file in plain.iterdir():
        (source / file.name).symlink_to(file)
    save_checkpoint(tmp_path / "run", masters_of(source))
    out = tmp_path / "modèle d'origine" / "résultat"
    out.mkdir()
    export_model(tmp_path / "run", source=source, out=out)
    assert digests(out) == digests(plain)
    assert not any(f.is_symlink() for f in out.iterdir())


def test_an_interrupted_export_goes_on_with_the_files_that_are_missing(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "untied")
    checkpoint = save_checkpoint(tmp_path / "run", changed(masters_of(source)))
    export_model(checkpoint, source=source, out=tmp_path / "whole")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(checkpoint, source=source, out=tmp_path / "out", workers=1, progress=interrupt)
    assert not (tmp_path / "out").exists()
    result = export_model(checkpoint, source=source, out=tmp_path / "out")
    assert 0 < result.num_kept < result.num_files
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("percent", range(3, 100, 12))
def test_files_that_other_threads_were_writing_at_an_interruption_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: int
) -> None:
    source = save_model(tmp_path / "source", "untied")
    checkpoint = save_checkpoint(tmp_path / "run", changed(masters_of(source)))
    export_model(checkpoint, source=source, out=tmp_path / "whole")
    monkeypatch.setattr("s2rl.export.write._COPY_BYTES", 512)
    monkeypatch.setattr("s2rl.export.write._CAST_BYTES", 1024)

    def interrupt(done: int, total: int) -> None:
        if done > total * percent // 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(checkpoint, source=source, out=tmp_path / "out", workers=4, progress=interrupt)
    export_model(checkpoint, source=source, out=tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_what_was_begun_for_another_checkpoint_is_not_used(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "untied")
    first = save_checkpoint(tmp_path / "run", masters_of(source), step=1)
    second = save_checkpoint(tmp_path / "run", changed(masters_of(source)), step=2)

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(first, source=source, out=tmp_path / "out", workers=1, progress=interrupt)
    assert export_model(second, source=source, out=tmp_path / "out").num_kept == 0
    assert not verify_export(tmp_path / "out", source=source, ckpt=second).is_broken
    assert verify_export(tmp_path / "out", source=source, ckpt=first).is_broken


def test_a_source_that_must_not_be_written_is_left_alone(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "tied")
    before = {f: os.stat(f).st_mtime_ns for f in source.rglob("*")}
    for file in [*source.rglob("*"), source]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    save_checkpoint(tmp_path / "run", changed(masters_of(source)))
    try:
        export_model(tmp_path / "run", source=source, out=tmp_path / "out")
        assert {f: os.stat(f).st_mtime_ns for f in source.rglob("*")} == before
    finally:
        source.chmod(0o755)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
