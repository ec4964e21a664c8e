"""Every stage x precision x accumulation x clipping x optimizer x number of ranks trains like plain PyTorch alone.

A cell (precision, ranks) runs its 48 combinations in one set of processes; a failure names each one that is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from matrix import MORE_STEPS, SETTINGS, STAGES, STEPS, Setting, reference, run_matrix

from trilithon.testing import run_ranks
from trilithon.testing.engine_run import EngineRun, digest_of
from trilithon.testing.parity import assert_same_training, tolerance

PRECISIONS = ("fp32", "bf16", "fp16")
FP32_APART = 1e-6  # an element may end this far from the reference: docs/parity.md derives it from lr and rounding

Matrix = list[tuple[int, Setting, EngineRun]]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_process_without_a_group_trains_like_plain_pytorch(precision: str):
    steps = STEPS[precision]
    check([run_matrix(precision, 1, steps)], precision, 1, steps)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_train_like_plain_pytorch_in_one_process(precision: str, world_size: int):
    steps = STEPS[precision]
    check(run_ranks(run_matrix, world_size, precision, world_size, steps, timeout_s=240), precision, world_size, steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_and_goes_on_like_it(world_size: int):
    found = run_ranks(run_matrix, world_size, "fp32", world_size, MORE_STEPS, timeout_s=400)
    check(found, "fp32", world_size, MORE_STEPS)


def check(by_rank: Sequence[Matrix], precision: Any, world_size: int, steps: int) -> None:
    wrong: list[str] = []
    mine = {(stage, setting): run for stage, setting, run in by_rank[0]}
    assert len(mine) == len(SETTINGS) * len(STAGES)
    for setting in SETTINGS:
        plain = reference(setting, precision, world_size, steps)
        for stage in STAGES:
            run, name = mine[stage, setting], f"stage {stage}, {precision}, {world_size} ranks, {setting}"
            try:
                limits = tolerance(precision, steps, optimizer=setting.optimizer)
                assert_same_training(plain, run.losses, run.parameters, limits, run.grad_norms)
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
            if precision == "fp32":
                for parameter, expected in plain.parameters.items():
                    apart = (run.parameters[parameter] - expected).abs().max().item()
                    if not apart <= FP32_APART:
                        wrong.append(f"{name}: an element of {parameter} ends {apart:.1e} from the reference")
            if setting.clip_norm and not all(factor < 1 for factor in run.clip_factors):
                wrong.append(f"{name}: nothing was clipped, factors {run.clip_factors}")
            if (run.noted[0] > 2) != (stage == 3 and world_size > 1):
                wrong.append(f"{name}: {run.noted[0]} units are gathered for use")
        wrong += _stages_that_differ(mine, setting, f"{precision}, {world_size} ranks, {setting}")
    for place, (stage, setting, run) in enumerate(by_rank[0]):
        digests = [matrix[place][2].digest for matrix in by_rank]
        if set(digests) != {run.digest}:
            wrong.append(f"stage {stage}, {setting}: ranks hold or report different bits, {digests}")
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong)


def _stages_that_differ(mine: dict[tuple[int, Setting], EngineRun], setting: Setting, name: str) -> list[str]:
    """Stages of one group take the same sums in the same order, so they agree bit for bit.

    With several micro-batches stages 0 and 1 add micro-batches first and ranks last, 2 and 3 the other way round.
    """
    bits = [digest_of(v for _, v in sorted(mine[stage, setting].parameters.items())) for stage in STAGES]
    groups = [(0, 1, 2, 3)] if setting.accumulation == 1 else [(0, 1), (2, 3)]
    return [f"{name}: stages {group} differ" for group in groups if len({bits[stage] for stage in group}) != 1]
