from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder as far as its files tell: 2 layers, 4 key-value heads of 16, 1,536 parameters."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_size": 64,
        "max_position_embeddings": 4096,
        "vocab_size": 100,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((16, 64), np.float32), "b": np.zeros(512, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def raw(tmp_path: Path, model_folder: Path) -> dict:
    """The smallest configuration, as plain data."""
    train = tmp_path / "train.jsonl"
    train.write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n')
    return {
        "name": "t",
        "runs_dir": str(tmp_path / "runs"),
        "steps": 10,
        "model": {"path": str(model_folder)},
        "data": {"train": [{"path": str(train)}]},
        "rewards": {"functions": [{"function": "exact_match"}]},
    }


@pytest.fixture
def config_file(tmp_path: Path, raw: dict) -> Path:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    return file
