"""Keep freed memory of large CPU tensors instead of giving it back to the system at once, or the reverse.

Training frees and allocates the same sizes at every step. glibc gives freed memory at the top of its heap back to the
kernel, and the next step pays a page fault for every 4 KiB of it again; keeping it costs nothing at the peak. Blocks of
`_LARGE_BYTES` and more are mapped one by one instead: in the heap they would leave holes that nothing fits into.

Where parameters rest off the device, memory is what is short: then every block that is not small is mapped by itself
and given back when it is freed, or the holes between them would grow with the model.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 8 << 20
_SMALL_BYTES = 128 << 10
_NEVER = 2**31 - 4096  # mallopt takes an int


def keep_freed_memory(*, keep: bool = True) -> bool:
    """For the whole process, on Linux with glibc; True if it took effect. keep=False gives it back at once.

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
    mapped, trimmed = (_LARGE_BYTES, _NEVER) if keep else (_SMALL_BYTES, _LARGE_BYTES)
    return bool(mallopt(_M_MMAP_THRESHOLD, mapped)) and bool(mallopt(_M_TRIM_THRESHOLD, trimmed))
