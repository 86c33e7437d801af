"""Loading a model's tokenizer, and the facts about it that engine and learner must agree on.

Both sides call `tokenizer_facts`; only the number of embedding rows comes from the model that each of them built.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from s2rl.config.schema import ModelConfig
from s2rl.errors import ModelError
from s2rl.types import TokenizerFacts

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def tokenizer_folder(model: ModelConfig) -> Path:
    """The folder that the tokenizer is read from."""
    return model.tokenizer or model.path


def has_tokenizer(model: ModelConfig) -> bool:
    """Whether that folder holds tokenizer files."""
    folder = tokenizer_folder(model)
    return any((folder / name).is_file() for name in _TOKENIZER_FILES) or any(folder.glob("*.tiktoken"))


def load_tokenizer(model: ModelConfig) -> Any:
    """The Hugging Face tokenizer of `model`. Raises ModelError when there is none or it cannot be read."""
    folder = tokenizer_folder(model)
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if not folder.is_dir():
        raise ModelError(f"{key}: {folder} is not a folder; give the folder that holds the tokenizer files")
    if not has_tokenizer(model):
        raise ModelError(
            f"{key}: {folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, ...); "
            "copy the tokenizer's files into the model folder or set model.tokenizer to the folder that has them"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise ModelError(
            f"{key}: the tokenizer in {folder} cannot be loaded ({type(error).__name__}: {error}); check that its "
            "files are complete and, if it needs Python code of its own, set model.trust_remote_code"
        ) from error


def check_vocabulary(tokenizer: Any, model: ModelConfig, *, vocab_size: int) -> None:
    """Raise ModelError when the tokenizer has ids beyond the model's `vocab_size` embedding rows."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        key = "model.tokenizer" if model.tokenizer else "model.path"
        raise ModelError(
            f"{key}: the tokenizer in {tokenizer_folder(model)} has ids up to {largest} ({token!r}), but the model in "
            f"{model.path} has {vocab_size} embedding rows. Use the tokenizer that belongs to the model, or give the "
            "model rows for the added tokens (resize_token_embeddings)."
        )


def tokenizer_facts(model: ModelConfig, *, vocab_size: int) -> TokenizerFacts:
    """What the start-up contract compares. `vocab_size` is the number of embedding rows of the built model.

    Raises ModelError as `load_tokenizer` does.
    """
    return facts_of(load_tokenizer(model), model=model, vocab_size=vocab_size)


def facts_of(tokenizer: Any | None, *, model: ModelConfig, vocab_size: int) -> TokenizerFacts:
    """As `tokenizer_facts`, of a tokenizer that is loaded already. Without one: size 0, an empty digest."""
    return TokenizerFacts(
        vocab_size=vocab_size,
        tokenizer_size=0 if tokenizer is None else len(tokenizer),
        eos_token_ids=eos_token_ids(model, tokenizer),
        pad_token_id=_special_id("pad_token_id", model, tokenizer),
        bos_token_id=_special_id("bos_token_id", model, tokenizer),
        digest="" if tokenizer is None else _digest(tokenizer),
    )


def eos_token_ids(model: ModelConfig, tokenizer: Any | None) -> tuple[int, ...]:
    """Ids that end a completion: those of generation_config.json, of config.json and of the tokenizer, sorted."""
    found: set[int] = set()
    for config in _configs(model):
        value = config.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def _special_id(name: str, model: ModelConfig, tokenizer: Any | None) -> int | None:
    """The tokenizer's own special id, else the first that a config of the model names."""
    value = getattr(tokenizer, name, None)
    candidates = [value, *(config.get(name) for config in _configs(model))]
    return next((int(v) for v in candidates if isinstance(v, int)), None)


def _configs(model: ModelConfig) -> list[Mapping[str, Any]]:
    """generation_config.json, config.json and the latter's text part, as far as they exist."""
    configs: list[Mapping[str, Any]] = []
    for name in ("generation_config.json", "config.json"):
        file = model.path / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: {file} cannot be read as JSON ({error}); restore the file") from error
        configs.append(content)
        if isinstance(content.get("text_config"), dict):
            configs.append(content["text_config"])
    return configs


def _digest(tokenizer: Any) -> str:
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
