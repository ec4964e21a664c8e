"""The compressed all-reduce: a mean over ranks in two exchanges of compressed chunks, each with its error fed back.

    z   = u + residual;  C(z) goes out, chunk j to rank j;  residual        = z - C(z)
    y_j = mean over ranks of C(z)_j + server_residual;      server_residual = y_j - C(y_j)
    result = all chunks C(y_j), the same on every rank

Every rank is the server of one chunk, so no rank moves more than another. One result is coarse; what a rank failed to
send stays in its residuals and is sent later, so that sums over steps are right to rounding:

    mean(u + residual) + server_residual (before) = result + mean(residual) + server_residual (after)

(Tang et al. 2021, "1-bit Adam", arXiv:2102.02888, section 4 and figure 3.) Padding to a multiple of 8 per chunk stands
at the end, is zero, and has no residual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trilithon.comm.compressor import Compressor, Rows
from trilithon.config.compressed import padded_numel
from trilithon.contracts import Collectives, Tag


class CompressedAllReduce:
    """One vector of `numel` elements that is averaged again and again over one group, with its residuals.

    worker: compresses what ranks send; server: the means (the same compressor if not given). error_feedback False
    throws away what was lost, which is for comparison only. A group of one has no residuals and changes nothing.
    """

    def __init__(
        self,
        group: Collectives,
        numel: int,
        worker: Compressor,
        server: Compressor | None = None,
        *,
        device: torch.device | str = "cpu",
        error_feedback: bool = True,
    ) -> None:
        self._group, self._feedback = group, error_feedback
        self._worker, self._server = worker, server if server is not None else worker
        size = group.world_size
        self.numel = numel
        self.padded = padded_numel(numel, size)
        self.chunk = self.padded // size
        kept = (self.padded, self.chunk) if size > 1 else (0, 0)
        self.residual = torch.zeros(kept[0], device=device)  # [padded] what this rank has not yet sent
        self.server_residual = torch.zeros(kept[1], device=device)  # [chunk] what this server has not yet sent

    def __call__(self, u: Tensor, tag: Tag, inactive: Tensor | None = None) -> None:
        """u [padded] f32, zero in its padding, becomes the compressed mean over ranks; all ranks get the same bits.

        inactive: int64 indices below `numel`, ascending and the same on all ranks, that take no part this time: they
        enter no scale, their residuals stay, and they come back as zero. Nothing here may be infinite or NaN.
        """
        size, chunk = self._group.world_size, self.chunk
        if inactive is not None:
            u[inactive] = 0.0
        if size == 1 or self.numel == 0:
            return
        mine = self._group.rank * chunk
        here = None if inactive is None else inactive[(inactive >= mine) & (inactive < mine + chunk)] - mine
        sent = self._encode(self._worker, self.residual.add_(u), self._real(0, size), inactive)
        received = torch.empty_like(sent)
        self._group.all_to_all(received, sent, tag).wait()
        mean = u[:chunk]  # u has been taken over, and becomes scratch
        for rank, row in enumerate(received.view(size, -1)):
            self._worker.decode(row, mean, accumulate=rank > 0)
        mean.div_(size)
        if here is not None:
            mean[here] = 0.0
        self.server_residual.add_(mean)
        real = self._real(self._group.rank, 1)
        self.server_residual[real[0] :].zero_()
        own = self._encode(self._server, self.server_residual, real, here)
        everything = torch.empty(size * own.numel(), dtype=torch.uint8, device=u.device)
        self._group.all_gather(everything, own, tag).wait()
        for rank, row in enumerate(everything.view(size, -1)):
            self._server.decode(row, u[rank * chunk : (rank + 1) * chunk])
        u[self.numel :].zero_()
        if inactive is not None:
            u[inactive] = 0.0

    def _encode(self, by: Compressor, z: Tensor, real: Sequence[int], inactive: Tensor | None) -> Tensor:
        """The payload of z, which becomes the new residual; what is inactive keeps the one it has."""
        rows, kept, counted = len(real), None, real
        if inactive is not None:
            kept = z[inactive]
            z[inactive] = 0.0
            left_out = torch.bincount(inactive // (z.numel() // rows), minlength=rows).tolist()
            counted = [there - out for there, out in zip(real, left_out, strict=True)]
        payload = torch.empty(rows, by.nbytes(z.numel() // rows), dtype=torch.uint8, device=z.device)
        by.encode_(z.view(rows, -1), payload, Rows(real, counted))
        if not self._feedback:
            z.zero_()
        if inactive is not None and kept is not None:
            z[inactive] = kept
        return payload.view(-1)

    def _real(self, first: int, count: int) -> list[int]:
        """How many elements of each of the chunks [first, first + count) are not padding."""
        return [min(max(self.numel - (first + i) * self.chunk, 0), self.chunk) for i in range(count)]

    @property
    def rank(self) -> int:
        """Which chunk this rank serves."""
        return self._group.rank

    def bytes(self) -> int:
        """Bytes of the residuals."""
        return 4 * (self.residual.numel() + self.server_residual.numel())

    def sent_bytes(self) -> int:
        """Bytes that one rank sends per call."""
        others = self._group.world_size - 1
        return others * (self._worker.nbytes(self.chunk) + self._server.nbytes(self.chunk)) if self.numel else 0


def conserved(residuals: Sequence[Tensor], server_residuals: Sequence[Tensor], numel: int) -> Tensor:
    """[numel] f32: what all ranks together have not yet sent, the mean of their residuals plus the servers'.

    In rank order; it is all that a run needs to go on with another number of ranks.
    """
    total = torch.zeros(numel, dtype=torch.float32)
    for residual in residuals:
        total.add_(residual[:numel].to(total.device))
    return total.div_(len(residuals)).add_(torch.cat([r.to(total.device) for r in server_residuals])[:numel])
