"""Prompts to token ids, within the budget.

A tokenizer is whatever `load_tokenizer` returns; this module needs the members of `Tokenizer` and imports no vendor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
        self._system_prompt = config.system_prompt
        self._plain_as_chat = config.plain_prompts == "chat"
        self.budget = config.max_prompt_tokens
        self.refuses_overlong = config.overlong == "error"

    def encode(self, prompt: Prompt, *, where: str | None = None) -> Encoded | Dropped:
        """Token ids of one prompt, ready for generation.

        Over the budget: a `Dropped`, or DataError with `data.overlong: error`. Also raises DataError for a prompt that
        the chat template refuses and ModelError for messages without a chat template. `where` names the row in errors.
        """
        where = where or f"prompt {prompt.prompt_id} (row {prompt.row})"
        messages = self._messages(prompt)
        token_ids = (
            self._plain(prompt.text or "", where=where) if messages is None else self._chat(messages, where=where)
        )
        if not token_ids:
            raise DataError(f"{where}: the prompt gives no token at all; remove or mend the row")
        if len(token_ids) <= self.budget:
            return Encoded(prompt=prompt, token_ids=tuple(token_ids))
        if self.refuses_overlong:
            raise DataError(
                f"{where}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens allows {self.budget}. Raise "
                f"the budget, remove the row, or set data.overlong: drop"
            )
        return Dropped(prompt=prompt, reason=OVERLONG, num_tokens=len(token_ids))

    def surely_fits(self, prompt: Prompt) -> bool:
        """Whether the prompt is so short in bytes that it need not be encoded to know that it fits."""
        # One token has at least one byte; a template adds far fewer than 64 tokens a message and 128 in front.
        texts = [m["content"] for m in self._messages(prompt) or ()] or [prompt.text or ""]
        return 128 + sum(64 + len(text.encode()) for text in texts) <= self.budget

    def _messages(self, prompt: Prompt) -> list[dict[str, str]] | None:
        if prompt.messages is not None:
            messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        elif self._plain_as_chat:
            messages = [{"role": "user", "content": prompt.text or ""}]
        else:
            return None
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages

    def _chat(self, messages: list[dict[str, str]], *, where: str) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"{where}: the prompt is made of chat messages, but the tokenizer has no chat template. Use an "
                f"instruction-tuned model, point model.tokenizer at a folder whose tokenizer has one "
                f"(chat_template.jinja), or give plain prompts"
            )
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
        except Exception as error:
            # Templates are programs: they raise jinja's errors and Python's, all of them about this row.
            roles = ", ".join(m["role"] for m in messages)
            raise DataError(
                f"{where}: the tokenizer's chat template refuses the messages (roles: {roles}): "
                f"{type(error).__name__}: {error}"
            ) from error
        return _ids(encoded)

    def _plain(self, text: str, *, where: str) -> list[int]:
        if self._system_prompt is not None:
            raise DataError(
                f"{where}: data.system_prompt is for chat messages, and this prompt is plain text. Set "
                f"data.plain_prompts: chat to make it a user message, or remove the system prompt"
            )
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
    """Encode the first `num_rows` rows and the first row of each kind, before any model is loaded.

    With `data.overlong: error` every row that could be too long is encoded. Raises what `Encoder.encode` raises, and
    DataError when not a single prompt fits the budget.
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
    for row in (*range(first), *(r for r in rows.first_rows if r >= first)):
        encode(row)
    if encoder.refuses_overlong:
        for row in range(first, len(rows)):
            if not encoder.surely_fits(rows.prompt(row)):
                encode(row)
    elif overlong == checked and not any(encode(row) for row in range(first, len(rows))):
        raise DataError(
            f"data.max_prompt_tokens: none of the {len(rows)} prompts fits into {encoder.budget} tokens; the longest "
            f"has {longest}. Raise the budget (and rollout.max_model_len with it)"
        )
    if overlong:
        log.warning("%d of %d prompts looked at are over the budget of %d tokens", overlong, checked, encoder.budget)
    return EncodeCheck(num_checked=checked, num_overlong=overlong, max_tokens=longest)


def _ids(encoded: Any) -> list[int]:
    """Token ids of one text: transformers returns a list, or a mapping with `input_ids`, by version and arguments."""
    ids: Any = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    if len(ids) and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    return [int(i) for i in ids]
