import io
import math

import pytest

from trilithon.pretrain.progress import StepView, human_bytes, human_count, human_time, make_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def view(step: int) -> StepView:
    return StepView(step, 2.5, 1e-3, 0.75, 12_345.0, {"parameters": 1536, "gradients": 0}, 2.25)


def test_plain_lines_come_first_last_and_every_few_steps():
    stream = io.StringIO()
    display = make_display(25, every=10, rank=0, quiet=False, stream=stream)
    for step in range(1, 26):
        display.step(view(step))
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    for shown in ("loss 2.5000", "val 2.2500", "lr 1.00e-03", "norm 0.750", "12.3k tokens/s", "parameters 1.5 KiB"):
        assert shown in lines[1]
    assert "gradients" not in lines[1] and "left 0:0" in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    display = make_display(3, every=1, rank=0, quiet=False, stream=stream)
    display.say("opening")
    for step in (1, 2, 3):
        display.step(view(step))
    display.close()
    text = stream.getvalue()
    assert "\x1b[" in text and "opening" in text and "3/3" in text and "loss 2.5000" in text
    assert "mem parameters 1.5 KiB" in text


@pytest.mark.parametrize(("rank", "quiet"), [(1, False), (0, True)])
def test_other_ranks_and_quiet_runs_show_nothing(rank, quiet):
    stream = Terminal()
    display = make_display(3, every=1, rank=rank, quiet=quiet, stream=stream)
    display.say("opening")
    display.step(view(1))
    display.close()
    assert stream.getvalue() == ""


def test_a_validation_that_has_not_happened_is_not_shown():
    assert "val" not in StepView(1, 2.5, 1e-3, 0.75, 10.0, {}, math.nan).text()


def test_numbers_are_shown_for_people():
    assert [human_bytes(size) for size in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    assert [human_count(number) for number in (7, 12_345, 2.5e6)] == ["7", "12.3k", "2.5M"]
    assert [human_time(seconds) for seconds in (9, 75, 3661)] == ["0:09", "1:15", "1:01:01"]
