"""bf16 and fp16 numbers in compiled loops, which know them only as integers.

A loop calls `load`, `store` and `root` of this file. In Python they are only names; `register` teaches them to numba,
by the element type of the array: float32 is itself, uint16 holds bf16 patterns, and int16 holds fp16 patterns. Storing
rounds to nearest, ties to even, as torch's conversions do; a NaN stays a NaN and a value too large becomes infinite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


def load(array: Any, index: int) -> Any:
    """array[index] as float32."""
    raise NotImplementedError("compiled loops only")


def store(array: Any, index: int, value: Any) -> None:
    """array[index] = value (float32), rounded to nearest even."""
    raise NotImplementedError("compiled loops only")


def root(value: Any) -> Any:
    """The square root, correctly rounded. numba's own calls the C library, which keeps a loop from being vectorised."""
    raise NotImplementedError("compiled loops only")


@cache
def register() -> None:
    """Teach numba the three functions. Needs numba; compiles nothing."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic, overload

    @intrinsic
    def as_float(context: Any, bits: Any) -> Any:
        return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())

    @intrinsic
    def as_bits(context: Any, value: Any) -> Any:
        return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))

    @intrinsic
    def llvm_sqrt(context: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [args[0].type]), args)

        return value(value), generate

    @overload(root)
    def _root(value: Any) -> Any:
        def correctly_rounded(value: Any) -> Any:
            return llvm_sqrt(value)

        return correctly_rounded

    @overload(load)
    def _load(array: Any, index: Any) -> Any:
        return {types.float32: load_f32, types.uint16: load_bf16, types.int16: load_f16}[array.dtype]

    @overload(store)
    def _store(array: Any, index: Any, value: Any) -> Any:
        return {types.float32: store_f32, types.uint16: store_bf16, types.int16: store_f16}[array.dtype]

    def load_f32(array: Any, index: Any) -> Any:
        return array[index]

    def load_bf16(array: Any, index: Any) -> Any:
        return as_float(np.uint32(np.uint32(array[index]) << np.uint32(16)))

    def load_f16(array: Any, index: Any) -> Any:
        half = np.uint32(np.uint16(array[index]))
        # Exponent and fraction moved to their place in float32; multiplying by 2^112 repairs the exponent's offset,
        # and turns subnormal numbers into normal ones on the way.
        moved = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
        bits = as_bits(np.float32(as_float(moved) * np.float32(2.0**112)))
        bits = np.uint32(bits | np.uint32(0x7F800000)) if moved >= np.uint32(0x7C00 << 13) else bits
        return as_float(np.uint32(bits | np.uint32((half & np.uint32(0x8000)) << np.uint32(16))))

    def store_f32(array: Any, index: Any, value: Any) -> Any:
        array[index] = value

    def store_bf16(array: Any, index: Any, value: Any) -> Any:
        bits = as_bits(np.float32(value))
        # Half a unit of the last place kept, less one if that place is even: ties go to even.
        half = np.uint32(np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        rounded = np.uint32(np.uint32(bits + half) >> np.uint32(16))
        array[index] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)  # noqa: PLR0124

    def store_f16(array: Any, index: Any, value: Any) -> Any:
        bits = as_bits(np.float32(value))
        sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
        size = np.uint32(bits & np.uint32(0x7FFFFFFF))
        # Normal numbers: rebias the exponent by -112, round as for bf16; a carry may run on into infinity, rightly so.
        half = np.uint32(np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1)))
        normal = np.uint32(np.uint32(np.uint32(size + half) - np.uint32(112 << 23)) >> np.uint32(13))
        # Subnormal numbers: adding 0.5 leaves exactly the bits that are kept, rounded by the addition itself.
        small = np.uint32(as_bits(np.float32(as_float(size) + np.float32(0.5))) - np.uint32(0x3F000000))
        result = small if size < np.uint32(0x38800000) else normal
        result = np.uint32(0x7C00) if size >= np.uint32(0x47800000) else result
        result = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else result
        array[index] = np.int16(np.uint16(result | sign))
