"""The mean cross entropy of a language model, wherever its vocabulary and its tokens are.

    self.loss = TokenLoss()
    ...
    return self.loss(self.head(x), targets)      # or, without targets: self.loss.whole(self.head(x))

On one rank it is torch's. Under tensor slices the output matrix leaves the vocabulary cut; under sequence slices each
rank has some of the tokens: the engine tells this module, and no line of the model changes.
"""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.contracts import Collectives, Tag
from trilithon.parallel import regions
from trilithon.parallel.cross_entropy import vocabulary_cross_entropy
from trilithon.parallel.slicing import ParameterSlice


class TokenLoss(nn.Module):
    """Mean over the tokens of the sequences here whose target is not `ignore_index`, computed in fp32."""

    def __init__(self, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self._vocabulary: tuple[Collectives, ParameterSlice] | None = None
        self._sequence: Collectives | None = None

    def cut_vocabulary(self, group: Collectives, cut: ParameterSlice) -> None:
        """From now on logits hold this rank's columns of the vocabulary, as `cut` says, padding included."""
        self._vocabulary = (group, cut)

    def cut_sequence(self, group: Collectives) -> None:
        """From now on logits and targets hold this rank's tokens."""
        self._sequence = group

    def undo(self) -> None:
        """Vocabulary and tokens are whole again."""
        self._vocabulary = self._sequence = None

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """[] f32, equal on all ranks that share the sequences. NaN if no token counts, as torch's."""
        targets = targets_BT.flatten()
        if self._vocabulary is None:
            # In fp32: the log of a sum over thousands of bf16 exponentials has an error of the size of late progress.
            losses = F.cross_entropy(
                logits_BTV.float().flatten(0, -2), targets, ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing, reduction="mean" if self._sequence is None else "sum",
            )  # fmt: skip
            if self._sequence is None:
                return losses
        else:
            losses = self._cut_losses(logits_BTV.flatten(0, -2), targets).sum()
        count = (targets != self.ignore_index).sum()
        if self._sequence is None:
            return losses / count
        mean: Tensor = _MeanOverRanks.apply(losses, count, self._sequence)
        return mean

    def _cut_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        assert self._vocabulary is not None
        group, cut = self._vocabulary
        start, stop = cut.ranges()[0]
        return vocabulary_cross_entropy(
            logits[:, : stop - start],
            targets,
            group,
            start=start,
            total=cut.shape[0],
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def whole(self, logits_BTV: Tensor) -> Tensor:
        """All tokens and all of the vocabulary, on every rank."""
        if self._vocabulary is not None:
            group, cut = self._vocabulary
            logits_BTV = regions.gather(logits_BTV, -1, group, Tag("logits"), same_after=True)[..., : cut.shape[0]]
        if self._sequence is not None:
            logits_BTV = regions.gather(logits_BTV, -2, self._sequence, Tag("logits"))
        return logits_BTV


class _MeanOverRanks(torch.autograd.Function):
    """The sum over ranks of losses over that of counts. The engine averages gradients over these ranks, so each passes
    on world_size times its part of the mean: together that is the gradient of the mean."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, group: Collectives) -> Tensor:
        both = torch.stack([total.double(), count.double()])
        group.all_reduce(both, Tag("loss over the sequence")).wait()
        ctx.save_for_backward(both[1])
        ctx.parts = group.world_size
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (count,) = ctx.saved_tensors
        return grad * (ctx.parts / count).to(grad.dtype), None, None
