"""What an optimizer step sends, to the byte: the ledger against the formulas of ZeRO (arXiv:1910.02054, section 7).

P is the padded size of the trainable units, r = (W - 1) / W, k the number of micro-batches that are reduced. Elements:
stage 0 and 1: r P + r P; stage 2: k r P + r P; stage 3: k r P + r x (gathers of each unit). The first step is left out:
the order of units is learned in it.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

from ledger_model import make, padded, ring, sent_by_group, trainable

from trilithon import initialize
from trilithon.testing import ranks
from trilithon.testing.parity import token_batches

ITEMSIZE = {"fp32": 4, "bf16": 2}
ROOT, LAST = "(root)", "blocks.2"  # stage 3: the root unit, and the unit gathered last in forward


def bytes_of_second_step(
    world_size: int, config: dict[str, Any], *, accumulation: int = 1, kind: str = "plain", local: int = 0
) -> tuple[Any, dict[str, int]]:
    """(engine, bytes by group): the last of `accumulation` backwards syncs, `local` of those before do not."""
    settings = {"optimizer": {"kind": "adamw"}, "batch": {"accumulation": accumulation}, **config}
    engine = initialize(make(kind), settings)
    for micro_batches in token_batches(2, rows=2, accumulation=accumulation, length=9):
        before = sent_by_group(engine)
        for index, batch in enumerate(micro_batches):
            with engine.no_sync() if index < local else nullcontext():
                engine.backward(engine(*batch))
        assert engine.step()
    return engine, {group: sent - before[group] for group, sent in sent_by_group(engine).items()}


def wrong(name: str, got: dict[str, int], **expected: int) -> list[str]:
    return [f"{name}: {group} {got[group]}, expected {n}" for group, n in expected.items() if got[group] != n]


@ranks(2, 3, 4)
def test_stages_0_to_2_send_what_the_formulas_say(world_size: int):
    found = []
    for stage, precision, accumulation in itertools.product((0, 1, 2), ("fp32", "bf16"), (1, 3)):
        config = {"zero": {"stage": stage, "bucket_numel": 2000}, "precision": precision}
        engine, sent = bytes_of_second_step(world_size, config, accumulation=accumulation)
        item = ITEMSIZE[precision]
        once = ring(trainable(engine), item, world_size)
        # stage 0 gathers mean gradients, in the type they are summed in; stages 1 and 2 gather updated parameters
        summed_item = 4 if accumulation > 1 else item
        gathered = ring(trainable(engine), summed_item if stage == 0 else item, world_size)
        reduced = once * (accumulation if stage == 2 else 1)
        found += wrong(f"stage {stage}, {precision}, {accumulation}", sent, gather=gathered, reduce=reduced)
        engine.close()
    assert not found, "\n".join(found)


@ranks(2, 3, 4)
def test_stage_3_gathers_twice_and_reduces_once_per_micro_batch(world_size: int):
    found = []
    for precision, accumulation, overlap in itertools.product(("fp32", "bf16"), (1, 3), (True, False)):
        zero = {"stage": 3, "unit_classes": ("Block",), "overlap": overlap}
        config = {"zero": zero, "precision": precision}
        engine, sent = bytes_of_second_step(world_size, config, accumulation=accumulation)
        sizes, item = padded(engine), ITEMSIZE[precision]
        assert set(sizes) == {ROOT, "blocks.0", "blocks.1", LAST}
        kept = sizes[ROOT] + sizes[LAST]  # whole between forward and backward: gathered once
        gathered = ring(2 * sum(sizes.values()) - kept, item, world_size) * accumulation
        reduced = ring(trainable(engine), item, world_size) * accumulation
        found += wrong(f"{precision}, {accumulation}, overlap {overlap}", sent, gather=gathered, reduce=reduced)
        engine.close()
    assert not found, "\n".join(found)


@ranks(2, 3)
def test_frozen_units_are_gathered_but_neither_reduced_nor_published(world_size: int):
    """A layer that no forward calls is never gathered; its zeros travel, since another rank might have called it."""
    zero = {"stage": 3, "bucket_numel": 256, "unit_classes": ("Block",)}
    engine, sent = bytes_of_second_step(world_size, {"zero": zero}, kind="frozen")
    sizes = padded(engine)
    assert set(sizes) == {ROOT, ROOT + ":frozen", "blocks.0:frozen", "blocks.1", LAST, "unused"}
    gathers = {ROOT: 1, ROOT + ":frozen": 1, "blocks.0:frozen": 2, "blocks.1": 2, LAST: 1, "unused": 0}
    assert sent["gather"] == ring(sum(sizes[name] * times for name, times in gathers.items()), 4, world_size)
    trained = sum(size for name, size in sizes.items() if not name.endswith(":frozen"))
    assert sent["reduce"] == ring(trained, 4, world_size)
    engine.close()
    for stage in (0, 1, 2):
        engine, sent = bytes_of_second_step(world_size, {"zero": {"stage": stage}}, kind="frozen")
        frozen = sum(param.numel() for param in engine.module.parameters() if not param.requires_grad)
        assert trainable(engine) <= sum(p.numel() for p in engine.module.parameters()) - frozen + 64 * (world_size + 30)
        assert sent["gather"] == sent["reduce"] == ring(trainable(engine), 4, world_size)
        engine.close()


@ranks(2, 4)
def test_keeping_parameters_after_forward_makes_stage_3_cost_2p(world_size: int):
    for accumulation in (1, 3):
        zero = {"stage": 3, "unit_classes": ("Block",), "reshard_after_forward": False}
        engine, sent = bytes_of_second_step(world_size, {"zero": zero}, accumulation=accumulation)
        once = ring(trainable(engine), 4, world_size)
        assert (sent["gather"], sent["reduce"]) == (once * accumulation, once * accumulation)
        engine.close()


@ranks(2, 3)
def test_recomputation_adds_no_gather(world_size: int):
    """A block is whole from its recomputation to the end of its backward: two gathers, not three."""
    for kind in ("reentrant", "saved-tensor hooks"):
        engine, sent = bytes_of_second_step(world_size, {"zero": {"stage": 3, "unit_classes": ("Block",)}}, kind=kind)
        sizes = padded(engine)
        # the forward of re-entrant recomputation runs without gradients, so its last block is not kept for backward
        once = sizes[ROOT] + (sizes[LAST] if kind != "reentrant" else 0)
        assert sent["gather"] == ring(2 * sum(sizes.values()) - once, 4, world_size), kind
        assert sent["reduce"] == ring(trainable(engine), 4, world_size), kind
        engine.close()


@ranks(2, 3)
def test_persistent_parameters_are_gathered_once_after_the_update(world_size: int):
    zero = {"stage": 3, "unit_classes": ("Block",), "persist_below_numel": 100}
    engine, sent = bytes_of_second_step(world_size, {"zero": zero}, accumulation=3)
    sizes = padded(engine)
    kept = sum(size for name, size in sizes.items() if name.startswith("persistent"))
    assert kept > 0
    cut = sum(sizes.values()) - kept
    per_backward = ring(2 * cut - sizes[ROOT] - sizes[LAST], 4, world_size)
    assert sent["gather"] == 3 * per_backward + ring(kept, 4, world_size)
    assert sent["reduce"] == 3 * ring(trainable(engine), 4, world_size)
    engine.close()


@ranks(2, 3)
def test_no_sync_reduces_once_for_all_backwards_before_it(world_size: int):
    """At every stage; at stage 3 gathers stay as they are."""
    found = []
    for stage, local in itertools.product((0, 1, 2, 3), (1, 2)):
        zero = {"stage": stage, "unit_classes": ("Block",)}
        engine, sent = bytes_of_second_step(world_size, {"zero": zero}, accumulation=3, local=local)
        reductions = 1 if stage < 2 else 3 - local
        found += wrong(
            f"stage {stage}, {local} local", sent, reduce=reductions * ring(trainable(engine), 4, world_size)
        )
        engine.close()
    assert not found, "\n".join(found)


@ranks(2, 3)
def test_a_communication_type_of_its_own_is_what_travels(world_size: int):
    for stage, wire in itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16")):
        zero = {"stage": stage, "comm_dtype": wire}
        engine, sent = bytes_of_second_step(world_size, {"zero": zero, "precision": "bf16"})
        assert sent["reduce"] == ring(trainable(engine), 4 if wire == "fp32" else 2, world_size), (stage, wire)
        engine.close()


@ranks(2, 4)
def test_agreement_costs_a_few_numbers_whatever_the_model(world_size: int):
    """One sum per step, of the squared norm, two flags, the loss with its weight, and saves that ended."""
    for stage, accumulation in itertools.product((0, 1, 2, 3), (1, 3)):
        engine, sent = bytes_of_second_step(world_size, {"zero": {"stage": stage}}, accumulation=accumulation)
        assert sent["control"] == -(-2 * (world_size - 1) * 6 * 8 // world_size), stage
        engine.close()
