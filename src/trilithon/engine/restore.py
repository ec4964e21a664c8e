"""A checkpoint becomes the state of this run: the resume contract, seen from the loading side.

Everything follows a `LoadPlan`. Each rank reads the ranges that it holds, slice by slice, straight to where they
belong; beyond that it needs a few blocks of memory. Weights are restored in the masters; what forward reads is rounded
from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilithon.checkpoint.reader import CheckpointReader, Wanted
from trilithon.checkpoint.table import Holding, Span, values_of
from trilithon.contracts import SyncMode
from trilithon.engine.coordinates import same_mesh, whole_shapes
from trilithon.engine.load_plan import LoadPlan, saved_rates, saved_update, settings_by_group
from trilithon.engine.random_state import derive_random_states, restore_random_states
from trilithon.engine.train_state import (
    frozen_holdings,
    persistent_buffers,
    rank_state,
    slice_holdings,
    stateful_of,
    window_holding,
)
from trilithon.errors import CheckpointError
from trilithon.optim.foreign_state import counters_by_name, for_slices, for_whole_parameters
from trilithon.zero import window

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine


class Restore:
    """One load into one engine. `settings` and `tensors` are local; `publish` is collective; `finish` is local."""

    def __init__(self, engine: Engine, reader: CheckpointReader, plan: LoadPlan) -> None:
        self._engine, self._reader, self._plan = engine, reader, plan
        ranks = reader.extra["ranks"]
        self._same_ranks = same_mesh(engine, reader.extra)
        self._own: Mapping[str, Any] = ranks[engine.rank if self._same_ranks else 0]

    # ------------------------------------------------------------------------------------------- what is not a tensor
    def settings(self) -> None:
        """Group settings, schedule, loss scale, counters, and the update rule's own counters."""
        engine, extra, parts = self._engine, self._reader.extra, self._plan.parts
        engine._sharding.forget_window()
        engine._forget_window()
        if "optimizer" in parts:
            self._group_settings()
            assert engine._update is not None
            engine._update.load_state_dict(self._update_state())
        if "schedule" in parts:
            rates = saved_rates(engine, self._reader)
            engine._rate.load_state_dict({**extra["schedule"], "lr": rates})
        if "scaler" in parts:
            engine._precision.load_state_dict(extra["scaler"])
        if "counters" in parts:
            saved = extra["counters"]
            engine.steps, engine.skipped_steps = saved["steps"], saved["skipped_steps"]
            engine.micro_steps, engine._idle = saved["micro_steps"], frozenset(saved["idle"])

    def _group_settings(self) -> None:
        """By name: each group takes what its parameters had. Rates belong to the schedule."""
        found, _ = settings_by_group(self._engine, self._reader)
        update, saved_rule = self._engine._update, (saved_update(self._reader) or {}).get("rule")
        kept = {"lr", "initial_lr"}
        if saved_rule in getattr(update, "resembles", ()):
            kept.add("decoupled_weight_decay")  # which of two rules runs is this run's choice
        for group, saved in zip(self._engine._groups, found):
            for key, value in (saved or {}).items():
                if key in kept or key not in group:
                    continue
                if isinstance(group[key], Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def _update_state(self) -> Mapping[str, Any]:
        """What the rule's `load_state_dict` takes; for other people's optimizers in the form that this stage needs."""
        engine, saved = self._engine, saved_update(self._reader)
        assert saved is not None and engine._update is not None
        if "whole" not in saved:
            return self._with_newcomers(saved)
        counters = counters_by_name(saved, [group["names"] for group in self._reader.extra["groups"]])
        if engine._update.state_dict()["whole"]:
            return for_whole_parameters(saved, counters, self._whole_fields())
        fields: dict[str, list[str]] = {}
        shapes = whole_shapes(engine)
        for (part, name), entry in self._plan.fields.items():
            if entry.shape != shapes[name]:
                raise CheckpointError(
                    f"{saved['rule']} keeps {part} of '{name}' in shape {list(entry.shape)}, not per element, so it "
                    "cannot be cut into slices. Load at zero.stage=0, or without 'optimizer' in parts."
                )
            fields.setdefault(name, []).append(part)
        return for_slices(saved, counters, fields, [group.names for group in engine._groups])

    def _with_newcomers(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """A parameter whose moments begin at zero has made no update, so that its bias is corrected from the first."""
        restored = {name for _, name in self._plan.fields}
        numel = {entry.name: entry.param.numel() for entry in self._engine._sharding.entries}
        names = [name for group in self._engine._groups for name in group.names]
        fresh = [name for name in names if name not in restored and numel[name]]
        if not restored or "missed" not in saved:
            return saved
        return {**saved, "missed": {**saved["missed"], **dict.fromkeys(fresh, saved["updates"])}}

    def _whole_fields(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for (part, name), entry in self._plan.fields.items():
            found.setdefault(name, {})[part] = self._reader.read(part, entry.name).to(self._engine.device)
        return found

    # -------------------------------------------------------------------------------------------------------- tensors
    @torch.no_grad()
    def tensors(self) -> None:
        """This rank's ranges of masters, optimizer state, frozen parameters, buffers and gradients."""
        weights = "weights" in self._plan.parts
        if self._engine._update is not None and (weights or "optimizer" in self._plan.parts):
            self._slices(weights)
        if weights:
            self._frozen()
            for name, buffer in persistent_buffers(self._engine.module):
                if name in self._plan.buffers:
                    entry = self._plan.buffers[name]
                    own = self._reader.find(f"buffer/{self._engine.rank}", entry.name) if self._same_ranks else None
                    buffer.copy_(self._reader.read((own or entry).part, entry.name))
        if "window" in self._plan.parts:
            self._window()
        if "optimizer" in self._plan.parts:
            self._rank_state()

    def _slices(self, weights: bool) -> None:
        for part, holding in zip(
            self._engine._sharding.slices(), slice_holdings(self._engine, write=True), strict=True
        ):
            spans = [span for span in holding.spans if self._source(span) is not None]
            if not spans:
                continue
            with holding.open() as state:
                self._reader.fill(self._wanted(spans, state))
                if weights and part.low is not None:
                    part.low.copy_(state["master"])

    def _source(self, span: Span) -> Any:
        return (
            (self._plan.sources.get(span.name) if "weights" in self._plan.parts else None)
            if span.part == "master"
            else (self._plan.fields.get((span.part, span.name)) if "optimizer" in self._plan.parts else None)
        )

    def _wanted(self, spans: list[Span], state: Mapping[str, Tensor]) -> Iterator[Wanted]:
        for span in spans:
            yield Wanted(self._source(span), span.start, values_of(span, state))

    def _frozen(self) -> None:
        sources = self._plan.sources
        for holding in frozen_holdings(self._engine, write=True):
            spans = [span for span in holding.spans if span.part == "frozen" and span.name in sources]
            if spans:
                with holding.open() as state:
                    wanted = [Wanted(sources[span.name], span.start, values_of(span, state)) for span in spans]
                    self._reader.fill(iter(wanted))

    def _window(self) -> None:
        engine, own = self._engine, self._own["window"]
        if own["scale"] != engine.loss_scale:
            raise CheckpointError(
                f"the open accumulation window was scaled by {own['scale']:g} and the loss scale here is "
                f"{engine.loss_scale:g}. Load without 'window' in parts, which drops its gradients."
            )
        mode = engine._update.sync_mode(engine.steps + 1) if engine._update is not None else SyncMode.MEAN
        engine._sharding.begin_step(mode, engine.steps + engine.skipped_steps + 1)
        engine._sharding.reopen_window(engine.steps + engine.skipped_steps + 1, own["backwards"], own)
        for part in window.open_parts(engine._sharding.gradients):
            holding = window_holding(engine, part)
            self._reader.fill(self._as_saved(holding))
        engine._window.backwards, engine._window.loss = own["backwards"], own["loss"]
        engine._window.weight, engine._window_open = own["weight"], True

    def _as_saved(self, holding: Holding) -> Iterator[Wanted]:
        with holding.open() as state:
            for span in holding.spans:
                yield Wanted(self._reader.entry(span.part, span.name), span.start, values_of(span, state))

    def _rank_state(self) -> None:
        """A rank's own where the number of ranks is the same, else every rank's, for the rule to fold."""
        mine, load = rank_state(self._engine), getattr(self._engine._update, "load_rank_state", None)
        if load is None or not (mine or self._reader.entries("rank_state")):
            return
        saved: list[dict[str, Tensor]] = [{} for _ in self._reader.extra["ranks"]]
        wanted = [self._engine.rank] if self._same_ranks else range(len(saved))
        for entry in self._reader.entries("rank_state"):
            rank, _, name = entry.name.partition("/")
            if int(rank) in wanted:
                saved[int(rank)][name] = self._reader.read("rank_state", entry.name)
        load(saved[self._engine.rank] if self._same_ranks else {}, None if self._same_ranks else saved)

    # ------------------------------------------------------------------------------------------------------- the rest
    def publish(self) -> None:
        """Collective: what forward reads follows from what was loaded."""
        self._engine._sharding.publish()

    def finish(self) -> None:
        """Registered objects, and last of all the random generators."""
        engine, report = self._engine, self._plan.report
        report.client_state = self._own["client_state"]
        if "stateful" in self._plan.parts:
            for name, one in stateful_of(engine).items():
                if name in self._own["stateful"]:
                    one.load_state_dict(self._own["stateful"][name])
        if "random" not in self._plan.parts:
            return
        if self._same_ranks:
            restore_random_states(self._own["random"])
            return
        derive_random_states(self._reader.extra["seed"], report.step, engine.mesh.data_rank)
        report.notes.append(
            f"random states of {len(self._reader.extra['ranks'])} ranks do not fit {engine.world_size}: every rank "
            "drew new ones from (seed, step, rank)"
        )
