"""What rests in host memory or on disk instead of on the device.

ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) keeps masters and optimizer state in host memory, ZeRO-Infinity
(Rajbhandari et al. 2021, arXiv:2104.07857) on disk as well. Sizes are in elements unless the name says bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trilithon.config.base import Count, Flag, NonNegativeReal, Positive, Section


class OffloadConfig(Section):
    """Where state rests between uses, and how it is brought."""

    state: Literal["device", "host", "disk"] = "device"
    """Where fp32 masters and optimizer state rest. host, disk: at stages 1 to 3, updated by the processor."""
    parameters: Literal["device", "host", "disk"] = "device"
    """Stage 3: where each rank's part of the parameters rests between uses."""
    gradients: Literal["device", "host", "disk"] | None = None
    """Stage 3: where reduced gradients rest until the update. null: where the parameters do."""
    path: Path | None = None
    """Folder on a local disk for what rests on disk. Each run makes a folder of its own in it, and removes it."""
    ratio: Annotated[NonNegativeReal, Field(le=1.0)] = 1.0
    """Share of the elements whose state rests off the device; the others are updated where they are."""
    sub_group_numel: Positive = 4 * 2**20
    """Longest slice that is brought, updated and sent back at once. Shorter ones need less memory."""
    buffers: Positive = 4
    """Disk: memory for this many of the longest slices, of each kind of state that rests there. 3 let reading, updating
    and writing overlap."""
    threads: Positive = 4
    """Disk: requests in flight at the same time."""
    piece_bytes: Positive = 8 * 2**20
    """Disk: largest request; longer ones are cut."""
    direct: Flag = True
    """Disk: go past the page cache (O_DIRECT) where the filesystem takes that. false: always through it."""
    delayed_update: Flag = False
    """Apply each gradient during the next forward and backward, one step late. It hides the update and changes
    training: parameters are those of one gradient earlier."""
    delay_after_steps: Count = 40
    """Delayed update: this many steps are made in the usual way first."""
