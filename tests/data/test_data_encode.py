import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from s2rl.config.schema import ColumnsConfig, DataConfig, DataSource
from s2rl.data.encode import Dropped, Encoder, check_prompts
from s2rl.data.rows import PromptRows
from s2rl.data.sources import Rows
from s2rl.errors import DataError, ModelError
from s2rl.types import Encoded, Message, Prompt

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, template=TEMPLATE, adds="<s> $A"):
    """One token per byte, as byte-level tokenizers of real models have them, with a begin and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template)


TOKENIZER = tokenizer()


def config(**data):
    return DataConfig(train=(DataSource(path="rows.jsonl"),), **data)


def chat(*turns):
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    return Prompt(prompt_id="0-0", row=0, epoch=0, messages=messages, answer="2")


def text(content):
    return Prompt(prompt_id="0-0", row=0, epoch=0, text=content, answer="2")


def decoded(prompt, *, tokenizer=TOKENIZER, **data):
    encoded = Encoder(tokenizer, config(**data)).encode(prompt)
    assert isinstance(encoded, Encoded) and encoded.prompt is prompt
    assert all(type(i) is int for i in encoded.token_ids)
    return tokenizer.decode(encoded.token_ids)


def test_messages_go_through_the_chat_template_and_end_where_the_model_answers():
    assert decoded(chat(("user", "1 + 1?"))) == "<s><user>1 + 1?</s><assistant>"


def test_a_chat_prompt_begins_with_one_begin_token_although_the_tokenizer_adds_one_too():
    encoded = Encoder(TOKENIZER, config()).encode(chat(("user", "hi")))
    assert encoded.token_ids[:2].count(0) == 1


def test_the_system_prompt_is_put_in_front_unless_there_is_one():
    assert decoded(chat(("user", "hi")), system_prompt="Be brief.").startswith("<s><system>Be brief.</s><user>hi")
    own = chat(("system", "Be kind."), ("user", "hi"))
    assert decoded(own, system_prompt="Be brief.").startswith("<s><system>Be kind.</s><user>hi")


def test_a_last_message_of_the_assistant_is_continued():
    assert decoded(chat(("user", "hi"), ("assistant", "Let me"))) == "<s><user>hi</s><assistant>Let me"


def test_plain_text_is_encoded_as_it_is_with_one_begin_token():
    assert decoded(text("1 + 1 =")) == "<s>1 + 1 ="
    assert decoded(text("<s>1 + 1 =")) == "<s>1 + 1 ="


def test_an_end_token_that_the_tokenizer_adds_is_taken_off_plain_text():
    ending = tokenizer(adds="<s> $A </s>")
    assert decoded(text("1 + 1 ="), tokenizer=ending) == "<s>1 + 1 ="
    assert decoded(text("one</s>"), tokenizer=tokenizer()) == "<s>one</s>"


def test_plain_text_can_be_made_a_user_message():
    assert decoded(text("hi"), plain_prompts="chat") == "<s><user>hi</s><assistant>"
    both = decoded(text("hi"), plain_prompts="chat", system_prompt="Be brief.")
    assert both == "<s><system>Be brief.</s><user>hi</s><assistant>"


def test_a_system_prompt_over_plain_text_is_refused():
    with pytest.raises(DataError, match=r"Set data\.plain_prompts: chat"):
        Encoder(TOKENIZER, config(system_prompt="Be brief.")).encode(text("hi"))


def test_messages_without_a_chat_template_are_refused_with_the_remedy():
    with pytest.raises(ModelError, match=r"rows\.jsonl, line 1.*no chat template.*model\.tokenizer"):
        Encoder(tokenizer(template=None), config()).encode(chat(("user", "hi")), where="rows.jsonl, line 1")
    assert decoded(text("hi"), tokenizer=tokenizer(template=None)) == "<s>hi"


def test_messages_that_the_template_refuses_are_named():
    with pytest.raises(DataError, match=r"prompt 0-0 \(row 0\).*roles: tool.*unknown role"):
        Encoder(TOKENIZER, config()).encode(chat(("tool", "hi")))


def test_a_prompt_that_fills_the_budget_is_kept_and_one_token_more_is_dropped():
    encoder = Encoder(TOKENIZER, config(max_prompt_tokens=5))
    assert len(encoder.encode(text("abcd")).token_ids) == 5
    dropped = encoder.encode(text("abcde"))
    assert isinstance(dropped, Dropped)
    assert (dropped.prompt.text, dropped.reason, dropped.num_tokens) == ("abcde", "prompt over budget", 6)


def test_a_prompt_over_the_budget_is_refused_when_the_setting_says_so():
    encoder = Encoder(TOKENIZER, config(max_prompt_tokens=5, overlong="error"))
    with pytest.raises(DataError, match=r"line 9: the prompt has 6 tokens, data\.max_prompt_tokens allows 5"):
        encoder.encode(text("abcde"), where="rows.jsonl, line 9")


# ---- the check before the run


class CountingTokenizer:
    """Counts the texts that are encoded."""

    def __init__(self):
        self.calls = 0
        self.chat_template, self.bos_token, self.eos_token_id, self.bos_token_id = None, "<s>", 1, 0

    def __call__(self, text, **kwargs):
        self.calls += 1
        return TOKENIZER(text, **kwargs)


def rows(*lengths):
    table = Rows([{"prompt": "a" * n, "answer": "2"} for n in lengths], name="rows.json")
    return PromptRows([table], columns=ColumnsConfig(answer="answer"))


def test_the_check_counts_prompts_over_the_budget(caplog):
    with caplog.at_level(logging.WARNING):
        check = check_prompts(rows(3, 30, 5, 40), Encoder(TOKENIZER, config(max_prompt_tokens=10)))
    assert (check.num_checked, check.num_overlong, check.max_tokens) == (4, 2, 41)
    assert "2 of 4 prompts" in caplog.text


def test_the_check_looks_at_the_first_rows_only():
    counting = CountingTokenizer()
    check = check_prompts(rows(*[3] * 100), Encoder(counting, config()), num_rows=10)
    assert check.num_checked == counting.calls == 10


def test_the_check_finds_the_first_row_of_messages_however_late_it_comes():
    table = Rows(
        [{"prompt": "a", "answer": 1}] * 50 + [{"prompt": [{"role": "user", "content": "a"}], "answer": 1}], name="x"
    )
    mixed = PromptRows([table], columns=ColumnsConfig(answer="answer"))
    with pytest.raises(ModelError, match=r"x, row 50: .*no chat template"):
        check_prompts(mixed, Encoder(tokenizer(template=None), config()), num_rows=10)


def test_the_check_looks_further_while_nothing_fits_and_refuses_data_that_never_does():
    encoder = Encoder(TOKENIZER, config(max_prompt_tokens=10))
    assert check_prompts(rows(*[30] * 20, 3, 30), encoder, num_rows=4).num_checked == 21
    with pytest.raises(DataError, match="none of the 20 prompts fits into 10 tokens; the longest has 31"):
        check_prompts(rows(*[30] * 20), encoder, num_rows=4)


def test_with_refusal_every_row_that_may_be_too_long_is_encoded_and_short_ones_are_not():
    counting = CountingTokenizer()
    encoder = Encoder(counting, config(max_prompt_tokens=300, overlong="error"))
    assert check_prompts(rows(*[3] * 50, 250), encoder, num_rows=10).num_checked == 11
    assert counting.calls == 11
    with pytest.raises(DataError, match=r"rows\.json, row 50: the prompt has 401 tokens"):
        check_prompts(rows(*[3] * 50, 400), encoder, num_rows=10)
