"""Bytes of model states per rank against the table of ZeRO (arXiv:1910.02054, figure 1), within 1 %.

Psi is the number of trainable parameters, W that of ranks. Adam in 16 bits keeps (2 + 2 + 12) Psi: parameters,
gradients, and fp32 master, momentum and variance; in fp32 4 + 4 + 8. A stage divides the last, the last two, or all of
them by W. Gradients are measured between the last backward and the step, when all of them are there.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from trilithon import initialize
from trilithon.engine.engine import Engine
from trilithon.testing import ranks

WIDTH, DEPTH = 256, 6  # 395 k parameters: padding is below 0.2 %
PSI = DEPTH * (WIDTH * WIDTH + WIDTH)
TABLE = {  # bytes per parameter: (on every rank, divided by the ranks), by stage
    "bf16": ((16, 0), (4, 12), (2, 14), (0, 16)),
    "fp32": ((16, 0), (8, 8), (4, 12), (0, 16)),
}


class Tower(nn.Module):
    """`frozen` of the layers do not train. [B, WIDTH] -> a loss []"""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def trained(config: dict[str, Any], frozen: int = 0, accumulation: int = 1) -> Engine:
    """After one whole step, and with the gradients of the next one."""
    model, batch = Tower(frozen), {"accumulation": accumulation}
    engine = initialize(model, {"optimizer": {"kind": "adamw"}, "batch": batch, **config})
    for step in range(2):
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(2, WIDTH)))
        if step == 0:
            assert engine.step()
    return engine


def off(name: str, got: dict[str, int], **expected: float) -> list[str]:
    return [
        f"{name}: {kind} {got[kind]} bytes, expected {wanted:.0f}"
        for kind, wanted in expected.items()
        if not abs(got[kind] - wanted) <= 0.01 * wanted
    ]


@ranks(2, 4)
def test_states_take_what_the_table_says(world_size: int):
    found = []
    for stage, precision in itertools.product((0, 1, 2, 3), ("bf16", "fp32")):
        engine = trained({"zero": {"stage": stage, "bucket_numel": 70_000}, "precision": precision})
        size = 2 if precision == "bf16" else 4
        state, gradients, values = (PSI / world_size if stage >= least else PSI for least in (1, 2, 3))
        found += off(
            f"stage {stage}, {precision}",
            engine.memory(),
            parameters=size * values,
            gradients=size * gradients,
            master=4 * state if precision == "bf16" else 0,  # in fp32 the parameters are their own masters
            optimizer=8 * state,
            in_flight=0,
        )
        whole, cut = TABLE[precision][stage]
        total = sum(engine.memory().values())
        found += off(f"stage {stage}, {precision}", {"total": total}, total=(whole + cut / world_size) * PSI)
        engine.step()
        engine.close()
    assert not found, "\n".join(found)


@ranks(2, 4)
def test_sums_over_micro_batches_in_fp32_take_four_bytes_where_gradients_are_held(world_size: int):
    found = []
    for stage, kept in itertools.product((0, 1, 2, 3), (None, "fp32", "bf16")):
        zero = {"stage": stage, "bucket_numel": 70_000, "accumulate_dtype": kept}
        engine = trained({"zero": zero, "precision": "bf16"}, accumulation=2)
        size = 2 if kept == "bf16" else 4
        gradients = PSI / world_size if stage >= 2 else PSI
        found += off(f"stage {stage}, {kept}", engine.memory(), gradients=size * gradients)
        engine.step()
        engine.close()
    assert not found, "\n".join(found)


@ranks(2)
def test_frozen_parameters_hold_their_values_and_nothing_else(world_size: int):
    found = []
    share = (DEPTH - 1) / DEPTH
    for stage, precision in itertools.product((0, 1, 2, 3), ("bf16", "fp32")):
        engine = trained({"zero": {"stage": stage}, "precision": precision}, frozen=1)
        size = 2 if precision == "bf16" else 4
        state, gradients, values = (PSI / world_size if stage >= least else PSI for least in (1, 2, 3))
        found += off(
            f"stage {stage}, {precision}",
            engine.memory(),
            parameters=size * values,
            gradients=size * gradients * share,
            master=(4 * state if precision == "bf16" else 0) * share,
            optimizer=8 * state * share,
        )
        engine.step()
        engine.close()
    assert not found, "\n".join(found)


@ranks(2)
def test_whole_gradients_are_held_under_no_sync_only(world_size: int):
    """The price of `no_sync` at stages 2 and 3, and that it is paid back."""
    for stage in (2, 3):
        engine = trained({"zero": {"stage": stage, "bucket_numel": 70_000}, "precision": "bf16"}, accumulation=3)
        assert engine.step()
        with engine.no_sync():
            engine.backward(engine(torch.ones(2, WIDTH)))
        assert not off(f"stage {stage}", engine.memory(), gradients=4 * PSI + 4 * PSI / world_size)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, WIDTH)))
        assert not off(f"stage {stage}", engine.memory(), gradients=4 * PSI / world_size)
        assert engine.step()
        engine.close()


@ranks(2)
def test_the_report_is_what_the_process_really_holds(world_size: int):
    """Every tensor storage alive in this process, found by the garbage collector, against `engine.memory()`."""
    for stage, precision in itertools.product((0, 1, 2, 3), ("bf16", "fp32")):
        before = _storages()
        engine = trained({"zero": {"stage": stage, "bucket_numel": 70_000}, "precision": precision})
        held = sum(size for place, size in _storages().items() if place not in before)
        reported = sum(engine.memory().values())
        received = sum(group.buffer_bytes for group in groups_of(engine))
        assert abs(held - received - reported) <= 0.01 * reported, (stage, precision, held, received, reported)
        engine.step()
        engine.close()
        del engine


def groups_of(engine: Engine) -> list[Any]:
    comm = engine._sharding._comm
    return [comm.control, comm.gather, comm.reduce]


def _storages() -> dict[int, int]:
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            with torch._C.DisableTorchFunctionSubclass():  # the memory behind sharded parameters as well
                storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found
