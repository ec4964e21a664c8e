"""Operations over flat tensors: one file each, every implementation with the same signature and the same bits.

Importing this package compiles nothing and loads no compiler.
"""

from __future__ import annotations

from trilithon.kernels.adam import adam_step
from trilithon.kernels.count_non_finite import count_non_finite
from trilithon.kernels.lion import lion_step
from trilithon.kernels.ordered_sum import ordered_sum
from trilithon.kernels.preconditioned import preconditioned_step
from trilithon.kernels.sgd import sgd_step
from trilithon.kernels.signs import sign_decode, sign_encode_
from trilithon.kernels.sum_of_squares import sum_of_squares

__all__ = [
    "adam_step",
    "count_non_finite",
    "lion_step",
    "ordered_sum",
    "preconditioned_step",
    "sgd_step",
    "sign_decode",
    "sign_encode_",
    "sum_of_squares",
]
