import io
import math
import sys

import matplotlib.image
import pytest
from rich.console import Console

from trilithon.pretrain.report import History, Report, draw_curve, print_report


def report(tmp_path, **changes) -> Report:
    values = {
        "out": tmp_path,
        "steps": 10,
        "tokens": 20_000,
        "seconds": 4.0,
        "num_parameters": 1_234_567,
        "flops_per_token": 1_000_000,
        "train_loss": 2.5,
        "validation_loss": 2.0 * math.log(2),
        "unigram_entropy": 3.0,
        "bytes_per_token": 4.0,
        "memory": {"parameters": 2048},
        "world_size": 2,
    }
    return Report(**(values | changes))


def printed(report: Report) -> str:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=120))
    return stream.getvalue()


def test_the_table_holds_the_numbers_of_the_run(tmp_path):
    text = printed(report(tmp_path, sample="[bold]once[/bold] upon"))
    for shown in ("10 steps on 2 ranks", "1,234,567", "5.0k tokens/s", "5.0 GFLOP/s", "0.500 bits/byte", "2.0 KiB"):
        assert shown in text
    assert f"{3.0 - 2.0 * math.log(2):.4f} below it" in text
    assert "[bold]once[/bold] upon" in text, "a sample is text, not markup"


def test_a_model_worse_than_no_context_is_not_called_better(tmp_path):
    assert "0.5000 ABOVE it" in printed(report(tmp_path, validation_loss=3.5))


def test_a_stopped_run_claims_no_validation_loss(tmp_path):
    assert "validation" not in printed(report(tmp_path, validation_loss=math.nan, exit_status=130))


def test_the_curve_is_a_picture_with_all_three_lines(tmp_path):
    history = History(train=[(i, 5.0 / i) for i in range(1, 50)], validation=[(10, 1.0), (49, 0.5)])
    assert draw_curve(history, 3.0, tmp_path / "loss.png")
    picture = matplotlib.image.imread(tmp_path / "loss.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 500
    pixels = (picture[:, :, :3] * 255).reshape(-1, 3)
    for name, wanted in {"training": "9bb8d3", "validation": "1f4e79", "entropy": "c0504d"}.items():
        distance = abs(pixels - list(bytes.fromhex(wanted))).sum(axis=1)
        assert distance.min() < 60, f"{name}: no pixel of that colour, edges smoothed"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_curve_of_nothing_is_still_a_picture(tmp_path):
    assert draw_curve(History(), 3.0, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_curve_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_curve(History(), 3.0, tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []
    assert "matplotlib is not installed (pip install" in printed(report(tmp_path))


@pytest.mark.parametrize("tokens", [1.0, 4.0])
def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path, tokens):
    loss = tokens * math.log(2)  # one bit for each byte
    assert report(tmp_path, validation_loss=loss, bytes_per_token=tokens).bits_per_byte == pytest.approx(1.0)
