"""Loops compiled on first use with numba, kept on disk for the next process.

Nothing is compiled at import or at installation, and without numba everything runs on the torch twins. A loop is used
once enough elements ask for it; since both implementations give the same bits, the choice cannot be seen in results.

The disk cache is a folder per loop, argument types, versions of numba, LLVM and Python, source of this package and
processor. Files appear in it by renaming, so a killed process leaves nothing half-written; one process compiles while
others that need the same loop wait for it, and a lock dies with its holder. What cannot be read or written is compiled
anew and kept in memory.

Compiled without fast-math: no reassociation, no contraction to fused multiply-add, no flushing of subnormal numbers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from trilithon.kernels import bits

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

Array: TypeAlias = NDArray[Any]
Loop = Callable[..., Any]
Operand: TypeAlias = Tensor | tuple[Tensor, ...] | None
Kind: TypeAlias = tuple[str, int]
# The integer patterns under which loops see 16-bit floating-point numbers; see `bits`.
_SEEN_AS = {
    torch.float32: (None, "float32"),
    torch.bfloat16: (torch.uint16, "uint16"),
    torch.float16: (torch.int16, "int16"),
    torch.uint8: (None, "uint8"),  # packed signs
}
# Below this, a first use is not worth loading the compiler (about half a second), unless it is loaded already.
MIN_NUMEL = 1 << 17
LOCK_WAIT_S = 60.0

_loops: dict[tuple[Any, ...], Loop | None] = {}


def compiled(loop: Loop, operands: Sequence[Operand], scalars: Sequence[float | bool]) -> Loop | None:
    """`loop` for these operands, or None if the torch twin is to run instead.

    operands: contiguous CPU tensors [n] of f32, bf16, f16 or uint8; tuples of such, of one dtype; or None where the
    loop tests for None. A float scalar reaches the loop as float32. Call the result with `arrays(operands)` and the
    scalars.
    The environment variable TRILITHON_KERNELS overrides the choice: "torch" or "numba", for any size.
    """
    wish = os.environ.get("TRILITHON_KERNELS", "auto")
    tensors = [tensor for operand in operands for tensor in _tensors(operand)]
    if wish == "torch" or not all(_compilable(t) for t in tensors) or not all(_uniform(o) for o in operands):
        return None
    if wish != "numba" and not _loops and max(t.numel() for t in tensors) < MIN_NUMEL:
        return None
    kinds = tuple(_kind(operand) for operand in operands)
    key = (loop, kinds, tuple(type(scalar) for scalar in scalars))
    if key not in _loops:
        _loops[key] = _prepare(loop, kinds, [type(scalar) for scalar in scalars]) if _numba_found() else None
    return _loops[key]


def arrays(operands: Sequence[Tensor | None]) -> list[Array | None]:
    """The operands' memory as numpy arrays, 16-bit numbers as integers; nothing is copied."""
    return [None if operand is None else array(operand) for operand in operands]


def array(tensor: Tensor) -> Array:
    """One operand's memory, as `arrays`."""
    pattern = _SEEN_AS[tensor.dtype][0]
    plain = tensor.detach()
    return plain.numpy() if pattern is None else plain.view(pattern).numpy()


def _compilable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _SEEN_AS and tensor.is_contiguous()


def _uniform(operand: Operand) -> bool:
    return len({tensor.dtype for tensor in _tensors(operand)}) <= 1


def _tensors(operand: Operand) -> tuple[Tensor, ...]:
    if operand is None:
        return ()
    return operand if isinstance(operand, tuple) else (operand,)


def _kind(operand: Operand) -> tuple[str, int]:
    """The element type that a loop sees, and the length of a tuple of arrays; 0 for a single array."""
    tensors = _tensors(operand)
    if not tensors:
        return "none", 0
    return _SEEN_AS[tensors[0].dtype][1], len(tensors) if isinstance(operand, tuple) else 0


def cache_folder() -> Path:
    """Where compiled loops are kept: $TRILITHON_CACHE, else the user's cache folder."""
    chosen = os.environ.get("TRILITHON_CACHE")
    if chosen:
        return Path(chosen) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trilithon" / "kernels"


@cache
def _numba_found() -> bool:
    found = importlib.util.find_spec("numba") is not None
    if not found:
        logger.warning(
            "numba is not installed, so optimizer steps on the CPU make several passes over memory instead of one. "
            "Results are the same. For the faster loops: pip install 'trilithon[fast]'"
        )
    return found


def _prepare(loop: Loop, kinds: Sequence[Kind], scalars: Sequence[type]) -> Loop | None:
    try:
        return _compile(loop, kinds, scalars)
    except Exception as error:  # an unknown processor or a broken installation must not stop training
        logger.warning("Compiling %s failed (%r); the torch implementation is used instead", loop.__qualname__, error)
        return None


def _compile(loop: Loop, kinds: Sequence[Kind], scalars: Sequence[type]) -> Loop:
    import numba

    bits.register()
    signature = _signature(kinds, scalars)
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    folder = cache_folder() / _key(loop, repr(signature))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _one_at_a_time(folder):
            cached = numba.njit(**options)(loop)
            _keep_on_disk(cached, loop, folder)
            cached.compile(signature)
            return _callable(cached)
    except Exception as error:  # a damaged cache, a full disk, an unknown file system
        logger.info("Compiled loops are not read from or kept in %s: %r", folder, error)
        _forget(folder)
        fresh = numba.njit(signature, **options)(loop)
        return _callable(fresh)


def _forget(folder: Path) -> None:
    """Without their index, what the files hold does not matter, and the next process writes them anew."""
    with suppress(OSError):
        for index in folder.glob("*.nbi"):
            index.unlink()


def _callable(dispatcher: Any) -> Loop:
    dispatcher.disable_compile()
    loop: Loop = dispatcher
    return loop


def _signature(kinds: Sequence[Kind], scalars: Sequence[type]) -> Any:
    from numba import types

    arguments = []
    for element, count in kinds:
        one = types.none if element == "none" else types.Array(getattr(types, element), 1, "C")
        arguments.append(types.UniTuple(one, count) if count else one)
    return tuple(arguments) + tuple(types.boolean if scalar is bool else types.float32 for scalar in scalars)


def _key(loop: Loop, signature: str) -> str:
    import llvmlite
    import llvmlite.binding
    import numba

    parts = [
        loop.__qualname__,
        signature,
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        platform.machine(),
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        _source_digest(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@cache
def _source_digest() -> str:
    """Of every file of this package: a loop calls functions of other files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, unless its loop is there already: reading needs no lock."""
    if any(folder.glob("*.nbi")):
        yield
        return
    if fcntl is None:
        raise OSError("no file locks on this system")
    with (folder / "lock").open("w") as lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {lock.name} for {LOCK_WAIT_S:g} s") from None
                time.sleep(0.02)
        yield  # closing the file releases the lock


def _keep_on_disk(dispatcher: Any, loop: Loop, folder: Path) -> None:
    """Point numba's own function cache at `folder`. Freshness is in the folder's name, so the stamp is constant."""
    from numba.core import caching

    class Locator(caching._CacheLocator):
        def get_cache_path(self) -> str:
            return str(folder)

        def get_source_stamp(self) -> int:
            return 0

        def get_disambiguator(self) -> str:
            return "loop"

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            return cls()

    class Impl(caching.CompileResultCacheImpl):
        _locator_classes = [Locator]  # noqa: RUF012

    class Cache(caching.FunctionCache):
        _impl_class = Impl

    dispatcher._cache = Cache(loop)
