"""Training: one optimizer step, sequenced.

    loss = engine(batch)            # as often as the accumulation says
    engine.backward(loss)
    engine.step()

or `engine.train_step(batches)`. One step is: forwards and backwards -> gradients agreed -> skip, or clip, update,
publish -> rate moves on. `engine.Engine` adds what is around it: contexts, whole tensors, checkpoints, the end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trilithon.contracts import StepHook, SyncMode
from trilithon.engine import abandoned, overflow
from trilithon.engine.applying import make_applying
from trilithon.engine.feeding import whole_steps
from trilithon.engine.model_output import loss_of
from trilithon.engine.parts import Parts
from trilithon.errors import NonFiniteError, ProtocolError
from trilithon.optim.clip import agreed_norm, clip_factor

if TYPE_CHECKING:
    from trilithon.engine.checkpointing import Checkpointing
    from trilithon.engine.pipelined import Pipelined

logger = logging.getLogger(__name__)

Forward = Callable[[Any, Any], Any]

_FORGOTTEN = 16  # accumulations' worth of backwards without a step, after which somebody should be told


@dataclass
class _Window:
    """What has happened since the last step."""

    backwards: int = 0
    loss: Tensor | float = 0.0  # [] f64, sum of losses; it stays on the device, so that no backward waits for it
    weight: float | None = None  # sum of weights, once one was given
    failed: bool = False  # a stage of a pipeline raised, here


class Training:
    """The part of an Engine that trains."""

    _checkpointing: Checkpointing  # of the engine that this is the training of

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self.module, self.config, self.device, self.ledger = module, parts.config, parts.device, parts.ledger
        self.accumulation = parts.batch.accumulation
        self.boundary: bool | None = None
        self._monitor = parts.monitor
        self.hooks: list[StepHook] = [parts.monitor] if parts.monitor is not None else []
        self.steps = self.skipped_steps = self.micro_steps = 0
        self.grad_norm: float | None = None
        self.clip_factor: float | None = None
        self.loss: float | None = None
        self.non_finite = 0
        self._batch, self._sharding, self._update = parts.batch, parts.sharding, parts.update
        self._precision, self._rate, self._groups, self._low = parts.precision, parts.rate, parts.groups, parts.low
        self.mesh, self.slices = parts.topology, parts.parallel.slices
        self._experts, self._pipelined = parts.experts, parts.pipelined
        delay = parts.config.offload.delay_after_steps if parts.config.offload.delayed_update else None
        self._applying = make_applying(parts.sharding, parts.update, delay)
        if self._applying is not None:
            parts.sharding.before_hold = self._applying.drain
        self._window, self._syncing, self._window_open = _Window(), True, False
        self._uneven = self._closed = False
        self._idle: frozenset[str] = frozenset()

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
        """The next `step()` updates: as many backwards as the accumulation asks for have run, or `boundary` says so."""
        return self._window.backwards >= self.accumulation if self.boundary is None else self.boundary

    # -------------------------------------------------------------------------------------------------- one step
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Floating inputs are cast to the parameters' type under bf16 and fp16."""
        self._require_open()
        self._refuse_stages("engine(...)")
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

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, *, retain_graph: bool = False,
        share: float | None = None,
    ) -> None:  # fmt: skip
        """Backward of one micro-batch, and on its last one the reduction of gradients.

        loss: a scalar. Without `weight` the update follows the mean of all losses over ranks and micro-batches. With
        `weight` (tokens, say) `loss` is a sum, and the update follows sum of losses / sum of weights over all of them;
        a rank without data passes weight=0. More backwards than the accumulation before one step add up. share: the
        factor on this loss in place of 1 / accumulation; 1 for a loss that the caller has divided already.
        Raises ProtocolError out of order, NonFiniteError never (`step` decides). After an exception in backward the
        accumulation starts again from nothing.
        """
        self._require_open()
        self._refuse_stages("engine.backward")
        self._check_loss(loss, weight, share)
        self._open_window()
        window = self._window
        last = window.backwards + 1 >= self.accumulation if self.boundary is None else self.boundary
        if self._syncing:
            self._sharding.micro_step(last)
        else:
            self._sharding.micro_step_without_sync()
        scale = self._precision.scale
        factor = scale * share if share is not None else scale / (self.accumulation if weight is None else 1)
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

    def _require_optimizer(self) -> None:
        if self._update is None:
            raise ProtocolError("this engine has no optimizer: pass one to initialize(), or set config.optimizer.")

    def _check_loss(self, loss: Tensor, weight: object, share: float | None) -> None:
        self._require_optimizer()
        if self._uneven:
            raise ProtocolError("backward inside uneven() would wait for ranks that are done: leave the context first.")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ProtocolError(f"engine.backward takes a loss of one element; got {what}. Reduce it: loss.mean().")
        if not loss.requires_grad:
            raise ProtocolError("the loss does not depend on a trainable parameter: was it computed under no_grad()?")
        if share is not None and (weight is not None or not share > 0):
            raise ProtocolError(f"share={share}: a factor above 0, and instead of a weight.")
        if self._window.backwards and (weight is None) != (self._window.weight is None):
            raise ProtocolError("either all backwards before a step get a weight, or none of them.")

    def step(self) -> bool:
        """Update the parameters if this is the boundary of an accumulation. True when they changed.

        Before the boundary it does nothing. A step whose gradient is not finite on any rank is skipped on all (policy
        `precision.non_finite`, or loss scaling), and then rates, schedules and counters stay where they are.
        Raises ProtocolError without a backward, NonFiniteError when the policy says so, TierError when state on disk
        failed (on all ranks; the engine is of no use then).
        """
        if not self.at_boundary:
            self._refuse_stages("engine.step")
        return self._step()

    def _refuse_stages(self, what: str) -> None:
        if self._pipelined is not None:
            self._pipelined.refuse(what)

    def _step(self) -> bool:
        self._require_open()
        window, applying = self._window, self._applying
        if applying is None or window.backwards == 0:
            raise ProtocolError("step() without a backward: call engine.backward(loss) first.")
        if not self.at_boundary:
            return False
        told = [float(window.loss), window.weight or 0.0, self._checkpointing.ended]
        settled = self._sharding.settle([*told, float(window.failed)] if self._pipelined is not None else told)
        self._checkpointing.hear(settled.extra[2])
        if self._pipelined is not None and settled.extra[3]:
            self._forget_window()
            self._pipelined.raise_failure(self)
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

    def drop_gradients(self) -> None:
        """Forget what backwards since the last step have added up; the accumulation starts again from nothing."""
        self._require_open()
        self._forget_window()

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

    def train_step(self, batches: Sequence[Any] | None, forward: Forward | None = None) -> float:
        """One optimizer step over `batches`, one per micro-batch; the mean loss over ranks and micro-batches.

        forward(engine, batch) -> loss; without it the batch is passed on (a dict as keywords, a tuple or list as
        arguments) and the output's loss is taken: a scalar, `.loss`, ["loss"], or the first element.
        In a pipeline a batch is a pair (inputs, labels), and stages that need neither may pass None. Raises
        ProtocolError on all ranks when one has not all of its data, and what a layer raised, after all were told.
        """
        if self._pipelined is not None and forward is None:
            return self._train_stages(self._pipelined, batches)
        self._refuse_stages("train_step(forward=...)")
        assert batches is not None, "only stages in the middle of a pipeline have no data"
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

    def batches(self, loader: Iterable[Any] | None, *, repeat: bool = False) -> Iterator[list[Any]]:
        """`for batches in engine.batches(loader): engine.train_step(batches)`, which ends on all ranks together.

        Each item is as many micro-batches as a step has; what is left over on some rank is not used. loader: None on
        ranks without data (stages in the middle of a pipeline). repeat: begin it anew whenever it ends, for ever.
        Collective. Raises ProtocolError on all ranks when it is to repeat and cannot be begun anew.
        """
        return whole_steps(self, loader, repeat=repeat)

    def _train_stages(self, pipelined: Pipelined, batches: Sequence[Any] | None) -> float:
        self._require_open()
        self._require_optimizer()
        if self._window.backwards:
            raise ProtocolError("train_step after a backward whose step() is missing: call engine.step() first.")
        try:
            pipelined.train(self, batches)
        except BaseException as error:
            if self._window_open:
                self._abandon(error)
            raise
        self._step()
        assert self.loss is not None
        return self.loss

    def _forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    def eval_step(
        self, batch: Any, forward: Forward | None = None, *, outputs: bool = False, own_data: bool = False
    ) -> Any:
        """One forward in evaluation mode without gradients; the model's mode is restored.

        Given a list of any number of pairs (inputs, labels), as a pipeline wants it, the result is their mean loss on
        all ranks; with `outputs` it is (mean loss, what the last layer returned for each of them), the latter None but
        on the last stage, where labels may be None. own_data: the mean over what this rank was given, not over all
        ranks. Raises ProtocolError on all ranks for lists that are not equally long.
        """
        if self._pipelined is not None and forward is None and (self._pipelined.stages > 1 or isinstance(batch, list)):
            self._require_open()
            return self._pipelined.evaluate(self, batch, outputs=outputs, own_data=own_data)
        self._refuse_stages("eval_step(forward=...)")
        self.drain()
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                if forward is None and _is_list_of_pairs(batch):
                    return self._mean_loss(batch, outputs=outputs, own_data=own_data)
                return forward(self, batch) if forward is not None else self._forward(batch)
        finally:
            self.module.train(training)

    def _mean_loss(self, batches: Sequence[Any], *, outputs: bool, own_data: bool) -> Any:
        """As a pipeline of one stage: (inputs, labels) are the arguments of the model."""
        lengths = self._sharding.exchange(len(batches), "engine.eval_step")
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ProtocolError(
                f"engine.eval_step got lists of {lengths[:16]} micro-batches, by rank. Pass equally many on all ranks, "
                "and at least one, or evaluate one at a time inside engine.uneven()."
            )
        made = [self._forward(batch) for batch in batches]
        own = math.fsum(float(loss_of(output)) for output in made) / len(made)
        mean = own if own_data else self._sharding.sum((own,), "evaluation")[0] / len(lengths)
        return (mean, made) if outputs else mean

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


def _is_list_of_pairs(batch: Any) -> bool:
    """Micro-batches (inputs, labels), and not the arguments of one forward."""
    return isinstance(batch, list) and all(isinstance(one, tuple | list) and len(one) == 2 for one in batch)
