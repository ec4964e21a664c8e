import json

from trilithon.config import MonitorConfig
from trilithon.engine.monitor import Monitor
from trilithon.pretrain.records import take_back


def record(folder, steps, first_step=1):
    monitor = Monitor(
        MonitorConfig(folder=folder, every=1, csv=True, tensorboard=True, quiet=True), first_step=first_step
    )
    for step in steps:
        monitor.record(
            step, {"loss": float(step), "validation/loss": 2.0 * step} if step % 2 else {"loss": float(step)}
        )
    monitor.close()


def test_what_lies_behind_the_checkpoint_is_taken_back_and_comes_again(tmp_path):
    record(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "lo')  # killed while it wrote
    take_back(tmp_path, 3)
    record(tmp_path, range(4, 8), first_step=4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    rows = (tmp_path / "csv" / "loss.csv").read_text().splitlines()
    assert rows[0] == "step,time,value" and [int(row.split(",")[0]) for row in rows[1:]] == list(range(1, 8))
    rows = (tmp_path / "csv" / "validation_loss.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows[1:]] == [1, 3, 5, 7]


def test_tensorboard_hides_what_comes_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, range(1, 6))
    record(tmp_path, [4, 5, 6], first_step=4)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_nothing_to_take_back_is_no_error(tmp_path):
    take_back(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
