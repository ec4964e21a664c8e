"""`PipelineEngine`: training and evaluation of a model in stages, on `Engine.train_step` and `Engine.eval_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from trilithon.compat.deepspeed.runtime.engine import DeepSpeedEngine
from trilithon.compat.deepspeed.runtime.pipe.module import PipelineError, PipelineModule
from trilithon.data import RepeatingLoader


class PipelineEngine(DeepSpeedEngine):
    """Made by `initialize` from a PipelineModule. A micro-batch is a pair (inputs, labels)."""

    module: PipelineModule
    _batches: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    stage_id = property(lambda self: self.native.mesh.part("pipe")[0])
    num_stages = property(lambda self: self.native.mesh.part("pipe")[1])
    micro_batches = property(lambda self: self.gradient_accumulation_steps())
    grid = property(lambda self: self.module.mpu())

    def is_first_stage(self) -> bool:
        return bool(self.stage_id == 0)

    def is_last_stage(self) -> bool:
        return bool(self.stage_id == self.num_stages - 1)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        self.training_dataloader = loader
        self._batches = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        self.training_dataloader, self._batches = None, iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """fn(what the data yield) -> (inputs, labels)."""
        self._batch_fn = fn

    def _pull(self, source: Iterator[Any] | None, number: int) -> list[Any] | None:
        """The micro-batches of one step on the stages that need them; None on the others."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return None
        if source is None:
            raise PipelineError("there are no data: pass data_iter, or training_data to deepspeed.initialize().")
        pulled = [next(source) for _ in range(number)]
        return pulled if self._batch_fn is None else [self._batch_fn(one) for one in pulled]

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step over `micro_batches` micro-batches; the mean loss [], on all ranks. Collective.

        Raises RuntimeError under torch.no_grad().
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() computes gradients: leave torch.no_grad(), or call eval_batch().")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        elif self._batches is None and self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)
        before = self.native.steps
        loss = self.native.train_step(self._pull(self._batches, self.micro_batches))
        self.count_step(applied=self.native.steps > before, micro_steps=self.micro_batches)
        return torch.tensor(loss, dtype=torch.float32, device=self.device)

    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Any:  # fmt: skip
        """The mean loss [] over micro-batches, on all ranks; compute_loss=False: what the last layer returned, a list
        with one entry for each micro-batch, on the last stage alone; return_logits: both. Collective.
        """
        if reduce_output not in ("avg", None):
            raise PipelineError(f"reduce_output={reduce_output!r}: losses are averaged ('avg').")
        batches = self._pull(data_iter, num_micro_batches or self.micro_batches) or []
        if not compute_loss:
            batches = [(inputs, None) for inputs, _ in batches]
        wanted = return_logits or not compute_loss
        found = self.native.eval_step(batches, outputs=wanted)
        mean, outputs = found if wanted else (found, None)
        if not compute_loss:
            return outputs
        loss = torch.tensor(mean, dtype=torch.float32, device=self.device)
        return (loss, outputs) if return_logits else loss

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError("a pipelined engine has no forward, backward or step: call train_batch() or eval_batch().")

    backward = step = forward

    def reset_activation_shape(self, *_: Any) -> None:
        """Nothing to do: what travels may change its shape, and losses beside the main one are added in loss_fn."""

    get_additional_losses = set_has_attention_mask = reset_activation_shape
