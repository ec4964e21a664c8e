"""`run_ranks`: values, surroundings and failures of bodies on several ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import rank_bodies as bodies
import torch

from trilithon.errors import LaunchError
from trilithon.testing import Ending, RanksError, run_ranks, run_ranks_raw


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text() if os.path.exists(f"/proc/{pid}") else False


def wait_until_gone(pids: list[int], limit_s: float = 5.0) -> list[int]:
    ends_at = time.monotonic() + limit_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < ends_at:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_come_back_in_order_of_rank(world_size):
    total = sum(5 + rank for rank in range(world_size))
    assert run_ranks(bodies.sum_of_ranks, world_size, 5) == [total] * world_size
    assert [value[0].item() for value in run_ranks(bodies.big_value, world_size, 200_000)] == list(range(world_size))


def test_every_rank_starts_with_the_same_seeds_one_thread_and_the_callers_surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRILITHON_TEST_SETTING", "from the caller")
    first, second = run_ranks(bodies.surroundings, 2)
    assert (first.pop("rank"), second.pop("rank")) == (0, 1)
    assert first == second
    assert first["threads"] == 1
    assert first["backend"] == "gloo"
    assert first["folder"] == str(tmp_path)
    assert first["setting"] == "from the caller"
    assert run_ranks(bodies.surroundings, 2)[0]["draws"] == first["draws"]


def test_env_adds_to_the_environment_of_the_ranks_only():
    seen = run_ranks(bodies.surroundings, 2, env={"TRILITHON_TEST_SETTING": "extra"})
    assert [one["setting"] for one in seen] == ["extra", "extra"]
    assert "TRILITHON_TEST_SETTING" not in os.environ


def test_without_init_the_body_makes_the_group_from_the_environment():
    assert run_ranks(bodies.own_group, 3, init=False) == [(False, 6, 3)] * 3


def test_a_failed_assert_shows_its_traceback_its_locals_and_what_the_ranks_printed():
    with pytest.raises(RanksError) as caught:
        run_ranks(bodies.last_rank_asserts_and_the_rest_wait, 3, 42)
    message = str(caught.value)
    assert message.startswith("rank 2 of 3 failed first: AssertionError")
    assert 'assert found["answer"] == expected' in message
    assert "found = {'answer': 41}" in message
    assert "rank 0: still running when another rank failed; ended" in message
    assert "rank 2 says hello" in message
    assert "in last_rank_asserts_and_the_rest_wait" in message.split("--- output of rank 0")[1]  # where rank 0 waited
    assert [result.ending for result in caught.value.results] == [Ending.ENDED, Ending.ENDED, Ending.RAISED]
    assert isinstance(caught.value, LaunchError)


@pytest.mark.parametrize("late_rank", [0, 1])
def test_the_rank_that_failed_first_is_the_one_shown(late_rank):
    with pytest.raises(
        RanksError, match=f"^rank {1 - late_rank} of 2 failed first: ValueError: the first failure"
    ) as caught:
        run_ranks(bodies.both_raise_one_later, 2, late_rank)
    assert f"rank {late_rank}: KeyError: 'the second failure'" in str(caught.value)
    assert caught.value.first.rank == 1 - late_rank


def test_a_rank_killed_by_a_signal_is_named_before_the_errors_it_causes_in_others():
    with pytest.raises(RanksError, match=r"^rank 0 of 2 failed first: killed by signal SIGKILL"):
        run_ranks(bodies.one_is_killed_in_a_collective, 2)


def test_a_rank_that_exits_before_its_body_is_over_is_a_failure_even_with_status_zero():
    with pytest.raises(RanksError, match="rank 1 of 2 failed first: exited with status 0"):
        run_ranks(bodies.one_exits, 2, 0)
    with pytest.raises(RanksError, match="asked to exit with status 0"):
        run_ranks(bodies.exits_politely, 1, 0)


def test_ranks_that_are_not_done_in_time_are_ended_and_show_where_each_one_was(tmp_path):
    started = time.monotonic()
    with pytest.raises(RanksError, match=r"2 of 2 ranks \(rank 0, 1\) were not done within 1.5 s") as caught:
        run_ranks(bodies.one_never_arrives, 2, str(tmp_path), timeout_s=1.5)
    assert time.monotonic() - started < 30
    waiting, sleeping = (result.output for result in caught.value.results)
    assert "in barrier" in waiting
    assert "in oversleep" in sleeping
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert wait_until_gone(pids) == []


def test_a_rank_that_stopped_itself_is_ended_too():
    (result,) = run_ranks_raw(bodies.stops_itself, 1, timeout_s=1.0)
    assert (result.ending, result.exit_code) == (Ending.TIMED_OUT, -signal.SIGKILL)
    assert "in stops_itself" in result.output


def test_what_a_rank_started_ends_with_it(tmp_path):
    run_ranks(bodies.leaves_a_child_behind, 1, str(tmp_path))
    (pid,) = (int(path.name) for path in tmp_path.iterdir())
    assert wait_until_gone([pid]) == []


def test_shared_memory_of_a_killed_rank_is_removed():
    name = f"trilithon-test-{os.getpid()}"
    (result,) = run_ranks_raw(bodies.leaves_shared_memory_behind, 1, name)
    assert result.ending is Ending.KILLED
    assert not os.path.exists(f"/dev/shm/{name}")


def test_raw_results_carry_exit_codes_output_and_values_and_do_not_raise():
    first, second = run_ranks_raw(bodies.one_exits, 2, 7)
    assert (first.ending, first.exit_code, first.value) == (Ending.RETURNED, 0, "done")
    assert (second.ending, second.exit_code, second.value) == (Ending.EXITED, 7, None)
    (polite,) = run_ranks_raw(bodies.exits_politely, 1, 3)
    assert (polite.exit_code, polite.output) == (3, "good bye\n")
    killed = run_ranks_raw(bodies.one_is_killed_in_a_collective, 2)
    assert (killed[0].ending, killed[0].exit_code) == (Ending.KILLED, -signal.SIGKILL)
    assert (killed[1].ending, killed[1].exit_code) == (Ending.RAISED, 1)


def test_raw_lets_the_other_ranks_run_on_unless_told_to_end_them():
    first, second = run_ranks_raw(bodies.both_raise_one_later, 2, 1)
    assert "the first failure" in first.error
    assert "the second failure" in second.error
    ended = run_ranks_raw(bodies.last_rank_asserts_and_the_rest_wait, 2, 42, end_on_failure=True)
    assert [result.ending for result in ended] == [Ending.ENDED, Ending.RAISED]


def test_long_output_keeps_its_end_and_both_streams():
    with pytest.raises(RanksError, match="without its first") as caught:
        run_ranks(bodies.writes_many_lines, 1)
    assert "line 999\nstraight to the descriptor" in str(caught.value)
    assert "line 900\n" not in str(caught.value)
    assert "line 0\n" in caught.value.first.output


def test_a_value_that_cannot_be_pickled_fails_in_the_rank_with_its_reason():
    with pytest.raises(RanksError, match="lambda"):
        run_ranks(bodies.gives_back_a_function, 1)


def test_a_rank_may_run_ranks_itself():
    assert run_ranks(bodies.runs_ranks_itself, 2, timeout_s=60) == [[3.0, 3.0], []]


def test_bodies_and_arguments_that_cannot_travel_are_refused_with_a_way_out():
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(lambda: None, 2)
    with pytest.raises(TypeError, match="cannot be pickled for the ranks"):
        run_ranks(bodies.sum_of_ranks, 2, lambda: None)
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(bodies.sum_of_ranks, 0, 1)


def test_tensors_travel_both_ways():
    assert torch.equal(run_ranks(bodies.big_value, 2, 3)[1], torch.tensor([1, 2, 3]))
