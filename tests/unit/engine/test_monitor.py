import io
import json
import math
import resource
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trilithon.config import MonitorConfig
from trilithon.engine.monitor import Csv, Meter, Monitor
from trilithon.errors import ConfigError


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_hold_every_value_of_the_steps_to_be_recorded(tmp_path):
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=3, quiet=True))
    for step in range(1, 10):
        monitor.record(step, {"loss": 1 / step, "lr": 0.1})
    monitor.close()
    written = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written] == [3, 6, 9]
    assert [line["loss"] for line in written] == [1 / 3, 1 / 6, 1 / 9]
    assert all(line["time"] > 0 for line in written)


def test_a_record_can_be_asked_for_at_any_step(tmp_path):
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=100, quiet=True))
    monitor.record(7, {"validation/loss": 2.0}, always=True)
    assert lines(tmp_path / "metrics.jsonl")[0]["validation/loss"] == 2.0  # there before it is closed
    monitor.close()


def test_values_that_are_not_finite_still_make_valid_json(tmp_path):
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=1, quiet=True))
    monitor.record(1, {"loss": math.nan, "norm": math.inf})
    monitor.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["loss"] is None and line["norm"] is None


def test_csv_leaves_the_seconds_out_where_two_columns_are_read(tmp_path):
    sink = Csv(tmp_path, times=False)
    sink.write(3, 1.7e9, {"mine/value": 0.5})
    sink.close()
    assert (tmp_path / "mine_value.csv").read_text().splitlines() == ["step,value", "3,0.5"]


def test_csv_has_one_file_for_each_value(tmp_path):
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=1, csv=True, jsonl=False, quiet=True))
    monitor.record(1, {"loss": 0.1})
    monitor.record(2, {"loss": 0.25, "validation/loss": 3.0})
    monitor.close()
    rows = (tmp_path / "csv" / "loss.csv").read_text().splitlines()
    assert rows[0] == "step,time,value"
    assert [(int(row.split(",")[0]), float(row.split(",")[2])) for row in rows[1:]] == [(1, 0.1), (2, 0.25)]
    assert len((tmp_path / "csv" / "validation_loss.csv").read_text().splitlines()) == 2
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_reads_the_events_back(tmp_path):
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=1, tensorboard=True, quiet=True))
    monitor.record(1, {"loss": 2.0})
    monitor.record(2, {"loss": 1.5})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.5)]


def test_other_ranks_write_and_print_nothing(tmp_path):
    stream = io.StringIO()
    monitor = Monitor(MonitorConfig(folder=tmp_path / "m", every=1, profile_step=1), rank=1, stream=stream)
    for step in (1, 2):
        monitor.on_step(step)
        monitor.record(step, {"loss": 1.0})
    monitor.close()
    assert not (tmp_path / "m").exists() and stream.getvalue() == ""


def test_a_line_tells_the_step_and_its_values():
    stream = io.StringIO()
    Monitor(MonitorConfig(every=2), stream=stream).record(4, {"loss": 3.14159, "lr": 1e-3})
    assert stream.getvalue() == "step 4  loss 3.142  lr 0.001\n"


def test_timers_add_their_mean_to_the_next_record(tmp_path):
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=1, quiet=True))
    for _ in range(3):
        with monitor.timer("forward"):
            sum(range(1000))
    monitor.record(1, {"loss": 1.0})
    monitor.record(2, {"loss": 1.0})
    monitor.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert 0 < first["seconds/forward"] < 1 and "seconds/forward" not in second


def test_a_profile_holds_operators_timers_and_details(tmp_path):
    config = MonitorConfig(folder=tmp_path, profile_step=2, quiet=True)
    monitor = Monitor(config, details=lambda: {"memory/parameters": 1024})
    for step in (1, 2, 3):
        monitor.on_step(step)
        with monitor.timer("forward"):
            torch.ones(50, 50) @ torch.ones(50, 50)
    monitor.close()
    text = (tmp_path / "profile-step2.txt").read_text()
    assert "aten::mm" in text and "seconds/forward" in text and "memory/parameters: 1,024" in text
    assert len(list(tmp_path.glob("profile*"))) == 1


def test_a_profile_of_the_last_step_is_finished_on_closing(tmp_path):
    monitor = Monitor(MonitorConfig(folder=tmp_path, profile_step=1, quiet=True))
    monitor.on_step(1)
    torch.ones(5, 5) @ torch.ones(5, 5)
    monitor.close()
    monitor.close()
    assert "aten::mm" in (tmp_path / "profile-step1.txt").read_text()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"monitor\.folder=.*file cannot be written to"):
        Monitor(MonitorConfig(folder=tmp_path / "file"))


def test_a_meter_is_the_weighted_mean_since_it_was_read():
    meter = Meter()
    meter.add(1.0, weight=3)
    meter.add(5.0)
    assert meter.read() == 2.0
    assert math.isnan(meter.read())


def test_a_full_disk_ends_the_records_and_not_the_run(tmp_path, caplog):
    """A limit on the size of files stands for the end of a disk: the last write that meets it is cut short."""
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=1, csv=True, quiet=True))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monitor.record(1, {"loss": 1.0})
    one = (tmp_path / "metrics.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * one + one // 2, hard))
    try:
        for step in (2, 3, 4, 5):
            monitor.record(step, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monitor.record(6, {"loss": 1.0})
    monitor.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3], "and not half a line more"
    rows = (tmp_path / "csv" / "loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5", "6"]
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith(f"From step 4 on nothing is written to JsonLines in {tmp_path} (")


def test_tensorboard_stops_before_its_own_thread_meets_a_full_disk(tmp_path, caplog, monkeypatch):
    monitor = Monitor(MonitorConfig(folder=tmp_path, every=1, tensorboard=True, jsonl=False, quiet=True))
    monitor.record(1, {"loss": 1.0})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monitor.record(2, {"loss": 1.0})
    monitor.record(3, {"loss": 1.0})
    monitor.close()
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("From step 2 on nothing is written to TensorBoard") and "No space left" in told
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1]
