"""Inputs of blocks cut over tensor ranks: each keeps 1/t of what all of them have, and gathers it when it is needed.

Outside sliced matrices the activations of tensor ranks are the same, so t copies of each input are kept where one is
enough (P_a: Rajbhandari et al. 2020, arXiv:1910.02054, section 6.1). Each input is gathered once per recomputation: a
rank then sends (t - 1) ceil(n / t) elements. The parts rest in any other place: on the device, in contiguous buffers,
in host memory.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from trilithon.checkpointing.rest import Form, Kept, Known, Rest
from trilithon.contracts import Collectives, ReduceOp, Tag
from trilithon.errors import ProtocolError

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Part:
    """This rank's part of one tensor."""

    def __init__(self, tensor: Tensor, rest: Rest, group: Collectives, tag: Tag) -> None:
        self._form, self._asks, self._group, self._tag = Form(tensor), tensor.requires_grad, group, tag
        flat = self._form.flat(tensor)
        share = -(-flat.numel() // group.world_size)
        own = flat[min(group.rank * share, flat.numel()) :][:share]
        part = own.new_zeros(share)  # a copy, so that the whole can be freed; the last parts are padded
        part[: own.numel()].copy_(own)
        self._kept = rest.keep(part.requires_grad_(self._asks))

    def fetch(self) -> Tensor:
        """Collective."""
        part = self._kept.fetch().detach()
        whole = part.new_empty(self._group.world_size * part.numel())
        self._group.all_gather(whole, part, self._tag).wait()
        return self._form.shaped(whole[: self._form.numel]).requires_grad_(self._asks)


class PartitionedRest:
    """Inputs that ask for gradients are cut over `group`; masks and tables that blocks share stay whole.

    rest: where the parts are kept. All ranks of the group must call the same blocks with equal inputs. That they are
    equal is compared, bit for bit, in the first call of each block: ProtocolError, on all ranks, if they are not.
    """

    def __init__(self, rest: Rest, group: Collectives) -> None:
        self.rest, self._group = rest, group
        self._seen: set[Hashable] = set()
        self._block: Hashable = None
        self._compares = False
        self._known: Known[_Part] = Known()

    def begin(self, block: Hashable) -> None:
        self._block, self._compares = block, block not in self._seen
        self._seen.add(block)
        self.rest.begin(block)

    def keep(self, tensor: Tensor) -> Kept:
        """Collective in the first call of a block."""
        if not tensor.requires_grad or self._group.world_size == 1:
            return self.rest.keep(tensor)
        if self._compares:
            self._require_equal(tensor)
        kept = self._known.find(tensor)
        if kept is None:
            kept = _Part(tensor, self.rest, self._group, Tag(f"input of {self._block}"))
            self._known.remember(tensor, kept)
        return kept

    def _require_equal(self, tensor: Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        total = real.view(_WHOLE_NUMBERS[real.element_size()]).to(torch.int64).sum()
        ends = torch.stack((total, -total))
        self._group.all_reduce(ends, Tag(f"equal inputs of {self._block}"), ReduceOp.MAX).wait()
        if int(ends[0]) != -int(ends[1]):
            raise ProtocolError(
                f"an input of shape {tuple(tensor.shape)} of the recomputed block {self._block} differs between tensor "
                "ranks, so none of them may keep a part of it only. Recompute the block around it, leave "
                "recompute.partition out, or feed tensor ranks the same samples (by engine.mesh.data_rank)."
            )

    def bytes(self) -> dict[str, int]:
        return self.rest.bytes()

    def close(self) -> None:
        self.rest.close()
