"""What the agent reports about ranks becomes one message and one exit status."""

import json
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trilithon.pretrain import ranks


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


def test_a_rank_ended_by_a_signal_without_a_word_has_the_signals_status(tmp_path):
    with pytest.raises(ranks.RankFailedError, match="Rank 0 was ended by SIGKILL") as caught:
        ranks._failure(failed(tmp_path, -signal.SIGKILL, None))
    assert caught.value.exit_status == 137
