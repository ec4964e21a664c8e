"""Keep freed memory of large CPU tensors instead of giving it back to the system at once.

Training frees and allocates the same sizes at every step. glibc returns large blocks to the kernel when they are freed,
and the next step pays a page fault for every 4 KiB of them again. Raising two thresholds keeps the pages. What the
process needs at its peak stays what it is; between peaks it keeps it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 4096  # mallopt takes an int


def keep_freed_memory() -> bool:
    """Once per process, on Linux with glibc; True if it took effect.

    Does nothing where the user chose: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES or an allocator
    of their own (LD_PRELOAD), or TRILITHON_KEEP_FREED_MEMORY=0.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    off = os.environ.get("TRILITHON_KEEP_FREED_MEMORY", "1") == "0"
    if off or not sys.platform.startswith("linux") or any(os.environ.get(name) for name in chosen):
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None or not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
