"""Profiling step 5 prints for step 5 only, and there is a quiet level at which ten steps print nothing."""

import torch

from trilithon.config import MonitorConfig
from trilithon.engine.monitor import Monitor


def ten_steps(config: MonitorConfig) -> None:
    monitor = Monitor(config)
    model = torch.nn.Linear(4, 4)
    for step in range(1, 11):
        monitor.on_step(step)
        with monitor.timer("forward"):
            loss = model(torch.ones(2, 4)).sum()
        monitor.record(step, {"loss": loss.item()})
    monitor.close()


def test_only_the_profiled_step_prints_a_profile(capfd):
    ten_steps(MonitorConfig(profile_step=5, every=1))
    lines = capfd.readouterr().out.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith("profile of")]
    assert lines[start] == "profile of step 5"
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    assert len(steps) == 10
    assert lines[:start] == [lines[i] for i in steps[:5]], "nothing but progress lines before the profile"
    assert [lines[i] for i in range(steps[5], len(lines))] == [lines[i] for i in steps[5:]]
    assert any("aten::" in line for line in lines[start : steps[5]])
    assert not any("seconds" in line for line in lines[:start] + lines[steps[5] :])


def test_a_quiet_run_prints_nothing(capfd):
    ten_steps(MonitorConfig(quiet=True, every=1))
    assert capfd.readouterr() == ("", "")


def test_a_quiet_profile_goes_to_its_file_only(capfd, tmp_path):
    ten_steps(MonitorConfig(quiet=True, folder=tmp_path, profile_step=5))
    assert capfd.readouterr().out == ""
    assert "profile of step 5" in (tmp_path / "profile-step5.txt").read_text()
