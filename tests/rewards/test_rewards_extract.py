import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mathruler.grader import extract_boxed_content

from s2rl.rewards.extract import has_think_format, last_boxed, last_number, marked_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("it is 5", 5),
        ("it is 5.", 5),
        ("so -5", -5),
        ("so \N{MINUS SIGN}5", -5),
        ("10-5", 5),
        ("x = -5, or (3)-2", 2),
        ("1,234,567", 1234567),
        ("1,234.50", Fraction(2469, 2)),
        ("1,2,3", 3),
        (r"1{,}234", 1234),
        (r"$1\,234$", 1234),
        ("$5", 5),
        ("-$5", -5),
        ("50%", 50),
        ("5kg", 5),
        (".5", Fraction(1, 2)),
        ("and...5", 5),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\dfrac{ -3 }{ 4 }", Fraction(-3, 4)),
        ("1.5e-2", Fraction(3, 200)),
        ("答案是5。", 5),
        ("7 apples of type x2", 7),
        ("H2O", None),
        ("1/0", None),
        ("nothing", None),
        ("", None),
        ("9" * 1000, None),
        ("1e9999", None),
    ],
)
def test_the_last_number_of_a_text_is_read(text, value):
    assert last_number(text) == value


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_any_decimal_is_read_back_with_and_without_thousands_separators(value):
    assert last_number(f"first 17, then {value:f}.") == Fraction(value)
    assert last_number(f"first 17, then {value:,f} in total") == Fraction(value)


@settings(deadline=None)
@given(st.text())
def test_numbers_are_looked_for_in_any_text_without_an_error(text):
    last_number(text)
    marked_number(text)
    last_number(text.join(["\\frac{", "1,", "e", "/"]))


@pytest.mark.parametrize(
    "piece", ["9", "1,", "111,", "\\frac{", "-", "1/", ".1", "1e", "\\boxed{", "<think></think>", "}"]
)
def test_extraction_is_linear_in_adversarial_texts(piece):
    text = piece * (200_000 // len(piece))
    began = time.process_time()
    last_number(text)
    last_boxed(text)
    has_think_format(text)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 72", 72),
        ("####72", 72),
        ("#### $1,000", 1000),
        ("#### -$5", -5),
        ("#### 1 #### -4.", -4),
        ("72", None),
        ("#### x 3", None),
    ],
)
def test_the_number_behind_the_last_marker_is_read(text, value):
    assert marked_number(text) == value


BALANCED = st.recursive(
    st.text(alphabet="ab1+\\ ^", max_size=5),
    lambda inner: st.builds(lambda a, b, c: f"{a}{{{b}}}{c}", inner, inner, inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    before=st.text(alphabet="ab{}\\boxed ", max_size=30),
    content=BALANCED,
    after=st.text(alphabet="ab{} \\", max_size=20),
)
def test_a_balanced_box_is_found_whatever_stands_around_it(before, content, after):
    assert last_boxed(f"{before}\\boxed{{{content}}}{after}") == content.strip()


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["\\boxed{", "{", "}", "x", "\\", "boxed", " ", "\\{", "\\}"]), max_size=30).map("".join)
)
def test_box_extraction_agrees_with_mathruler(text):
    assert (last_boxed(text) if last_boxed(text) is not None else "None") == extract_boxed_content(text)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "\\boxed{", "}", "x", "\n", "{"]), max_size=12).map("".join))
def test_the_think_format_is_that_of_the_regular_expression(text):
    assert has_think_format(text) == bool(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", text, re.DOTALL))
