"""Triton twin of `adam_step`: the same operations in the same order, none fused, one pass on a GPU.

Chosen by TRILITHON_KERNELS=triton. Tested against the torch twin in Triton's interpreter; it has not been run on a GPU
yet, so it is not the default there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _adam(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - kernels take their arguments by position
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    low_ptr,
    numel,
    grad_scale,
    keep,
    decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inv_sqrt_c2,
    eps,
    DECAYS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    weight = tl.load(p_ptr + index, mask=inside) * keep
    grad = tl.load(g_ptr + index, mask=inside).to(tl.float32) * grad_scale
    if DECAYS:
        grad = grad + weight * decay
    m = tl.load(m_ptr + index, mask=inside)
    v = tl.load(v_ptr + index, mask=inside)
    m = m + (grad - m) * one_minus_beta1
    v = v * beta2 + (grad * grad) * one_minus_beta2
    weight = weight - tl.div_rn(m * step_size, tl.sqrt_rn(v) * inv_sqrt_c2 + eps)
    tl.store(m_ptr + index, m, mask=inside)
    tl.store(v_ptr + index, v, mask=inside)
    tl.store(p_ptr + index, weight, mask=inside)
    if LOW == "bf16":
        # To nearest even, on the bits, because Triton's interpreter does not round its own conversion so.
        bits = weight.to(tl.uint32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        rounded = tl.where(weight == weight, rounded, 0x7FC0)  # noqa: PLR0124
        tl.store(low_ptr + index, rounded.to(tl.int16), mask=inside)
    elif LOW == "other":
        tl.store(low_ptr + index, weight.to(low_ptr.dtype.element_ty), mask=inside)


def adam_step_triton(
    p: Tensor, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low: Tensor | None, *, scalars: tuple[float, ...]
) -> None:
    """As `adam_step_torch`, for fp32 masters. scalars: an `AdamScalars`."""
    numel = p.numel()
    if numel == 0:
        return
    bf16 = low is not None and low.dtype is torch.bfloat16
    target = p if low is None else (low.view(torch.int16) if bf16 else low)
    _adam[(triton.cdiv(numel, _BLOCK),)](
        p,
        g,
        exp_avg,
        exp_avg_sq,
        target,
        numel,
        *scalars,
        DECAYS=scalars[2] != 0.0,
        LOW="none" if low is None else ("bf16" if bf16 else "other"),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
