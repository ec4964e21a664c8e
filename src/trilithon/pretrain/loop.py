"""The steps of a training run: feed, update, agree, measure, save, tell.

After every step the ranks agree on whether one of them was asked to stop or to save, and the loss is their mean, so
they always save and leave the loop together. The loop's own state is what has happened: with the loader's position and
the engine's state it continues where it was saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trilithon.data import Loader
from trilithon.engine.monitor import Monitor
from trilithon.errors import CheckpointError, NonFiniteError
from trilithon.pretrain.agreement import Agreement
from trilithon.pretrain.interrupt import StopRequest
from trilithon.pretrain.progress import Display, StepView, flat_memory
from trilithon.pretrain.report import History
from trilithon.pretrain.saving import Saver

_SMOOTHING = 0.9  # of the displayed time per step


class Trainee(Protocol):
    """The part of the engine that the loop uses."""

    @property
    def device(self) -> torch.device: ...

    @property
    def lr(self) -> Sequence[float]: ...

    @property
    def grad_norm(self) -> float | None: ...

    @property
    def skipped_steps(self) -> int: ...

    @property
    def loss(self) -> float | None: ...

    def step(self) -> bool: ...

    def train_step(self, batches: Sequence[Any], forward: Callable[[Any, Any], Any] | None = None) -> float:
        """The mean loss over ranks and micro-batches."""
        ...

    def memory_by_tier(self) -> Mapping[str, Mapping[str, int]]: ...


@dataclass(slots=True)
class TrainLoop:
    """One run's loop; `run` goes through it once."""

    engine: Trainee
    loader: Loader
    agreement: Agreement
    monitor: Monitor
    display: Display
    validate: Callable[[], float]
    steps: int
    accumulation: int
    eval_every: int  # 0: not inside the loop
    show_every: int
    saver: Saver
    forward: Callable[[Any, Any], Any] | None = None  # of a micro-batch; None: stages of a pipeline know themselves
    load: Callable[[], Mapping[str, float]] = dict  # of the experts in the last forward, if there are any
    history: History = field(default_factory=History)
    seconds: float = 0.0  # of training, without evaluations
    done: int = 0  # steps
    stopped_by: int = 0  # the signal that ended the run early
    memory: dict[str, int] = field(default_factory=dict)
    asked_outside: Callable[[], bool] = bool  # whether who started the ranks asks for a checkpoint; bool() says no
    _step_s: float = math.nan
    _steps_here: int = 0  # since this process began

    def run(self, request: StopRequest) -> None:
        """Train to the last step, or to the end of the step in which some rank was asked to stop.

        Raises NonFiniteError, on every rank, at the first loss that is NaN or infinite.
        """
        batches = self.loader.endless()
        for step in range(self.done + 1, self.steps + 1):
            started = time.perf_counter()
            self.monitor.on_step(step)
            rate = float(self.engine.lr[0])  # of this step: afterwards the engine answers for the next one
            try:
                loss = self._train_step(self._window(batches))
            except NonFiniteError as error:  # agreed by the engine, so every rank is here
                raise NonFiniteError(self._not_finite(step, rate, str(error))) from None
            save_asked = request.take_save() or self.asked_outside()
            self.stopped_by, save_asked = self.agreement.requests(step, stop=request.signal, save=save_asked)
            self._took(time.perf_counter() - started, request)
            self.done = step
            self._tell(step, loss, rate)
            if not math.isfinite(loss):  # the engine's loss is the mean over ranks, so all of them see it
                raise NonFiniteError(self._not_finite(step, rate, "the loss is NaN or infinite."))
            if self.stopped_by:
                request.at_boundary()
                self.saver.after_step(step, asked=save_asked, last=True)
                return
            if self.eval_every and step % self.eval_every == 0 and step < self.steps:
                self.measure(step)
            self.saver.after_step(step, asked=save_asked, last=False)

    def state_dict(self) -> dict[str, Any]:
        """Plain data. The history, which grows with the steps, is rank 0's to save; see `share_history`."""
        history = self.history.state_dict() if self.agreement.rank == 0 else None
        return {"done": self.done, "seconds": self.seconds, "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the saved step. The loader and the engine are restored by themselves."""
        self.done, self.seconds = int(state["done"]), float(state["seconds"])
        if state["history"] is not None:
            self.history.load_state_dict(state["history"])

    def share_history(self) -> None:
        """Collective, after a load: every rank has what rank 0 restored."""
        self.history.load_state_dict(self.agreement.on_first_rank(self.history.state_dict, "pretrain.history"))

    def _train_step(self, batches: Sequence[Any]) -> float:
        """One step, also if a save in the background turns out to have failed: that is told before the update."""
        try:
            return self.engine.train_step(batches, self.forward)
        except CheckpointError as error:  # on all ranks alike
            self.saver.failed(error)
        self.engine.step()
        assert self.engine.loss is not None
        return self.engine.loss

    def measure(self, step: int) -> float:
        """Evaluate now and record it."""
        loss = self.validate()
        self.history.validation.append((step, loss))
        self.monitor.record(step, {"validation/loss": loss}, always=True)
        return loss

    def recent_loss(self) -> float:
        """Mean training loss of the last tenth of the steps, NaN before the first."""
        recent = self.history.train[-max(len(self.history.train) // 10, 1) :]
        return sum(loss for _, loss in recent) / len(recent) if recent else math.nan

    def _window(self, batches: Iterator[Any]) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of one step, on the engine's device."""
        device = self.engine.device
        return [tuple(part.to(device) for part in next(batches)) for _ in range(self.accumulation)]

    def _took(self, seconds: float, request: StopRequest) -> None:
        self.seconds += seconds
        self._steps_here += 1
        request.step_took(seconds)
        settled = self._steps_here > 2  # the first step compiles and allocates: its time says nothing about the next
        self._step_s = _SMOOTHING * self._step_s + (1 - _SMOOTHING) * seconds if settled else seconds

    def _tell(self, step: int, loss: float, lr: float) -> None:
        self.history.train.append((step, loss))
        if step % self.show_every == 0 or not self.memory:
            self.memory = flat_memory(self.engine.memory_by_tier())
        tokens_per_s = self.accumulation * self._tokens_per_micro() / self._step_s
        norm = float(self.engine.grad_norm or 0.0)
        load = self.load()
        self.monitor.record(
            step,
            {
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "tokens_per_s": tokens_per_s,
                "tokens": float(step * self.accumulation * self._tokens_per_micro()),
                "skipped_steps": float(self.engine.skipped_steps),
                **{f"memory/{name}": float(size) for name, size in self.memory.items()},
                **{f"experts/{name}": value for name, value in load.items()},
            },
            always=step in (1, self.steps),  # so that a short run has a curve, too
        )
        latest = self.history.validation[-1][1] if self.history.validation else math.nan
        self.display.step(StepView(step, loss, lr, norm, tokens_per_s, self.memory, latest, load))

    def _tokens_per_micro(self) -> int:
        """Tokens of one micro-batch on all ranks together."""
        return self.loader.sampler.global_size * len(self.loader.dataset[0][0])

    def _not_finite(self, step: int, rate: float, what: str) -> str:
        finite = [loss for _, loss in self.history.train if math.isfinite(loss)]
        before = f"last finite loss {finite[-1]:.4g}" if finite else "no loss was finite"
        return (
            f"The run stopped at step {step} (learning rate {rate:.3g}, {before}). Use a smaller --lr, a longer "
            f"--warmup, a smaller --clip, or --precision fp32. What happened: {what}"
        )


def call_with_targets(call: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a micro-batch of inputs and targets."""
    loss: Tensor = call(*batch)
    return loss
