"""Cross entropy of logits whose vocabulary is cut over tensor ranks, without putting them side by side.

With M the largest logit, e the sum of exp(z - M) and z_t the target's logit, each found over all ranks, the loss is
log e - (z_t - M) and its gradient exp(z - M) / e - [v is the target]. That moves 3 numbers per token instead of the
vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

# N tokens, V vocabulary of all ranks, v its part here

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trilithon.contracts import Collectives, ReduceOp, Tag


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, group: Collectives, *, start: int, total: int, ignore_index: int = -100,
    label_smoothing: float = 0.0, tag: Tag | None = None,
) -> Tensor:  # fmt: skip
    """The loss of every token, [N] f32; 0 where the target is ignore_index.

    logits: [N, v], columns start to start + v of `total`, without padding (v may be 0); targets: [N] whole numbers.
    """
    losses: Tensor = _CrossEntropy.apply(
        logits, targets, group, start, total, ignore_index, label_smoothing, tag or Tag("cross entropy")
    )
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, logits: Tensor, targets: Tensor, group: Collectives, start: int, total: int, ignore_index: int,
        label_smoothing: float, tag: Tag,
    ) -> Tensor:  # fmt: skip
        num_tokens, here = logits.shape
        z = logits.float()
        largest = z.amax(-1) if here else z.new_full((num_tokens,), -math.inf)
        group.all_reduce(largest, tag, ReduceOp.MAX).wait()
        z = z - largest[:, None]
        ignored = targets == ignore_index
        owned = (targets >= start) & (targets < start + here) & ~ignored
        local = (targets - start).masked_fill(~owned, 0)
        of_target = z.gather(1, local[:, None])[:, 0] if here else z.new_zeros(num_tokens)
        sums = [of_target.masked_fill(~owned, 0.0)]
        if label_smoothing:
            sums.append(z.sum(-1))
        exponentials = z.exp_()
        sums.append(exponentials.sum(-1))
        packed = torch.stack(sums)
        group.all_reduce(packed, tag).wait()
        log_sum = packed[-1].log()
        losses = log_sum - packed[0]
        if label_smoothing:
            losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - packed[1] / total)
        ctx.save_for_backward(exponentials.div_(packed[-1][:, None]), owned, local, ignored)
        ctx.total, ctx.label_smoothing, ctx.dtype = total, label_smoothing, logits.dtype
        return losses.masked_fill_(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shares, owned, local, ignored = ctx.saved_tensors
        d_logits = shares.clone()
        if ctx.label_smoothing:
            d_logits -= ctx.label_smoothing / ctx.total
        if d_logits.shape[1]:
            hit = owned.to(d_logits.dtype) * (1 - ctx.label_smoothing)
            d_logits.scatter_add_(1, local[:, None], -hit[:, None])
        d_logits *= grad.masked_fill(ignored, 0.0)[:, None]
        return (d_logits.to(ctx.dtype), *(None,) * 7)
