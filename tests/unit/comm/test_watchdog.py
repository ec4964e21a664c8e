import os
import time

import pytest
import torch.distributed as dist

from trilithon.comm.journal import Journal
from trilithon.comm.rank_state import main_thread_line, raised_line
from trilithon.comm.watchdog import EXIT_STATUS, Watchdog
from trilithon.contracts import Tag

TAG = Tag("blocks.1", ("blocks.1.weight",), 3, 0)


@pytest.fixture
def watchdog(tmp_path):
    """Rank 0 of two, whose process is not ended but only told to."""
    ended = []
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dog = Watchdog(0.2, store, 0, 2, end_process=ended.append)
    dog.ended = ended
    yield dog
    dog.close()


def wait_until(condition, limit_s=8.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def test_one_rank_needs_no_thread_and_no_store():
    dog = Watchdog(0.1, None, 0, 1)
    dog.follow(Journal("g", (0,)))
    dog.enter("barrier", "g", TAG)
    dog.leave()
    dog.report_failure(ValueError())
    dog.close()
    assert dog._thread is None


def test_a_wait_beyond_the_limit_prints_a_table_and_ends_the_process(watchdog, capsys):
    name = watchdog.follow(Journal("g", (0, 1)))
    watchdog.enter("all_gather", name, TAG, 0)
    wait_until(lambda: watchdog.ended)
    said = capsys.readouterr().err
    assert watchdog.ended == [EXIT_STATUS]
    assert "comm.wait_limit_s is 0.2" in said
    assert "rank 1 ended without a word" in said


def test_a_wait_that_is_over_is_forgotten(watchdog):
    name = watchdog.follow(Journal("g", (0, 1)))
    for _ in range(3):
        watchdog.enter("all_gather", name, TAG, 0)
        time.sleep(0.05)
        watchdog.leave()
    time.sleep(1.2)
    assert watchdog.ended == []


def test_streamed_work_counts_until_it_is_completed(watchdog):
    name = watchdog.follow(Journal("g", (0, 1)))
    watchdog.enter_streamed("all_gather", name, TAG, 0, lambda: True)
    time.sleep(1.3)
    assert watchdog.ended == []
    watchdog.enter_streamed("all_gather", name, TAG, 1, lambda: False)
    wait_until(lambda: watchdog.ended)


def test_two_groups_of_one_name_get_different_names(watchdog):
    kept = Journal("g", (0, 1))
    assert watchdog.follow(kept) == "g"
    assert watchdog.follow(Journal("g", (0, 1))) == "g#2"
    assert watchdog.follow(Journal("g", (0, 1))) == "g#3"  # although the second is gone: names agree between ranks
    assert watchdog.follow(Journal("h", (0,))) == "h"


def test_closing_twice_is_fine_and_stops_the_thread(watchdog):
    watchdog.follow(Journal("g", (0, 1)))
    thread = watchdog._thread
    watchdog.close()
    watchdog.close()
    assert not thread.is_alive()


def test_lines_are_those_of_the_users_program():
    here = os.path.basename(__file__)
    assert main_thread_line().startswith(f"{here}:")
    try:
        dist.get_rank("nonsense")
    except Exception as error:
        assert raised_line(error).startswith(f"{here}:")
        assert "in test_lines_are_those_of_the_users_program" in raised_line(error)
