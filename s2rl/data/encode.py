"""Prompts to token ids, within the budget.

A tokenizer is whatever `load_tokenizer` returns; this module needs the few members of `Tokenizer` and imports no vendor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from s2rl.config.schema import DataConfig
from s2rl.data.rows import PromptRows
from s2rl.errors import DataError, ModelError
from s2rl.types import Encoded, Prompt

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The members of a transformers tokenizer that are used here."""

    chat_template: Any
    bos_token: Any
    bos_token_id: Any
    eos_token_id: Any

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A prompt that is not trained on."""

    prompt: Prompt
    reason: str
    """For logs and the `dropped` counter: `prompt over budget`."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeCheck:
    """What `check_prompts` found."""

    num_checked: int
    num_overlong: int
    max_tokens: int
    """Length of the longest prompt that was encoded."""


OVERLONG = "prompt over budget"


class Encoder:
    """Encodes prompts for one tokenizer and one budget."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self.budget = config.max_prompt_tokens
        self.refuses_overlong = config.overlong == "error"
        self._system_prompt = config.system_prompt

    def encode(self, prompt: Prompt, *, where: str | None = None) -> Encoded | Dropped:
        """Token ids of one prompt, ready for generation.

        Over the budget: a `Dropped`, or DataError with `data.overlong: error`. Also raises DataError for a prompt that the chat
        template refuses and ModelError for messages without a chat template. `where` names the row in messages.
        """
        where = where or f"prompt {prompt.prompt_id} (row {prompt.row})"
        token_ids = self._chat(prompt, where=where) if prompt.messages is not None else self._plain(prompt, where=where)
        if not token_ids:
            raise DataError(f"{where}: the prompt gives no token at all; remove or mend the row")
        if len(token_ids) <= self.budget:
            return Encoded(prompt=prompt, token_ids=tuple(token_ids))
        if self.refuses_overlong:
            raise DataError(
                f"{where}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens allows {self.budget}. Raise the budget, "
                f"remove the row, or set data.overlong: drop"
            )
        return Dropped(prompt=prompt, reason=OVERLONG, num_tokens=len(token_ids))

    def surely_fits(self, prompt: Prompt) -> bool:
        """Whether the prompt is so short in bytes that it need not be encoded to know that it fits."""
        if prompt.text is not None:
            return len(prompt.text.encode()) + 2 <= self.budget
        # One token has at least one byte; a template adds far fewer than 64 tokens a message.
        messages = prompt.messages or ()
        size = sum(len(m.content.encode()) + 64 for m in messages) + 128 + len((self._system_prompt or "").encode())
        return size <= self.budget

    def _chat(self, prompt: Prompt, *, where: str) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template. Use an instruction-tuned "
                f"model, point model.tokenizer at a folder whose tokenizer has one (chat_template.jinja), or give plain prompts"
            )
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages or ()]
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        # A last message of the assistant is the beginning of the answer: the model goes on from it.
        prefill = messages[-1]["role"] == "assistant"
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=not prefill,
                continue_final_message=prefill,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # noqa: BLE001 - templates are programs: jinja raises its own and Python's errors, all about this row
            raise DataError(
                f"{where}: the tokenizer's chat template refuses the messages (roles: {', '.join(m['role'] for m in messages)}): "
                f"{type(error).__name__}: {error}"
            ) from error
        return _ids(encoded)

    def _plain(self, prompt: Prompt, *, where: str) -> list[int]:
        if self._system_prompt is not None:
            raise DataError(
                f"{where}: data.system_prompt is for chat messages, and this prompt is plain text; remove one of them"
            )
        text = prompt.text or ""
        bos = self._tokenizer.bos_token
        # A text that was made with a template begins with the token already.
        has_bos = isinstance(bos, str) and bool(bos) and text.startswith(bos)
        ids = _ids(self._tokenizer(text, add_special_tokens=not has_bos))
        if ids and ids[-1] == self._tokenizer.eos_token_id:
            # Some tokenizers end every text with the end token: nothing would be left to generate.
            bare = _ids(self._tokenizer(text, add_special_tokens=False))
            if bare[-1:] != ids[-1:]:
                ids = ids[:-1]
        return ids


def check_prompts(rows: PromptRows, encoder: Encoder, *, num_rows: int = 256) -> EncodeCheck:
    """Encode the first `num_rows` rows, before any model is loaded.

    With `data.overlong: error` every row that could be too long is encoded. Raises what `Encoder.encode` raises, and DataError
    when not a single prompt fits the budget.
    """
    checked = overlong = longest = 0

    def encode(row: int) -> bool:
        nonlocal checked, overlong, longest
        encoded = encoder.encode(rows.prompt(row), where=rows.where(row))
        fits = isinstance(encoded, Encoded)
        checked += 1
        overlong += not fits
        longest = max(longest, len(encoded.token_ids) if isinstance(encoded, Encoded) else encoded.num_tokens)
        return fits

    first = min(num_rows, len(rows))
    for row in range(first):
        encode(row)
    if encoder.refuses_overlong:
        for row in range(first, len(rows)):
            if not encoder.surely_fits(rows.prompt(row)):
                encode(row)
    elif overlong == checked and not any(encode(row) for row in range(first, len(rows))):
        raise DataError(
            f"data.max_prompt_tokens: none of the {len(rows)} prompts fits into {encoder.budget} tokens; the longest has {longest}. "
            f"Raise the budget (and rollout.max_model_len with it)"
        )
    if overlong:
        log.warning("%d of %d prompts looked at are over the budget of %d tokens", overlong, checked, encoder.budget)
    return EncodeCheck(num_checked=checked, num_overlong=overlong, max_tokens=longest)


def _ids(encoded: Any) -> list[int]:
    """Token ids of one text: transformers returns a list, or a mapping with `input_ids`, by version and arguments."""
    ids: Sequence[int] = (
        encoded["input_ids"] if isinstance(encoded, Mapping) or hasattr(encoded, "input_ids") else encoded
    )
    if len(ids) and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    return [int(i) for i in ids]
