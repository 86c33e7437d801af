import json
from pathlib import Path

import pytest

from s2rl.rewards import RewardInput
from s2rl.rewards.builtin import exact_match, gsm8k, numeric
from s2rl.rewards.math import math_boxed

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"


def item(text, answer):
    return RewardInput(text=text, answer=answer)


def test_exact_match_leaves_out_surrounding_space_and_minds_case_unless_told():
    assert exact_match(item(" Paris\n", "Paris")) == 1.0
    assert exact_match(item("paris", "Paris")) == 0.0
    assert exact_match(item("paris", "Paris"), ignore_case=True) == 1.0
    assert exact_match(item("It is Paris", "Paris")) == 0.0


def test_exact_match_after_a_marker_takes_the_rest_of_that_line():
    text = "Answer: 3 is wrong.\nSo Answer: 204\nbecause"
    assert exact_match(item(text, "204"), after="Answer:") == 1.0
    assert exact_match(item("204", "204"), after="Answer:") == 0.0


def test_numeric_compares_the_last_number_exactly_or_within_the_tolerance():
    assert numeric(item("2 + 3 = 5", "5")) == 1.0
    assert numeric(item("it is 0.5", "1/2")) == 1.0
    assert numeric(item("1,000 dollars", "1000")) == 1.0
    assert numeric(item("5 or 6", "5")) == 0.0
    assert numeric(item("no idea", "5")) == 0.0
    assert numeric(item("3.14", "3.1416")) == 0.0
    assert numeric(item("3.14", "3.1416"), tolerance=0.01) == 1.0


def test_numeric_refuses_an_answer_without_a_number():
    with pytest.raises(ValueError, match="'Paris' holds no number"):
        numeric(item("5", "Paris"))


def test_gsm8k_grades_against_the_solutions_of_the_real_data_set():
    rows = [json.loads(line) for line in (FIXTURES / "gsm8k.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        number = row["answer"].rpartition("####")[2].strip()
        assert gsm8k(item(row["answer"], row["answer"])).total == 1.0
        assert gsm8k(item(f"so\n#### ${number}.00", number)).total == 1.0
        assert gsm8k(item(f"The answer is {number}.", number)).total == 0.0
        assert gsm8k(item(f"The answer is {number}.", number), flexible=True).total == 1.0


def test_gsm8k_gives_the_format_score_for_a_wrong_number_in_the_right_place():
    score = gsm8k(item("#### 3", "4"), format_score=0.1)
    assert (score.total, score.parts) == (0.1, {"accuracy": 0.0, "format": 1.0})
    assert gsm8k(item("3", "4"), format_score=0.1).total == 0.0


@pytest.mark.parametrize(
    ("found", "answer", "right"),
    [
        (r"\frac{14}{3}", r"\dfrac{14}{3}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        ("p-q", "p - q", True),
        ("q-p", "p - q", False),
        ("x+1", "1+x", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1,000", "1000", True),
        ("41", "42", False),
        ("9" * 3000, "42", False),
    ],
)
def test_boxed_mathematics_is_graded_by_meaning(found, answer, right):
    assert math_boxed(item(rf"hence \boxed{{{found}}}.", answer)).total == float(right)


def test_a_box_is_needed_and_the_last_one_counts():
    assert math_boxed(item("42", "42")).total == 0.0
    assert math_boxed(item("None", "None")).total == 0.0
    assert math_boxed(item(r"\boxed{42} no, \boxed{41}", "42")).total == 0.0
    assert math_boxed(item(r"\boxed{42", "42")).total == 0.0


def test_the_answer_may_be_boxed_itself():
    assert math_boxed(item(r"\boxed{42}", r"thus \boxed{42}")).total == 1.0


def test_format_is_mixed_in_with_its_weight():
    good, bare = r"<think>hm</think> \boxed{42}", r"\boxed{42}"
    assert math_boxed(item(good, "42"), format_weight=0.1).total == pytest.approx(1.0)
    assert math_boxed(item(bare, "42"), format_weight=0.1).total == pytest.approx(0.9)
    assert math_boxed(item(good, "41"), format_weight=0.1).total == pytest.approx(0.1)
    assert math_boxed(item("", "41"), format_weight=0.1).total == 0.0
    assert math_boxed(item(bare, "42")).parts == {"accuracy": 1.0, "format": 0.0}
