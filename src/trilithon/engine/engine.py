"""The Engine: one optimizer step, sequenced.

    loss = engine(batch)            # as often as the accumulation says
    engine.backward(loss)
    engine.step()

or `engine.train_step(batches)`. It holds no configuration parsing, process groups, formats or timers: `build` makes
those. One step is: forwards and backwards -> gradients agreed -> skip, or clip, update, publish -> rate moves on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trilithon.checkpoint.report import LoadReport, SaveProgress, SaveReport
from trilithon.contracts import StepHook, SyncMode
from trilithon.engine import abandoned, memory, overflow, whole_tensors
from trilithon.engine.applying import make_applying
from trilithon.engine.checkpointing import Checkpointing
from trilithon.engine.model_output import loss_of
from trilithon.engine.parts import Parts
from trilithon.engine.train_state import Stateful
from trilithon.errors import NonFiniteError, ProtocolError
from trilithon.optim.clip import agreed_norm, clip_factor
from trilithon.zero.plan_report import plan_report
from trilithon.zero.tiling import untile

logger = logging.getLogger(__name__)

Forward = Callable[[Any, Any], Any]

_FORGOTTEN = 16  # accumulations' worth of backwards without a step, after which somebody should be told


@dataclass
class _Window:
    """What has happened since the last step."""

    backwards: int = 0
    loss: Tensor | float = 0.0  # [] f64, sum of losses; it stays on the device, so that no backward waits for it
    weight: float | None = None  # sum of weights, once one was given


class Engine:
    """Trains one model. Made by `trilithon.initialize`; a context manager that closes itself.

    stateful: objects whose state belongs to the run (loaders, schedulers of yours), by name: saved and loaded with it.
    Read-only: module, config, device, rank, world_size, mesh (who is where), slices (what tensor ranks share), steps
    (updates applied), accumulation, skipped_steps, micro_steps, global_samples, lr, loss_scale, ledger; and of the last
    step: grad_norm (before clipping), clip_factor, non_finite (elements, over all ranks), loss (mean over all of them).
    """

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self.module, self.config, self.device, self.ledger = module, parts.config, parts.device, parts.ledger
        self.accumulation = parts.batch.accumulation
        self._monitor = parts.monitor
        self.hooks: list[StepHook] = [parts.monitor] if parts.monitor is not None else []
        self.steps = self.skipped_steps = self.micro_steps = 0
        self.grad_norm: float | None = None
        self.clip_factor: float | None = None
        self.loss: float | None = None
        self.non_finite = 0
        self._batch, self._sharding, self._update = parts.batch, parts.sharding, parts.update
        self._precision, self._rate, self._groups, self._low = parts.precision, parts.rate, parts.groups, parts.low
        self.mesh, self.slices, self._parallel = parts.topology, parts.parallel.slices, parts.parallel
        self._tiled, self._experts = parts.tiled, parts.experts
        delay = parts.config.offload.delay_after_steps if parts.config.offload.delayed_update else None
        self._applying = make_applying(parts.sharding, parts.update, delay)
        if self._applying is not None:
            parts.sharding.before_hold = self._applying.drain
        self._recompute = parts.recompute
        self._window, self._syncing, self._window_open = _Window(), True, False
        self._uneven = self._closed = False
        self._idle: frozenset[str] = frozenset()
        self.stateful: dict[str, Stateful] = {}
        self._checkpointing = Checkpointing(self, parts.topology.make_writers)

    # ------------------------------------------------------------------------------------------------ properties
    @property
    def rank(self) -> int:
        return self._sharding.rank

    @property
    def world_size(self) -> int:
        return self._sharding.world_size

    @property
    def lr(self) -> list[float]:
        """The rate that the next step uses, per parameter group."""
        return self._rate.get_lr()

    @property
    def loss_scale(self) -> float:
        return self._precision.scale

    @property
    def global_samples(self) -> int:
        """Samples behind the updates and skips so far, over all ranks."""
        return (self.steps + self.skipped_steps) * self._batch.global_size

    @property
    def at_boundary(self) -> bool:
        """The next `step()` updates: as many backwards as the accumulation asks for have run."""
        return self._window.backwards >= self.accumulation

    # -------------------------------------------------------------------------------------------------- one step
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Floating inputs are cast to the parameters' type under bf16 and fp16."""
        self._require_open()
        if torch.is_grad_enabled() and self.module.training:
            self._open_window()
        self._sharding.held_gradients.hide()  # compilers look at param.grad
        if self._low is not None:
            args, kwargs = pytree.tree_map_only(Tensor, self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._low) if tensor.is_floating_point() else tensor

    def _open_window(self) -> None:
        if not self._window_open:
            self._window_open = True
            for hook in self.hooks:
                hook.on_step(self.steps + 1)
            mode = self._update.sync_mode(self.steps + 1) if self._update is not None else SyncMode.MEAN
            self._sharding.begin_step(mode, self.steps + self.skipped_steps + 1)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Backward of one micro-batch, and on its last one the reduction of gradients.

        loss: a scalar. Without `weight` the update follows the mean of all losses over ranks and micro-batches. With
        `weight` (tokens, say) `loss` is a sum, and the update follows sum of losses / sum of weights over all of them;
        a rank without data passes weight=0. More backwards than the accumulation before one step add up.
        Raises ProtocolError out of order, NonFiniteError never (`step` decides). After an exception in backward the
        accumulation starts again from nothing.
        """
        self._require_open()
        self._check_loss(loss, weight)
        self._open_window()
        window = self._window
        last = window.backwards + 1 >= self.accumulation
        if self._syncing:
            self._sharding.micro_step(last)
        else:
            self._sharding.micro_step_without_sync()
        factor = self._precision.scale / (self.accumulation if weight is None else 1)
        self._experts.weigh(factor if weight is None else factor * float(weight))
        try:
            scaled = loss if loss.dtype == torch.float64 else loss.float()
            (scaled * factor if factor != 1.0 else scaled).backward(retain_graph=retain_graph)
        except BaseException as error:
            self._abandon(error)
            raise
        self._sharding.finish_backward()
        window.backwards += 1
        self.micro_steps += 1
        if window.backwards == _FORGOTTEN * self.accumulation and self.rank == 0:
            logger.warning(
                "%d backwards since the last engine.step(): they add up until it is called. (accumulation is %d)",
                window.backwards,
                self.accumulation,
            )
        window.loss = loss.detach().double().reshape(()) + window.loss
        if weight is not None:
            window.weight = (window.weight or 0.0) + float(weight)

    def _abandon(self, error: BaseException) -> None:
        self._sharding.abandon_backward()
        lost, self._window, self._window_open = self._window.backwards, _Window(), False
        abandoned.add_notes(error, lost=lost, stage=self._sharding.stage)

    def _check_loss(self, loss: Tensor, weight: object) -> None:
        if self._update is None:
            raise ProtocolError("this engine has no optimizer: pass one to initialize(), or set config.optimizer.")
        if self._uneven:
            raise ProtocolError("backward inside uneven() would wait for ranks that are done: leave the context first.")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ProtocolError(f"engine.backward takes a loss of one element; got {what}. Reduce it: loss.mean().")
        if not loss.requires_grad:
            raise ProtocolError("the loss does not depend on a trainable parameter: was it computed under no_grad()?")
        if self._window.backwards and (weight is None) != (self._window.weight is None):
            raise ProtocolError("either all backwards before a step get a weight, or none of them.")

    def step(self) -> bool:
        """Update the parameters if this is the boundary of an accumulation. True when they changed.

        Before the boundary it does nothing. A step whose gradient is not finite on any rank is skipped on all (policy
        `precision.non_finite`, or loss scaling), and then rates, schedules and counters stay where they are.
        Raises ProtocolError without a backward, NonFiniteError when the policy says so, TierError when state on disk
        failed (on all ranks; the engine is of no use then).
        """
        self._require_open()
        window, applying = self._window, self._applying
        if applying is None or window.backwards == 0:
            raise ProtocolError("step() without a backward: call engine.backward(loss) first.")
        if not self.at_boundary:
            return False
        settled = self._sharding.settle([float(window.loss), window.weight or 0.0, self._checkpointing.ended])
        self._checkpointing.hear(settled.extra[2])
        try:
            scale = self._unscale(settled.extra[1])
        except ProtocolError:
            self._forget_window()
            raise
        self.loss = settled.extra[0] / (settled.extra[1] or self.world_size * window.backwards)
        self.grad_norm = agreed_norm(torch.tensor([settled.squared_norm], dtype=torch.float64), 1.0 / scale)
        finite = math.isfinite(settled.squared_norm)
        self.clip_factor = clip_factor(self.grad_norm, self.config.clip_norm)
        self._report_idle(settled.idle)
        try:
            accepted = self._accept(finite)
        except NonFiniteError:
            self._forget_window()
            raise
        if not accepted:
            self._forget_window()
            applying.skip()
            self.skipped_steps += 1
            return False
        try:
            applying.apply(self.steps + 1, settled.idle, scale * self.clip_factor)
        finally:
            self._forget_window()
        self.steps += 1
        if self._monitor is not None:
            self._monitor.record_step(self)
        self._rate.advance()
        return True

    def _forget_window(self) -> None:
        self._sharding.drop_gradients()
        self._window, self._window_open = _Window(), False

    def _unscale(self, total_weight: float) -> float:
        """What the stored gradient is multiplied by to be the gradient of the mean loss."""
        if self._window.weight is None:
            return 1.0 / self._precision.scale
        if total_weight <= 0:
            raise ProtocolError(f"the weights of this step sum to {total_weight:g} over all ranks; there is no mean.")
        return self.world_size / (self._precision.scale * total_weight)

    def _accept(self, finite: bool) -> bool:
        self.non_finite = 0
        if finite:
            return self._precision.accept(True)
        found = overflow.locate(self._sharding)
        self.non_finite = found.elements
        try:
            accepted = self._precision.accept(False)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} {found}") from None
        if not accepted and self.rank == 0:  # every rank knows the same
            logger.warning("step %d skipped: %s", self.steps + self.skipped_steps + 1, found)
        return accepted

    def _report_idle(self, idle: frozenset[str]) -> None:
        fresh = idle - self._idle
        if fresh and self.rank == 0:
            logger.warning(
                "no gradient reached %s on any rank; it stays as it is (zero gradient, no decay).", sorted(fresh)
            )
        self._idle |= idle

    def train_step(self, batches: Sequence[Any], forward: Forward | None = None) -> float:
        """One optimizer step over `batches`, one per micro-batch; the mean loss over ranks and micro-batches.

        forward(engine, batch) -> loss; without it the batch is passed on (a dict as keywords, a tuple or list as
        arguments) and the output's loss is taken: a scalar, `.loss`, ["loss"], or the first element.
        """
        if isinstance(batches, Mapping | Tensor):
            raise ProtocolError(
                f"train_step takes a list of micro-batches and got one {type(batches).__name__}: write "
                "engine.train_step([batch])."
            )
        if len(batches) != self.accumulation:
            raise ProtocolError(
                f"train_step got {len(batches)} micro-batches, and batch.accumulation is {self.accumulation}."
            )
        for batch in batches:
            self.backward(forward(self, batch) if forward is not None else loss_of(self._forward(batch)))
        self.step()
        assert self.loss is not None
        return self.loss

    def _forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    def eval_step(self, batch: Any, forward: Forward | None = None) -> Any:
        """One forward in evaluation mode without gradients; the model's mode is restored."""
        self.drain()
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return forward(self, batch) if forward is not None else self._forward(batch)
        finally:
            self.module.train(training)

    # -------------------------------------------------------------------------------------------------- contexts
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside stay on this rank, at any stage; they are reduced at the next backward outside, or `step`.

        At stages 2 and 3 this needs memory for whole gradients, which is the price of the saved communication.
        """
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
        for name, tensor in self._sharding.full("master", self._sharding.names):
            yield name, tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)

    def view(self, kind: str, pattern: str = "*") -> Iterator[tuple[str, Tensor]]:
        """Collective: (name, whole copy) of "param", "master", "grad" or an optimizer state such as "exp_avg".

        pattern: of parameter names, as in fnmatch. "grad" is the mean gradient, unscaled and before clipping; ask
        between the last backward and `step`. Raises ProtocolError for a kind that does not exist (yet).
        """
        self.drain()
        return whole_tensors.view(self, kind, pattern)

    def state_dict(self) -> dict[str, Tensor]:
        """Collective: what `module.state_dict()` of an ordinary model would hold, whole, on every rank."""
        self.drain()
        return whole_tensors.ordinary_state_dict(self)

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
        blocking: bool = True,
    ) -> Path:  # fmt: skip
        """Collective: save everything that training needs to go on exactly; returns the checkpoint's folder.

        tag: its name, "step-<steps>" by default; one of that name is replaced. client_state: plain data of yours. With
        blocking=False state is copied now and written while training goes on; the next call of `step` or of a method
        here raises what failed. Raises CheckpointError on all ranks alike; older checkpoints stay as they were.
        """
        self._require_open()
        self.drain()
        return self._checkpointing.save(folder, tag, client_state, blocking)

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

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("this engine was closed; make another with trilithon.initialize().")
        if self._applying is not None and self._applying.broken is not None:
            raise self._applying.broken
        self._checkpointing.require_whole()

    def drain(self) -> None:
        """Make parameters and state those after the last step on all ranks (delayed update, 0/1 Adam between rounds).

        Collective when there is something to do. `uneven`, `gathered`, `save`, `close`, evaluation and views do it."""
        if self._applying is not None and not self._closed:
            self._require_open()
            self._applying.drain()

    def close(self, *, give_back: bool = True) -> None:
        """Collective at stage 3 and on a mesh: the model gets its whole parameters back.

        give_back=False leaves the parameters cut, and their values are gone: for models that no rank has room for.
        A save in the background is written out first; what it failed with is raised when everything else is done.
        """
        if self._closed:
            return
        if self._applying is not None:
            self._applying.drain()
        self._closed = True
        try:
            self._checkpointing.close()
        finally:
            if self._monitor is not None:
                self._monitor.close()
            if self._recompute is not None:
                self._recompute.remove()
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
            return abandoned.let_go(self._sharding, self._update, self._applying, self.config.offload)
        self.close()
