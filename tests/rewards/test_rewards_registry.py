import logging
import subprocess
import sys

import pytest

from s2rl.config.schema import RewardConfig
from s2rl.errors import ConfigError, DataError
from s2rl.rewards import RewardInput
from s2rl.rewards.plan import RewardPlan
from s2rl.rewards.registry import BUILT_IN, load_function
from s2rl.types import Score

KEY = "rewards.functions[0].function"


def refusal(name, **args):
    with pytest.raises(ConfigError) as caught:
        load_function(name, args=args, key=KEY)
    message = str(caught.value)
    assert message.startswith(KEY) and repr(name) in message
    return message


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_built_in_name_loads_and_scores(name):
    result = load_function(name, args={})(RewardInput(text="\\boxed{4} #### 4", answer="4"))
    assert isinstance(result, float | Score)


def test_a_dotted_path_loads_with_its_args_filled_in():
    function = load_function("rewards_for_tests:behave", args={"scale": 2.0})
    assert function(RewardInput(text="4", answer="4")) == 2.0


def test_a_path_may_lead_into_a_class():
    assert load_function("rewards_for_tests:Weighted.score", args={})(RewardInput(text="", answer="")) == 0.25


def test_an_unknown_name_lists_what_exists_and_the_nearest():
    message = refusal("exact_mach")
    assert "Did you mean 'exact_match'?" in message
    assert all(name in message for name in BUILT_IN)


def test_a_dot_in_place_of_the_colon_is_explained():
    assert "rewards_for_tests:behave" in refusal("rewards_for_tests.behave")


def test_a_module_that_does_not_exist_is_named_with_the_place_that_was_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("no_such_module:f")
    assert "No module named 'no_such_module'" in message and str(tmp_path) in message


def test_whatever_an_import_raises_is_reported(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("def f(item):\n  return 1/\n")
    (tmp_path / "raising_rewards.py").write_text("raise KeyError('settings')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "SyntaxError" in refusal("broken_rewards:f")
    assert "KeyError: 'settings'" in refusal("raising_rewards:f")


def test_a_missing_function_suggests_near_names():
    assert "did you mean behave" in refusal("rewards_for_tests:behav")


def test_what_is_no_plain_function_is_refused():
    assert "is a int, not a function" in refusal("rewards_for_tests:not_a_function")
    assert "async def" in refusal("rewards_for_tests:asynchronous")


def test_args_that_the_function_does_not_take_are_refused_with_its_signature():
    message = refusal("numeric", tolerence=0.1)
    assert "tolerence" in message and "tolerance: float = 0.0" in message
    assert "missing a required argument: 'value'" in refusal("rewards_for_tests:constant")


def test_the_registry_is_light_enough_for_a_grading_process():
    heavy = ("torch", "pydantic", "transformers", "sympy")
    code = f"import s2rl.rewards.worker, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


# ---- which functions apply, and how scores are put together


def plan(*functions):
    return RewardPlan([RewardConfig(**f) for f in functions])


def test_functions_are_chosen_by_data_source():
    p = plan(
        {"function": "gsm8k", "data_sources": ("gsm8k",)}, {"function": "math_boxed", "data_sources": ("math", "aime")}
    )
    assert p.applicable("gsm8k") == (0,)
    assert p.applicable("aime") == (1,)
    assert p.applicable("other") == ()


def test_a_function_without_data_sources_applies_to_all():
    p = plan({"function": "numeric"}, {"function": "gsm8k", "data_sources": ("gsm8k",)})
    assert p.applicable("") == (0,)
    assert p.applicable("gsm8k") == (0, 1)


def test_a_data_source_without_a_reward_is_refused_with_its_row():
    p = plan({"function": "gsm8k", "data_sources": ("gsm8k",)})
    with pytest.raises(
        DataError, match=r"data\.jsonl, line 7: no reward function applies to data source 'math'.*'gsm8k'"
    ):
        p.check({"gsm8k": "data.jsonl, line 1", "math": "data.jsonl, line 7"})


def test_a_function_that_applies_to_no_row_is_warned_about(caplog):
    p = plan({"function": "numeric"}, {"function": "gsm8k", "data_sources": ("gsm8K",)})
    with caplog.at_level(logging.WARNING):
        p.check({"gsm8k": "data.jsonl, line 1"})
    assert "gsm8k applies to no row" in caplog.text


def test_scores_are_summed_by_weight_and_keep_their_parts():
    p = plan({"function": "math_boxed", "weight": 0.8}, {"function": "mine.module:length", "weight": -0.5})
    score = p.combine({0: Score(total=1.0, parts={"accuracy": 1.0}), 1: Score(total=0.4)})
    assert score.total == pytest.approx(0.6)
    assert score.parts == {"math_boxed": 1.0, "math_boxed/accuracy": 1.0, "length": 0.4}


def test_the_same_function_twice_keeps_two_names():
    assert plan({"function": "numeric"}, {"function": "a.b:numeric"}, {"function": "numeric"}).names == (
        "numeric",
        "numeric_2",
        "numeric_3",
    )
