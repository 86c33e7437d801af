import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from s2rl.config.schema import GradingConfig, RewardConfig
from s2rl.errors import ConfigError, RunError
from s2rl.rewards.pool import GradingPool, check_functions
from s2rl.types import Completion, FinishReason, Message, Prompt, RolloutStatus

BEHAVE = "rewards_for_tests:behave"


def completion(text, *, index=0, num_tokens=3, finish_reason=FinishReason.STOP):
    return Completion(
        group_id="0-0",
        index=index,
        token_ids=np.zeros(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        finish_reason=finish_reason,
        text=text,
    )


def prompt(answer="2", **fields):
    return Prompt(**({"prompt_id": "0-0", "row": 0, "epoch": 0, "text": "1 + 1 =", "answer": answer} | fields))


@contextlib.asynccontextmanager
async def pool_of(*functions, processes=1, limit=30.0, log_path=None):
    configs = tuple(RewardConfig(function=f) if isinstance(f, str) else RewardConfig(**f) for f in functions)
    pool = GradingPool(GradingConfig(functions=configs, processes=processes, time_limit_s=limit), log_path=log_path)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def grade_all(pool, texts):
    return await pool.grade_many([(completion(t, index=i), prompt()) for i, t in enumerate(texts)])


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, *, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


async def test_scores_come_back_in_order_with_the_completions_they_belong_to():
    async with pool_of("numeric", processes=2) as pool:
        texts = [str(i % 3) for i in range(50)]
        rollouts = await grade_all(pool, texts)
    assert [r.completion.index for r in rollouts] == list(range(50))
    assert [r.score.total for r in rollouts] == [float(t == "2") for t in texts]
    assert {r.status for r in rollouts} == {RolloutStatus.SCORED}


async def test_a_function_receives_every_field_of_its_completion_and_row():
    async with pool_of("rewards_for_tests:everything") as pool:
        row = prompt(text=None, messages=(Message(role="user", content="?"),), extra={"index": 41}, data_source="here")
        rollout = await pool.grade(completion("x", num_tokens=9, finish_reason=FinishReason.LENGTH), prompt=row)
    assert rollout.status is RolloutStatus.SCORED
    assert rollout.score.parts == {
        "everything": 1.0,
        "everything/extra": 41.0,
        "everything/roles": 1.0,
        "everything/cut": 1.0,
        "everything/tokens": 9.0,
        "everything/source": 1.0,
    }


async def test_several_functions_are_weighted_and_chosen_by_data_source():
    functions = (
        {"function": "numeric", "weight": 2.0},
        {"function": "rewards_for_tests:constant", "weight": -1.0, "args": {"value": 0.5}, "data_sources": ("b",)},
    )
    async with pool_of(*functions) as pool:
        a, b = await pool.grade_many(
            [(completion("2"), prompt(data_source="a")), (completion("2"), prompt(data_source="b"))]
        )
    assert (a.score.total, dict(a.score.parts)) == (2.0, {"numeric": 1.0})
    assert (b.score.total, dict(b.score.parts)) == (1.5, {"numeric": 1.0, "constant": 0.5, "constant/half": 0.25})


@pytest.mark.parametrize("action", ["loop", "swallow", "c-loop"])
async def test_a_hung_grader_is_killed_and_costs_only_its_own_completion(action):
    async with pool_of(BEHAVE, limit=1.0) as pool:
        hung, *others = await grade_all(pool, [action, "2", "3", "2"])
        stats = pool.stats()
    assert (hung.score.total, hung.status) == (0.0, RolloutStatus.GRADER_TIMEOUT)
    assert [(r.score.total, r.status) for r in others] == [(t, RolloutStatus.SCORED) for t in (1.0, 0.0, 1.0)]
    assert (stats.calls, stats.timeouts, stats.errors, stats.restarts, stats.waiting) == (4, 1, 0, 1, 0)
    assert "no answer within 1 s" in stats.last_error


async def test_a_hung_grader_takes_the_processes_it_started_with_it(tmp_path):
    async with pool_of(BEHAVE, limit=0.5) as pool:
        rollout = await pool.grade(completion(f"child {tmp_path / 'pid'}"), prompt=prompt())
        assert rollout.status is RolloutStatus.GRADER_TIMEOUT
        wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("exit", "exited with 3"),
        ("segfault", "died by signal 11"),
        ("raise", "ValueError: a bad answer (rewards_for_tests.py:"),
        ("sys-exit", "SystemExit"),
        ("nan", "not finite"),
        ("none", "returns a Score or a number, not NoneType"),
        ("text", "returns a Score or a number, not str"),
    ],
)
async def test_a_failing_or_crashing_grader_is_a_zero_and_a_counter(action, reason, tmp_path):
    async with pool_of(BEHAVE, log_path=tmp_path / "graders.log") as pool:
        before, failed, after = await grade_all(pool, ["2", action, "2"])
        stats = pool.stats()
    assert (failed.score.total, failed.status) == (0.0, RolloutStatus.GRADER_ERROR)
    assert [r.score.total for r in (before, after)] == [1.0, 1.0]
    assert (stats.timeouts, stats.errors) == (0, 1)
    assert reason in stats.last_error and stats.last_error.startswith("behave: ")


async def test_a_failed_function_leaves_the_scores_of_the_others():
    async with pool_of(BEHAVE, {"function": "rewards_for_tests:constant", "args": {"value": -0.5}}) as pool:
        rollout = await pool.grade(completion("raise"), prompt=prompt())
    assert rollout.status is RolloutStatus.GRADER_ERROR
    assert rollout.score.total == -0.5


async def test_the_pool_survives_the_death_of_an_idle_process():
    async with pool_of(BEHAVE, processes=2) as pool:
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        rollouts = await grade_all(pool, ["2"] * 20)
        assert [r.status for r in rollouts] == [RolloutStatus.SCORED] * 20
        assert pool.stats().errors == 0


async def test_a_slow_call_within_its_limit_is_scored_even_when_many_wait():
    async with pool_of(BEHAVE, limit=1.5) as pool:
        rollouts = await grade_all(pool, ["sleep 0.25"] * 8)  # 2 s in all: the limit is for each call
    assert {r.status for r in rollouts} == {RolloutStatus.SCORED}


async def test_a_blocked_controller_is_not_taken_for_a_hung_grader():
    async with pool_of(BEHAVE, limit=1.0) as pool:
        task = asyncio.create_task(grade_all(pool, ["2", "2", "2"]))
        await asyncio.sleep(0)
        time.sleep(2.0)  # noqa: ASYNC251 - the point of the test
        assert [r.score.total for r in await task] == [1.0, 1.0, 1.0]


async def test_two_hundred_completions_cost_the_controller_far_less_than_a_millisecond_each():
    costs = []
    async with pool_of("numeric") as pool:
        for _ in range(4):  # the best round: a garbage collection or a busy machine is not what is measured
            groups = [[(completion("word " * 200 + "2", index=i), prompt()) for i in range(8)] for _ in range(25)]
            cpu = time.process_time()
            graded = await asyncio.gather(*map(pool.grade_many, groups))
            costs.append((time.process_time() - cpu) / 200)
            assert [r.score.total for group in graded for r in group] == [1.0] * 200
    assert min(costs) < 0.3e-3


async def test_a_cancelled_caller_leaves_the_pool_usable():
    async with pool_of(BEHAVE, limit=1.0) as pool:
        task = asyncio.create_task(grade_all(pool, ["sleep 0.3", "2", "2"]))
        await asyncio.sleep(0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (await pool.grade(completion("2"), prompt=prompt())).score.total == 1.0
        assert pool.stats().waiting == 0


async def test_a_row_that_cannot_be_sent_fails_alone():
    unpicklable = prompt(extra={"callback": lambda: None})
    async with pool_of(BEHAVE) as pool:
        pairs = [(completion("2"), prompt()), (completion("2"), unpicklable), (completion("2"), prompt())]
        first, bad, last = await pool.grade_many(pairs)
        again = await pool.grade(completion("2"), prompt=unpicklable)
    assert [r.score.total for r in (first, bad, last)] == [1.0, 0.0, 1.0]
    assert bad.status is again.status is RolloutStatus.GRADER_ERROR


async def test_nothing_to_grade_gives_nothing():
    async with pool_of("numeric") as pool:
        assert await pool.grade_many([]) == []


async def test_closing_leaves_no_process_and_ends_open_calls():
    async with pool_of(BEHAVE, processes=2, limit=60.0) as pool:
        pids = pool.pids()
        task = asyncio.create_task(grade_all(pool, ["loop", "2", "loop"]))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await pool.close()
        assert time.monotonic() - began < 5.0
        with pytest.raises(RunError, match="closed"):
            await task
        assert len(pids) == 2 and not any(map(alive, pids))
        with pytest.raises(RunError, match="not running"):
            await pool.grade(completion("2"), prompt=prompt())


async def test_closing_right_after_a_crash_leaves_no_process():
    async with pool_of(BEHAVE) as pool:
        task = asyncio.create_task(grade_all(pool, ["exit", "2"]))
        while not pool.stats().errors:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.001)
    with pytest.raises(RunError, match="closed"):
        await task
    wait_until(lambda: not children())


def children():
    """Living grading processes of this process."""
    own = str(os.getpid())
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == own:
                found += [entry.name] if b"s2rl.rewards.worker" in (entry / "cmdline").read_bytes() else []
    return found


async def test_a_function_that_cannot_be_loaded_refuses_the_run_and_leaves_no_process():
    pool = GradingPool(GradingConfig(functions=(RewardConfig(function="numeric"), RewardConfig(function="nowhere:f"))))
    with pytest.raises(ConfigError, match=r"rewards\.functions\[1\]\.function: 'nowhere:f' does not import"):
        await pool.start()
    assert not children()


def test_functions_can_be_checked_before_anything_else_of_a_run_exists():
    check_functions(GradingConfig(functions=(RewardConfig(function=BEHAVE, args={"scale": 2.0}),), processes=4))
    with pytest.raises(ConfigError, match="scalee"):
        check_functions(GradingConfig(functions=(RewardConfig(function=BEHAVE, args={"scalee": 2.0}),)))
    assert not children()


async def test_a_module_that_kills_its_process_ends_the_start_with_an_error(tmp_path, monkeypatch):
    (tmp_path / "deadly_rewards.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.chdir(tmp_path)
    pool = GradingPool(GradingConfig(functions=(RewardConfig(function="deadly_rewards:f"),)))
    with pytest.raises(RunError, match=r"do not come up.*exit code 9"):
        await pool.start()
    assert not children()


async def test_functions_in_the_working_folder_are_found_although_the_command_is_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def f(item):\n    return 0.75\n")
    monkeypatch.chdir(tmp_path)
    async with pool_of("my_rewards:f") as pool:
        assert (await pool.grade(completion("2"), prompt=prompt())).score.total == 0.75


async def test_grading_processes_are_light_single_threaded_and_separate(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    async with pool_of(BEHAVE) as pool:
        pid, threads, heavy = await grade_all(pool, ["pid", "threads", "torch"])
        assert int(pid.score.total) in pool.pids()
    assert (threads.score.total, heavy.score.total) == (1.0, 0.0)


async def test_what_a_function_prints_goes_to_the_log_file(tmp_path):
    async with pool_of(BEHAVE, log_path=tmp_path / "graders.log") as pool:
        await grade_all(pool, ["print"])
    assert "said by the grader" in (tmp_path / "graders.log").read_text()


SCRIPT = """
    import asyncio, json, os, sys
    sys.path.insert(0, {folder!r})
    import numpy as np
    from s2rl.config.schema import GradingConfig, RewardConfig
    from s2rl.rewards.pool import GradingPool
    from test_rewards_pool import completion, prompt

    print("main script", flush=True)

    async def run():
        functions = (RewardConfig(function="rewards_for_tests:behave"),)
        pool = GradingPool(GradingConfig(functions=functions, time_limit_s=600))
        await pool.start()
        print(json.dumps(pool.pids()), flush=True)
        rollout = await pool.grade(completion(sys.argv[1]), prompt=prompt())
        print(rollout.score.total, flush=True)
        await pool.close()

    asyncio.run(run())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT.format(folder=str(Path(__file__).parent))))
    return path


def test_a_main_script_without_a_guard_runs_once(script):
    out = subprocess.run([sys.executable, script, "2"], capture_output=True, text=True, timeout=60, check=True)
    lines = out.stdout.splitlines()
    assert [lines[0], lines[2]] == ["main script", "1.0"] and len(lines) == 3


def test_a_hung_grader_dies_with_its_controller(script):
    controller = subprocess.Popen([sys.executable, script, "c-loop"], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    controller.stdout.readline()
    (pid,) = json.loads(controller.stdout.readline())
    time.sleep(0.3)
    assert alive(pid)
    controller.kill()
    controller.wait(timeout=10)
    controller.stdout.close()
    wait_until(lambda: not alive(pid))
