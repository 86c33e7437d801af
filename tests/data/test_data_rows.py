import datetime
import decimal
import json

import pytest

from s2rl.config.schema import ColumnsConfig, DataSource
from s2rl.data.rows import load_rows, parse_row
from s2rl.errors import DataError
from s2rl.types import Message

GOOD = {"prompt": "1 + 1 =", "reward_model": {"ground_truth": "2"}}


def parse(row, **columns):
    return parse_row(row, columns=ColumnsConfig(**columns), where="data.jsonl, line 4")


def refusal(row, **columns):
    with pytest.raises(DataError) as caught:
        parse(row, **columns)
    assert str(caught.value).startswith("data.jsonl, line 4: ")
    return str(caught.value)


def test_dotted_columns_reach_into_nested_ones():
    assert parse({"a": {"b": {"c": "2"}}, "p": "?"}, prompt="p", answer="a.b.c").answer == "2"


def test_a_column_whose_name_has_a_dot_comes_before_a_nested_one():
    row = {"prompt": "?", "reward_model.ground_truth": "flat", "reward_model": {"ground_truth": "nested"}}
    assert parse(row).answer == "flat"
    assert parse({"prompt": "?", "a.b": {"c": "2"}}, answer="a.b.c").answer == "2"


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (72, "72"),
        (72.0, "72"),
        (51.75, "51.75"),
        (-0.5, "-0.5"),
        (1e30, "1e+30"),
        (True, "True"),
        ("  72 ", "  72 "),
        (decimal.Decimal("72.50"), "72.50"),
        (["a", 1], '["a", 1]'),
        ({"target": ["x"]}, '{"target": ["x"]}'),
        (datetime.date(2024, 1, 2), "2024-01-02"),
    ],
)
def test_answers_become_text(value, answer):
    assert parse({"prompt": "?", "answer": value}, answer="answer").answer == answer


@pytest.mark.parametrize("value", [None, "", "  ", float("nan"), [], {}])
def test_a_row_without_answer_is_refused(value):
    message = refusal({"prompt": "?", "answer": value}, answer="answer")
    assert "row without answer: no value at 'answer' (data.columns.answer)" in message


def test_a_missing_column_lists_those_that_exist():
    message = refusal({"question": "?", "answer": "2"})
    assert "row without prompt: no such column at 'prompt' (data.columns.prompt)" in message
    assert "the row has the columns: question, answer" in message


def test_a_missing_nested_column_lists_the_fields_that_exist():
    message = refusal({"prompt": "?", "reward_model": {"style": "rule", "truth": "2"}})
    assert "no such column at 'reward_model.ground_truth'" in message
    assert "column 'reward_model' has the fields: style, truth" in message


def test_optional_columns_may_be_absent_only_while_they_have_their_default_names():
    row = parse(GOOD)
    assert (row.data_source, row.extra) == ("", {})
    assert parse({**GOOD, "data_source": None, "extra_info": None}).extra == {}
    # As a run folder's config.yaml has them: all defaults are spelled out.
    assert parse(GOOD, **ColumnsConfig().model_dump()).extra == {}
    assert "data source: no such column at 'sauce' (data.columns.data_source)" in refusal(GOOD, data_source="sauce")


def test_extra_fields_must_have_names():
    assert "must hold an object with named fields, not str" in refusal({**GOOD, "extra_info": "text"})


def test_messages_keep_role_and_content():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?", "name": "x"}]
    row = parse({**GOOD, "prompt": prompt})
    assert row.messages == (Message(role="system", content="Be brief."), Message(role="user", content="?"))
    assert row.text is None


def test_text_parts_of_a_message_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1"}]
    assert parse({**GOOD, "prompt": [{"role": "user", "content": parts}]}).messages[0].content == "1 + 1"
    parts.append({"type": "image", "image": "a.png"})
    assert "only text is supported" in refusal({**GOOD, "prompt": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "is empty"),
        ([], "not an empty list"),
        (3, "not int"),
        ({"role": "user"}, "not dict"),
        (["text"], "message 0 of the prompt must be an object"),
        ([{"content": "?"}], "must be an object with the texts role and content"),
        ([{"role": "user", "content": None}], "message 0 of the prompt has no text"),
        ("half \ud800", "half a surrogate pair at character 5"),
    ],
)
def test_a_prompt_of_another_shape_is_refused(prompt, reason):
    assert reason in refusal({**GOOD, "prompt": prompt})


def test_every_row_is_checked_before_the_run_begins(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "?", "answer": 1, "data_source": f"source {i % 3}"} for i in range(50)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"prompt": "last"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 51: row without answer"):
        load_rows([DataSource(path=str(path))], columns=ColumnsConfig(answer="answer"))
    loaded = load_rows([DataSource(path=str(path), limit=50)], columns=ColumnsConfig(answer="answer"))
    assert {name: where.rpartition(", ")[2] for name, where in loaded.data_sources.items()} == {
        "source 0": "line 1",
        "source 1": "line 2",
        "source 2": "line 3",
    }


def test_evaluation_prompts_come_in_order_with_ids_of_their_own(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(3)))
    rows = load_rows([DataSource(path=str(path))], columns=ColumnsConfig(answer="answer"))
    assert [p.prompt_id for p in rows.prompts(prefix="eval-")] == ["eval-0-0", "eval-0-1", "eval-0-2"]
    assert [p.text for p in rows.prompts()] == ["0?", "1?", "2?"]
