"""Dropout whose mask does not depend on how the tensor is cut over ranks.

Each call draws one number from torch's default CPU generator; whether an element is kept follows from that number and
the element's place in the whole tensor. So ranks whose generators agree drop the same elements as one process would,
each its part of them, and whoever restores the generator's state (recomputation in backward, a checkpoint) replays it.
(Dropout: Srivastava et al. 2014, JMLR 15. The mixing function is that of SplitMix64, Steele et al. 2014, section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
_BITS = 24


class Dropout(nn.Module):
    """p: chance of a zero; dims: what each dimension of its input counts, so that a rank knows which part is here.

    share: name of a dimension -> (index of this rank's part, number of parts); the engine fills it in.
    """

    def __init__(self, p: float, dims: Sequence[str] = ("batch", "tokens", "channels")) -> None:
        super().__init__()
        self.p, self.dims = p, tuple(dims)
        self.share: dict[str, tuple[int, int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The same shape; kept elements are divided by 1 - p. The input itself in evaluation mode."""
        if not self.training or self.p == 0.0:
            return x
        draw = int(torch.randint(2**62, ()))
        shares = [self.share.get(name, (0, 1)) for name in self.dims]
        keep = keep_mask(draw, self.p, x.shape, shares, x.device)
        dropped: Tensor = torch.where(keep, x / (1.0 - self.p), 0.0)
        return dropped

    def extra_repr(self) -> str:
        return f"p={self.p}, dims={self.dims}"


def keep_mask(
    draw: int, p: float, shape: Sequence[int], shares: Sequence[tuple[int, int]], device: torch.device | str = "cpu"
) -> Tensor:
    """Which elements of this part of the whole tensor are kept: bool of `shape`.

    draw: the call's random number; shares: per dimension (index of this part, number of equal parts).
    """
    place = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for size, (index, parts) in zip(reversed(shape), reversed(shares), strict=True):
        here = (torch.arange(size, device=device) + index * size) * stride
        place = here.view(-1, *(1,) * place.ndim) + place
        stride *= size * parts
    mixed = place.mul_(_GOLDEN).add_(draw)
    mixed = mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_MIX_1)
    mixed = mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_MIX_2)
    drawn = _shifted(mixed.bitwise_xor_(_shifted(mixed, 31)), 64 - _BITS)  # [shape] whole numbers below 2^24
    kept: Tensor = drawn >= round(p * 2**_BITS)
    return kept


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count with zeros from the left, which torch's shift of signed numbers does not give."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def place_dropouts(model: nn.Module, share: dict[str, tuple[int, int]] | None) -> None:
    """Tell every `Dropout` of the model which part of its input this rank holds; None: all of it."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.share = {name: part for name, part in (share or {}).items() if name in module.dims}
