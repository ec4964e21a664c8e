"""Training and evaluation of a model whose layers are on several stages.

A step is: all ranks agree that every stage that needs it has the data -> each works through its order of forwards and
backwards -> gradients are reduced within stages (and over the copies of shared layers) -> the step goes on as any
other. An exception on one stage is told to all of them at the end, before anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trilithon.contracts import ReduceOp, Tag
from trilithon.engine.model_output import loss_of
from trilithon.engine.stages import Staged, move
from trilithon.engine.topology import Topology
from trilithon.errors import ProtocolError
from trilithon.parallel.pipeline.executor import Executor, UpstreamError
from trilithon.parallel.pipeline.layers import Layered
from trilithon.parallel.pipeline.plan import StagePlan
from trilithon.parallel.pipeline.schedule import make_orders
from trilithon.parallel.pipeline.seeds import random_kept
from trilithon.parallel.pipeline.travel import signature
from trilithon.parallel.pipeline.weights import split_linears

if TYPE_CHECKING:
    from trilithon.engine.training import Training

_NONE = -(2**62)
_COLUMN = ("data", "sequence", "tensor")


class Pipelined:
    """Runs the stages of one engine."""

    def __init__(self, staged: Staged, topology: Topology, device: torch.device, *, tolerant: bool) -> None:
        """Collective. tolerant: no layer of any stage talks to other ranks, so a stage that fails can go on."""
        self._staged, self._topology, self._device, self._tolerant = staged, topology, device, tolerant
        self._stage = staged.stage
        activations = gradients = None
        if staged.plan.stages > 1:
            activations, gradients = topology.make_messages("activations"), topology.make_messages("gradients")
        self._executor = Executor(self._stage, activations, gradients, device, dynamic_shape=staged.dynamic_shape)
        self._undo: Callable[[], None] = lambda: None
        if staged.settings.pipeline.schedule == "zero-bubble" and staged.plan.stages > 1:
            self._undo = split_linears(staged.model)

    @property
    def plan(self) -> StagePlan:
        return self._staged.plan

    @property
    def stages(self) -> int:
        return self._staged.plan.stages

    @property
    def is_first(self) -> bool:
        """This rank has the first layers, and needs inputs."""
        return self._stage.is_first(0)

    @property
    def is_last(self) -> bool:
        """This rank has the last layers, and needs labels."""
        return self._stage.is_last(self._staged.plan.chunks - 1)

    def refuse(self, what: str) -> None:
        """Raises ProtocolError for what needs all layers here."""
        if self.stages > 1:
            raise ProtocolError(
                f"{what} runs one stage only, and this model has {self.stages}. Train with engine.train_step(batches) "
                "and evaluate with engine.eval_step(batches), lists of (inputs, labels)."
            )

    # ---------------------------------------------------------------------------------------------------- training
    def train(self, training: Training, batches: Sequence[Any] | None) -> None:
        """All forwards and backwards of one step, gradients reduced. Collective."""
        micros = training.accumulation
        key = self._agree(training, batches, micros, "train_step")
        training._open_window()
        factor = training._precision.scale / micros
        training._experts.weigh(factor)
        draw = int(torch.randint(2**62, ())) if training.module.training else None
        work = _Training(training, self._staged, batches or (), key, draw, factor)
        order = self._staged.orders(micros)[self._staged.plan.stage]
        with random_kept(self._device):
            self._executor.run(order, work, tolerant=self._tolerant)
        training._sharding.reduce_window()
        window = training._window
        window.backwards, window.loss = micros, work.total * self.stages  # one stage in so many has losses
        window.failed = self._executor.failure is not None
        training.micro_steps += micros

    def raise_failure(self, training: Training) -> None:
        """Collective, after some rank failed in this step: all of them raise, that one what it failed with."""
        error = self._executor.failure
        self._executor.failure = None
        self._executor.forget_forms()
        mine = None if error is None or isinstance(error, UpstreamError) else f"{type(error).__name__}: {error}"
        told = training._sharding.exchange((self._staged.plan.stage, mine), "a stage has failed")
        if mine is not None and error is not None:
            error.add_note("trilithon: the other stages were told, and nothing of this step was applied.")
            raise error
        failed = [f"rank {rank} (stage {stage}): {text}" for rank, (stage, text) in enumerate(told) if text is not None]
        raise ProtocolError(
            f"another stage of the pipeline failed, and nothing of this step was applied. {'; '.join(failed)}"
        )

    # -------------------------------------------------------------------------------------------------- evaluation
    def evaluate(self, training: Training, batches: Any, *, outputs: bool, own_data: bool) -> Any:
        """The mean loss, or with `outputs` that and what the last layer returned, where that is. Collective."""
        training.drain()
        micros = self._agreed_count(training, batches)
        key = self._agree(training, batches, micros, "eval_step")
        work = _Evaluating(training, self._staged, batches or (), key, outputs=outputs)
        orders = make_orders("forward", self.stages, micros, self._staged.plan.chunks)
        was_training = training.module.training
        training.module.eval()
        try:
            with torch.no_grad(), random_kept(self._device):
                self._executor.run(orders[self._staged.plan.stage], work, tolerant=self._tolerant)
        finally:
            training.module.train(was_training)
        failed = float(self._executor.failure is not None)
        total, count, failures = training._sharding.sum((float(work.total), float(work.count), failed), "evaluation")
        if failures:
            self.raise_failure(training)
        if own_data:
            both = torch.tensor([float(work.total), float(work.count)], dtype=torch.float64, device=self._device)
            self._topology.pipe.all_reduce(both, Tag("evaluation", step=training.steps)).wait()
            total, count = both.tolist()
        mean = total / count if count else None
        return (mean, work.outputs if self.is_last else None) if outputs else mean

    def _agreed_count(self, training: Training, batches: Any) -> int:
        """How many micro-batches an evaluation has, which stages without data learn from the others."""
        here = len(batches) if isinstance(batches, list | tuple) else 0
        ends = torch.tensor([here, -here if here else _NONE], dtype=torch.int64, device=self._device)
        self._topology.comm.control.all_reduce(ends, Tag("engine.eval_step", step=training.steps), ReduceOp.MAX).wait()
        most, least = int(ends[0]), -int(ends[1])
        if most < 1 or most != least:
            raise ProtocolError(
                f"engine.eval_step got {least if most else 0} micro-batches on one rank and {most} on another. Pass a "
                "list of (inputs, labels), equally long on all ranks of the first and last stage."
            )
        return most

    # --------------------------------------------------------------------------------------------------- agreement
    def _agree(self, training: Training, batches: Sequence[Any] | None, micros: int, what: str) -> Hashable:
        """Collective: that all data are there; a key that is equal when all inputs of this pipeline have the shapes
        that they had at another time."""
        problem = self._problem(batches, micros)
        index, count = self._topology.part(_COLUMN)
        told = torch.zeros(1 + count, dtype=torch.int64, device=self._device)
        told[0] = problem is not None
        if problem is None and self.is_first:
            assert batches is not None
            told[1 + index] = _hash([signature(split(batch)[0]) for batch in batches])
        tag = Tag(f"engine.{what}", step=training.steps + 1)
        self._topology.comm.control.all_reduce(told, tag, ReduceOp.MAX).wait()
        if told[0]:
            found = training._sharding.exchange(problem, f"what is wrong with the data of engine.{what}")
            texts = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
            raise ProtocolError(f"engine.{what} cannot begin, on no rank: {'; '.join(texts[:4])}")
        return (what, micros, int(told[1 + index]))

    def _problem(self, batches: Any, micros: int) -> str | None:
        if not (self.is_first or self.is_last):
            return None
        if isinstance(batches, Mapping | Tensor) or not isinstance(batches, Sequence):
            return f"it got one {type(batches).__name__}; pass a list of (inputs, labels), one for each micro-batch."
        if len(batches) != micros:
            return f"it got {len(batches)} micro-batches, and this step has {micros}."
        strange = [type(batch).__name__ for batch in batches if not is_pair(batch)]
        if strange:
            return f"a micro-batch of a pipeline is a pair (inputs, labels); it got a {strange[0]}."
        return None

    def close(self) -> None:
        self._undo()


def is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def split(batch: Any) -> tuple[Any, Any]:
    """A micro-batch as (inputs, labels)."""
    return batch[0], batch[1]


def _hash(texts: Sequence[str]) -> int:
    whole = "\n".join(texts).encode()
    return crc32(whole) << 30 | (crc32(whole[::-1]) & 0x3FFFFFFF) | 1


class _Pass:
    """What a pass over micro-batches knows of the engine."""

    def __init__(
        self, training: Training, staged: Staged, batches: Sequence[Any], key: Hashable, draw: int | None = None
    ) -> None:
        self.step, self.key, self.draw = training.steps + 1, key, draw
        self.total: Tensor | float = 0.0  # [] f64, of the losses here
        self._training, self._staged, self._batches = training, staged, batches

    def inputs(self, micro: int) -> Any:
        x, _ = split(self._batches[micro])
        return pytree.tree_map(lambda leaf: move(leaf, self._training.device, self._training._low), x)

    def loss(self, output: Any, micro: int) -> Tensor:
        _, labels = split(self._batches[micro])
        labels = pytree.tree_map(lambda leaf: move(leaf, self._training.device, None), labels)
        model = self._staged.model
        loss = model.pipeline_loss(output, labels) if isinstance(model, Layered) else loss_of(output)
        if loss.numel() != 1:
            raise ProtocolError(f"the loss of a micro-batch has one element; got shape {tuple(loss.shape)}.")
        self.total = loss.detach().double().reshape(()) + self.total
        return loss


class _Training(_Pass):
    def __init__(  # noqa: PLR0917 (made in one place)
        self, training: Training, staged: Staged, batches: Sequence[Any], key: Hashable, draw: int | None, factor: float
    ) -> None:
        super().__init__(training, staged, batches, key, draw)
        self._factor = factor

    def finish(self, output: Any, micro: int) -> Tensor | None:
        loss = self.loss(output, micro)
        if not loss.requires_grad:
            raise ProtocolError("the loss does not depend on a trainable parameter: was it computed under no_grad()?")
        scaled = loss if loss.dtype == torch.float64 else loss.float()
        return scaled * self._factor if self._factor != 1.0 else scaled

    def backward(self, compute: Callable[[], None]) -> None:
        sharding = self._training._sharding
        sharding.micro_step_without_sync()
        try:
            compute()
        except BaseException:
            sharding.abandon_backward()
            raise
        sharding.finish_backward()


class _Evaluating(_Pass):
    def __init__(
        self, training: Training, staged: Staged, batches: Sequence[Any], key: Hashable, *, outputs: bool
    ) -> None:
        super().__init__(training, staged, batches, key)
        self.outputs: list[Any] = []
        self.count = 0
        self._keep = outputs

    def finish(self, output: Any, micro: int) -> Tensor | None:
        if split(self._batches[micro])[1] is not None or not self._keep:
            self.loss(output, micro)
            self.count += 1
        if self._keep:
            self.outputs.append(output)
        return None

    def backward(self, compute: Callable[[], None]) -> None:
        raise AssertionError("an evaluation has no backward")
