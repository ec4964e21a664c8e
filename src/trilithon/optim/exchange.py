"""One fused vector that all ranks average with compression at every step: masks, idle parameters, scaling, residuals.

Masked elements are out for good: they enter no scale, send nothing and come back as zero. An element whose second
moment is zero never had a gradient, and would otherwise take steps of +-scale / eps (Tang et al. 2021, "1-bit Adam",
arXiv:2102.02888, section 4, discusses masks given by the user). Idle parameters, without a gradient on any rank, are
out for this step only and keep their values and residuals.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from trilithon.comm.compressed import CompressedAllReduce
from trilithon.comm.compressor import Compressor
from trilithon.config.compressed import padded_numel
from trilithon.contracts import Tag
from trilithon.optim.fused import Fused
from trilithon.optim.link import Link

logger = logging.getLogger(__name__)


class Exchange:
    """vector: what is averaged, in place. scaling: by name, a fixed factor that equalises magnitudes on the way."""

    def __init__(
        self,
        link: Link,
        names: Collection[str],
        worker: Compressor,
        server: Compressor | None = None,
        *,
        error_feedback: bool = True,
    ) -> None:
        numel = sum(link.shapes[name].numel() for name in names)
        self.vector = Fused(link.shapes, names, padded_numel(numel, link.group.world_size), link.device)
        self.reduce = CompressedAllReduce(
            link.group, numel, worker, server, device=link.device, error_feedback=error_feedback
        )
        self._group = link.group
        self.scaling: dict[str, float] = {}
        self.active: Tensor | None = None  # [numel] bool; None: all are
        self._masked: Tensor | None = None  # [k] int64
        self._woken = False

    def mask(self, active: Tensor | None) -> None:
        """active: [numel] bool, the same on all ranks; None: all. What is masked now has no past either."""
        self.active, self._masked = active, None
        if active is None:
            return
        self._masked = masked = (~active).nonzero().view(-1)
        self.vector.flat[masked] = 0.0
        if self.reduce.residual.numel():
            chunk, mine = self.reduce.chunk, self.reduce.rank * self.reduce.chunk
            self.reduce.residual[masked] = 0.0
            self.reduce.server_residual[masked[(masked >= mine) & (masked < mine + chunk)] - mine] = 0.0

    def average(self, taking_part: Collection[str], step: int) -> None:
        """The vector becomes the compressed mean of all ranks' vectors, except where parameters do not take part."""
        flat, inactive = self.vector.flat, self._masked
        idle = self.vector.indices(set(self.vector.names) - set(taking_part))
        kept = None if idle is None else flat[idle]
        if inactive is not None:
            self._report_woken(flat[inactive])
        if idle is not None:
            inactive = idle if inactive is None else torch.cat([inactive, idle]).unique()
        self._scale(self.scaling)
        self.reduce(flat, Tag("compressed momentum", step=step), inactive)
        self._scale({name: 1.0 / factor for name, factor in self.scaling.items()})
        if idle is not None and kept is not None:
            flat[idle] = kept

    def average_exactly(self, step: int) -> None:
        """The vector becomes the mean of all ranks' vectors, uncompressed; residuals stay as they are."""
        self._group.all_reduce(self.vector.flat, Tag("uncompressed momentum", step=step)).wait()
        self.vector.flat.div_(self._group.world_size)

    def _scale(self, factors: Mapping[str, float]) -> None:
        for name, factor in factors.items():
            self.vector.view(name).mul_(factor)

    def _report_woken(self, values: Tensor) -> None:
        """Once: an element that never had a gradient while the variance was learnt has one now, which is dropped."""
        if self._woken:
            return
        count = int(values.count_nonzero())
        if count:
            self._woken = True
            logger.warning(
                "%d elements without a gradient during warm-up have one now; they stay as they are, since their "
                "variance is unknown. Put their parameters into a group with non_freeze=True, or warm up longer.",
                count,
            )
