"""What the agent reports about ranks becomes one message and one exit status."""

import json
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trilithon.pretrain import rank, ranks


def failed(tmp_path, exit_code: int, message: str | None) -> ChildFailedError:
    path = tmp_path / "error.json"
    if message is not None:
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1"}}}))
    return ChildFailedError("train", {0: ProcessFailure(0, 123, exit_code, str(path))})


@pytest.mark.parametrize("exit_code", [1, -signal.SIGTERM])
def test_a_rank_that_told_what_was_wrong_has_failed_with_1_even_if_a_signal_ended_it(tmp_path, exit_code):
    with pytest.raises(ranks.RankFailedError, match="no room") as caught:
        ranks._failure(failed(tmp_path, exit_code, "no room"))
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_orderly_stop_is_no_failure(tmp_path, number):
    assert ranks._failure(failed(tmp_path, 128 + number, None)) == 128 + number


@pytest.mark.parametrize(("restart", "shown"), [("0", True), ("1", True), ("2", False)])
def test_a_failure_before_another_start_is_shown_at_once(tmp_path, monkeypatch, capsys, restart, shown):
    """The launcher shows only what the last start failed with."""
    settings = {rank.OURS: "1", rank.MESSAGE_FILE: str(tmp_path / "error.json")}
    for name, value in {**settings, "TORCHELASTIC_RESTART_COUNT": restart, "TORCHELASTIC_MAX_RESTARTS": "2"}.items():
        monkeypatch.setenv(name, value)
    rank._tell("no room", shown=True)
    assert (capsys.readouterr().err == "no room\n") == shown
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "no room"


def test_a_rank_ended_by_a_signal_without_a_word_has_the_signals_status(tmp_path):
    with pytest.raises(ranks.RankFailedError, match="Rank 0 was ended by SIGKILL") as caught:
        ranks._failure(failed(tmp_path, -signal.SIGKILL, None))
    assert caught.value.exit_status == 137
