"""A student learns from a teacher's probabilities for the first part of training, and then alone.

    distill = StagedDistillation(teacher, stop_step=stop_after(total_steps))
    engine.hooks.append(distill)
    ...
    logits = engine(tokens)
    loss = cross_entropy(logits, targets) + distill.loss(logits, tokens)

A small student cannot match both targets to the end, so the teacher is left part-way; from that step on its term is
exactly zero, it runs no more, and its memory is given back. (Knowledge distillation: Hinton et al. 2015,
arXiv:1503.02531; stopping it: Rajbhandari et al. 2022, arXiv:2201.05596, section 4.2.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.errors import ConfigError, NonFiniteError, ProtocolError

Teacher = nn.Module | Callable[..., Tensor]


def distillation_loss(
    student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """temperature^2 times the mean over tokens of KL(teacher || student), in fp32. Gradients reach the student only.

    student, teacher: logits [..., V]; their last dimensions may be padded beyond `vocab_size`. mask: [...], tokens that
    count. Raises NonFiniteError when the teacher's logits are not finite: a wrong teacher is no reason to skip a step.
    """
    width = vocab_size if vocab_size is not None else student.shape[-1]
    if student.shape[:-1] != teacher.shape[:-1] or min(student.shape[-1], teacher.shape[-1]) < width:
        raise ConfigError(
            f"logits of the student {tuple(student.shape)} and the teacher {tuple(teacher.shape)} do not belong to one "
            f"vocabulary of {width} tokens; use models with the same tokenizer, and give vocab_size if one is padded."
        )
    wide = torch.promote_types(torch.float32, student.dtype)
    theirs = teacher[..., :width].detach().to(wide)
    if not bool(torch.isfinite(theirs).all()):
        raise NonFiniteError("the teacher's logits are not finite: look at its weights and its precision.")
    target = (theirs / temperature).log_softmax(dim=-1)
    mine = (student[..., :width].to(wide) / temperature).log_softmax(dim=-1)
    per_token = (target.exp() * (target - mine)).sum(dim=-1)
    if mask is None:
        return temperature**2 * per_token.sum() / max(per_token.numel(), 1)
    counted = mask.to(wide)
    return temperature**2 * (per_token * counted).sum() / counted.sum().clamp(min=1)


def stop_after(total_steps: int, fraction: float = 0.7) -> int:
    """The last step with a teacher, as a share of all steps (by default that of the paper's smaller run)."""
    if not 0 <= fraction <= 1:
        raise ConfigError(f"fraction={fraction} of the steps with a teacher: it is between 0 and 1.")
    return round(total_steps * fraction)


class StagedDistillation:
    """A `contracts.StepHook` that holds the teacher for the first `stop_step` updates.

    teacher: a model or function from the student's inputs to logits; a model is frozen and put in evaluation mode.
    beta: weight of the term. The phase follows from the number of the step, so a resumed run is in the right one.
    """

    def __init__(
        self, teacher: Teacher | None, *, stop_step: int, beta: float = 1.0, temperature: float = 1.0,
        vocab_size: int | None = None,
    ) -> None:  # fmt: skip
        if temperature <= 0 or beta < 0 or stop_step < 0:
            raise ConfigError(
                f"temperature={temperature}, beta={beta}, stop_step={stop_step}: above 0, at least 0, at least 0."
            )
        self.stop_step, self.beta, self.temperature, self.vocab_size = stop_step, beta, temperature, vocab_size
        self._teacher: Teacher | None = teacher
        self._step = 0
        if isinstance(teacher, nn.Module):
            teacher.eval().requires_grad_(False)

    @property
    def active(self) -> bool:
        """The step that runs (or, before the first, comes) is one with a teacher."""
        return max(self._step, 1) <= self.stop_step

    def on_step(self, step: int) -> None:
        """Called by the engine when the step `step` begins."""
        self._step = step
        if not self.active:
            self._teacher = None

    @torch.no_grad()
    def targets(self, *inputs: Any, **named: Any) -> Tensor | None:
        """The teacher's logits, or None once it is over."""
        if not self.active:
            return None
        if self._teacher is None:
            raise ProtocolError(
                f"step {self._step} is one with a teacher (until step {self.stop_step}), and there is none: pass the "
                "teacher to StagedDistillation, or set stop_step=0."
            )
        out = self._teacher(*inputs, **named)
        logits = out if isinstance(out, Tensor) else out.logits
        return logits.detach()

    def loss(self, student: Tensor, *inputs: Any, mask: Tensor | None = None, **named: Any) -> Tensor:
        """beta times the distillation loss of this micro-batch; exactly 0, without a forward, once it is over."""
        logits = self.targets(*inputs, **named)
        if logits is None:
            return student.new_zeros((), dtype=torch.float32)
        return self.beta * distillation_loss(
            student, logits, mask=mask, temperature=self.temperature, vocab_size=self.vocab_size
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the step it is in."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.on_step(int(state["step"]))
