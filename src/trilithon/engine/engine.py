"""The Engine: training, and what is around it.

    loss = engine(batch)            # as often as the accumulation says
    engine.backward(loss)
    engine.step()

or `engine.train_step(batches)`; how a step goes is in `training`. An engine holds no configuration parsing, process
groups, formats or timers: `build` makes those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.checkpoint.report import LoadReport, SaveProgress, SaveReport
from trilithon.comm.collectives import Group
from trilithon.contracts import Collectives
from trilithon.engine import abandoned, memory, own_state, owners, whole_tensors
from trilithon.engine.across_stages import across_stages
from trilithon.engine.checkpointing import Checkpointing
from trilithon.engine.parts import Parts
from trilithon.engine.train_state import Stateful
from trilithon.engine.training import Training
from trilithon.zero.plan_report import plan_report
from trilithon.zero.tiling import untile


class Engine(Training):
    """Trains one model. Made by `trilithon.initialize`; a context manager that closes itself.

    stateful: objects whose state belongs to the run (loaders, schedulers of yours), by name: saved and loaded with it.
    boundary: None to count backwards up to the accumulation; True or False to say yourself, for as long as it stands,
    whether a backward is the last one before an update, and so whether `step` updates.
    Read-only: module, config, device, rank, world_size, mesh (who is where), slices (what tensor ranks share), steps
    (updates applied), accumulation, skipped_steps, micro_steps, global_samples, lr, loss_scale, ledger; and of the last
    step: grad_norm (before clipping), clip_factor, non_finite (elements, over all ranks), loss (mean over all of them).
    """

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        super().__init__(module, parts)
        self._parallel = parts.parallel
        self._tiled, self._recompute = parts.tiled, parts.recompute
        self.stateful: dict[str, Stateful] = {}
        self._checkpointing = Checkpointing(self, parts.topology.make_writers)
        owners.register(self)

    # -------------------------------------------------------------------------------------------------- contexts
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside stay on this rank, at any stage; they are reduced at the next backward outside, or `step`.

        At stages 2 and 3 this needs memory for whole gradients, which is the price of the saved communication.
        """
        self._refuse_stages("no_sync()")
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Ranks may call forward a different number of times inside (generation, evaluation). Collective at both ends.

        At stage 3, ranks that are done serve the gathers of the others until all are. No backward inside.
        Raises ProtocolError when experts are spread over ranks, whose tokens need every rank's forward.
        """
        self._experts.refuse_uneven()
        self._refuse_stages("uneven()")
        self.drain()
        self._uneven = True
        self._sharding.begin_uneven()
        try:
            yield
        except BaseException:
            self._sharding.abandon_uneven()
            raise
        else:
            self._sharding.end_uneven()
        finally:
            self._uneven = False

    # --------------------------------------------------------------------------------------------- whole tensors
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (name, whole fp32 value) of every parameter, one at a time, on every rank. Yours to keep."""
        self.drain()
        names, masters = self._sharding.names, lambda names: self._sharding.full("master", names)
        for name, tensor in across_stages(self, masters, names):
            yield name, tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)

    def view(self, kind: str, pattern: str = "*") -> Iterator[tuple[str, Tensor]]:
        """Collective: (name, whole copy) of "param", "master", "grad" or an optimizer state such as "exp_avg".

        pattern: of parameter names, as in fnmatch. "grad" is the mean gradient, unscaled and before clipping; ask
        between the last backward and `step`. Raises ProtocolError for a kind that does not exist (yet).
        """
        self.drain()
        return whole_tensors.view(self, kind, pattern)

    @property
    def expert_groups(self) -> Mapping[int, tuple[Collectives, Group, Group]]:
        """By expert-parallel degree: tokens travel over the first group, the others hold the same experts."""
        return {degree: (one.tokens, one.gather, one.reduce) for degree, one in self._experts.groups.items()}

    def rewrite(self, kind: str, name: str, value: Tensor) -> None:
        """Collective: new values, the same on every rank, for one whole tensor of `view`: "master" (what forward reads
        follows), "grad" or a field of the optimizer's state. Raises ProtocolError for what is not there to be written.
        """
        whole_tensors.rewrite(self, kind, name, value)

    def rewrite_own(self, kind: str, name: str, values: Tensor) -> None:
        """As `rewrite`, of what this rank holds: flat, as `own_part` gives it. Collective below stage 3."""
        whole_tensors.rewrite_own(self, kind, name, values)

    def own_part(self, kind: str, name: str) -> tuple[Tensor, int]:
        """(flat copy of what this rank holds of one tensor of `view`, where it starts in the flattened whole)."""
        return whole_tensors.own_part(self, kind, name)

    def state_dict(self) -> dict[str, Tensor]:
        """Collective: what `module.state_dict()` of an ordinary model would hold, whole, on every rank."""
        self.drain()
        return whole_tensors.ordinary_state_dict(self)

    def state_dict_on(self, rank: int, *, frozen: bool = True) -> dict[str, Tensor] | None:
        """Collective: as `state_dict`, but on one rank alone, in the memory of its host; None on the others.

        frozen=False leaves out what is not trained."""
        self.drain()
        return whole_tensors.state_dict_on(self, rank, frozen=frozen)

    def own_state(self) -> dict[str, Any]:
        """This rank's part of optimizer state and fp32 weights, for programs that keep it themselves; see `save`."""
        self.drain()
        return own_state.own_state(self)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Collective: what `own_state` of the same rank returned, for as many ranks cut alike; else CheckpointError."""
        self.drain()
        own_state.load_own_state(self, state)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by category, all tiers together: parameters, gradients, master (off the device part of
        optimizer), optimizer, in_flight, and with `recompute` checkpoints: the inputs of blocks kept for backward."""
        return memory.by_category(self._sharding, self._update, self._recompute)

    def memory_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank as {"device": {"parameters": ...}, "host": {...}, "disk": {...}}; empty tiers left out.

        Off the device, "optimizer" includes masters. On the host, "buffers" is what comes from disk and goes there.
        """
        on_device = self.config.offload.state == "device"
        return memory.by_tier(self._sharding, self._update, self._recompute, self._applying, state_on_device=on_device)

    def plan(self) -> str:
        """A table of the units: which parameters are communicated together, and whether they are gathered for use."""
        return plan_report(self._sharding.units)

    # ----------------------------------------------------------------------------------------------- checkpoints
    def save(
        self, folder: Path | str, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        blocking: bool = True, *, latest: bool = True, frozen: bool = True,
    ) -> Path:  # fmt: skip
        """Collective: save everything that training needs to go on exactly; returns the checkpoint's folder.

        tag: its name, "step-<steps>" by default; one of that name is replaced. client_state: plain data of yours. With
        blocking=False state is copied now and written while training goes on; the next call of `step` or of a method
        here raises what failed. latest=False leaves the pointer "latest" where it is. frozen=False leaves parameters
        out that are not trained; a load keeps those that the model has. Raises CheckpointError on all ranks alike;
        older checkpoints stay as they were.
        """
        self._require_open()
        self.drain()
        return self._checkpointing.save(folder, tag, client_state, blocking, latest, frozen)

    def load(
        self, folder: Path | str, tag: str | None = "latest", strict: bool = True, parts: Sequence[str] | None = None
    ) -> LoadReport:
        """Collective: restore a checkpoint of any stage, precision and number of ranks; says what became of each part.

        parts: some of "weights" (with buffers), "optimizer", "schedule", "scaler", "counters", "window", "stateful" and
        "random"; None for all (without an optimizer, the weights). Raises CheckpointError before anything is changed
        if something is missing or of another shape; strict=False restores what fits and reports the rest.
        """
        if self._closed:
            self._require_open()
        if self._applying is not None:
            self._applying.drain()
        return self._checkpointing.load(folder, tag, strict, parts)

    def finish_saving(self) -> None:
        """Collective: wait until a save in the background is on the disk; raises what it failed with."""
        self._checkpointing.finish()

    @property
    def saving(self) -> SaveProgress | None:
        """How far a save in the background is on this rank; None when none is under way."""
        return self._checkpointing.progress

    @property
    def last_save(self) -> SaveReport | None:
        """What the last finished save wrote."""
        return self._checkpointing.last

    # --------------------------------------------------------------------------------------------------- the end
    def train(self, mode: bool = True) -> Engine:
        if not mode:
            self.drain()
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def close(self, *, give_back: bool | None = True) -> None:
        """Collective at stage 3 and on a mesh: the model gets its whole parameters back.

        give_back=False leaves the parameters cut, and their values are gone: for models that no rank has room for.
        None gives back below stage 3, and at stage 3 if every rank has twice the bytes of whole parameters free.
        A save in the background is written out first; what it failed with is raised when everything else is done.
        """
        if self._closed:
            return
        if self._applying is not None:
            self._applying.drain()
        self._closed = True
        owners.unregister(self)
        if give_back is None:
            sharding, room = self._sharding, memory.has_room_for(self.module, self.device)
            give_back = sharding.stage < 3 or all(sharding.exchange(room, "room for whole parameters"))
        try:
            self._checkpointing.close()
        finally:
            if self._monitor is not None:
                self._monitor.close()
            if self._recompute is not None:
                self._recompute.remove()
            if self._pipelined is not None:
                self._pipelined.close()
            self._sharding.close(give_back=give_back)
            if give_back and self._sharding.gives_back:
                self._experts.unite()
                self._parallel.undo()
            if self._update is not None:
                self._update.close()
            if self._tiled and self._sharding.gives_back:
                untile(self.module)
            self.mesh.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # the other ranks may not take part any more
            owners.unregister(self)
            return abandoned.let_go(self._sharding, self._update, self._applying, self.config.offload)
        self.close()
