"""The reference that distributed training is held against: plain PyTorch, one process, no code of this library.

    reference = train_plain(TinyGPT, token_batches(steps=5, rows=8), optimizer="adamw", lr=1e-3, world_size=2)
    assert_same_training(reference, losses, parameters, tolerance("fp32", steps=5))

A batch is a tuple of tensors with the same number of rows; `batches[step][micro_step]` is the global micro-batch, of
which rank r of n takes the r-th n-th (`rank_part`). In a low precision the reference runs the same types as the
library: the model in bf16 or fp16, gradients of each part in that type, their mean and the optimizer in fp32 on master
values, and one rounding from the masters to what the next forward reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trilithon.testing.plain_optimizers import PlainLamb, PlainLion
from trilithon.testing.tolerance import PrecisionName, Tolerance, tolerance

__all__ = [
    "Batch",
    "PlainRun",
    "Tolerance",
    "assert_same_training",
    "rank_part",
    "token_batches",
    "tolerance",
    "train_plain",
    "vector_batches",
]

Batch = tuple[Tensor, ...]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lion": PlainLion,
    "lamb": PlainLamb,
}


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What the reference did. Norms are those before clipping; parameters are fp32, frozen ones too, tied ones once."""

    losses: list[float]  # [steps] mean over ranks and micro-steps
    grad_norms: list[float]  # [steps]
    start: dict[str, Tensor]
    parameters: dict[str, Tensor]


def token_batches(
    steps: int, rows: int, accumulation: int = 1, *, length: int = 17, vocab: int = 61, seed: int = 1
) -> list[list[Batch]]:
    """[steps][accumulation] batches of one int64 tensor [rows, length]; `rows` is for all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randint(0, vocab, (rows, length), generator=generator),) for _ in range(accumulation)]
        for _ in range(steps)
    ]


def vector_batches(
    steps: int, rows: int, accumulation: int = 1, *, width: int = 16, out: int = 4, seed: int = 1
) -> list[list[Batch]]:
    """[steps][accumulation] batches of (x [rows, width], target [rows, out]) for `MLP` and `SharedLayerNet`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    return [[(draw(width), draw(out)) for _ in range(accumulation)] for _ in range(steps)]


def rank_part(batch: Batch, rank: int, world_size: int) -> Batch:
    """The rows of one rank. Raises ValueError where they do not split evenly: means of parts would not be the mean."""
    rows = batch[0].shape[0]
    if rows % world_size:
        raise ValueError(f"{rows} rows do not split over {world_size} ranks; use a multiple of {world_size}.")
    share = rows // world_size
    return tuple(tensor[rank * share : (rank + 1) * share] for tensor in batch)


def train_plain(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    *,
    optimizer: str | MakeOptimizer = "adamw",
    lr: float | Callable[[int], float] | None = 1e-3,
    precision: PrecisionName = "fp32",
    world_size: int = 1,
    clip_norm: float = 0.0,
    loss_scale: float = 1.0,
    missing: Literal["zero", "skip"] = "zero",
    **options: object,
) -> PlainRun:
    """Train on `batches[step][micro_step]` and return what happened.

    optimizer: a name, built with `options`, or a function of the named fp32 parameters that train. lr: a number, a
    function of the step counted from 1, or None to leave the optimizer's own. missing: whether a parameter that got no
    gradient has a zero gradient or is left out of the step. loss_scale: constant; the gradients are divided by it.
    """
    model = make_model()
    start = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    masters = {name: nn.Parameter(start[name].clone()) for name, p in model.named_parameters() if p.requires_grad}
    for p in model.parameters():
        p.data = p.data.to(_DTYPES[precision])
    if callable(optimizer):
        update = optimizer(list(masters.items()))
    else:
        update = _OPTIMIZERS[optimizer](list(masters.values()), **options)
    losses, norms = [], []
    for step, micro_batches in enumerate(batches, start=1):
        parts = [rank_part(batch, rank, world_size) for batch in micro_batches for rank in range(world_size)]
        loss, gradients = _mean_gradients(model, parts, _DTYPES[precision], loss_scale)
        losses.append(loss)
        norms.append(_install(masters, gradients, clip_norm, missing))
        for group in update.param_groups:
            if lr is not None:
                group["lr"] = lr(step) if callable(lr) else lr
        update.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in masters:
                    p.copy_(masters[name])  # one rounding, from the master
    end = {name: masters.get(name, p).detach().float().clone() for name, p in model.named_parameters()}
    return PlainRun(losses, norms, start, end)


def assert_same_training(
    reference: PlainRun,
    losses: Sequence[float],
    parameters: Mapping[str, Tensor],
    limits: Tolerance,
    grad_norms: Sequence[float] | None = None,
) -> None:
    """Raise AssertionError with every difference beyond the limits: losses, norms, names, and parameters.

    parameters: fp32 by name, as `PlainRun.parameters`. What the reference did not change has to be equal bit for bit.
    """
    found = _series("loss", reference.losses, losses, limits.loss)
    if grad_norms is not None:
        found += _series("gradient norm", reference.grad_norms, grad_norms, limits.grad_norm)
    if set(parameters) != set(reference.parameters):
        missing, extra = set(reference.parameters) - set(parameters), set(parameters) - set(reference.parameters)
        raise AssertionError(f"parameter names differ: missing {sorted(missing)}, unexpected {sorted(extra)}")
    apart_total = way_total = rounding_total = 0.0
    for name, expected in reference.parameters.items():
        if parameters[name].shape != expected.shape:
            found.append(f"{name} has shape {tuple(parameters[name].shape)} instead of {tuple(expected.shape)}")
            continue
        apart = (parameters[name].double() - expected.double()).norm().item()
        way = (expected.double() - reference.start[name].double()).norm().item()
        rounding = limits.rounding * expected.double().norm().item() if way > 0 else 0.0
        apart_total, way_total = math.hypot(apart_total, apart), math.hypot(way_total, way)
        rounding_total = math.hypot(rounding_total, rounding)
        if not apart <= limits.parameter_distance * way + rounding:
            found.append(f"{name} ends {apart:.3e} from the reference, which moved {way:.3e}")
    if not apart_total <= limits.distance * way_total + rounding_total:
        found.append(f"all parameters end {apart_total:.3e} from the reference, which moved {way_total:.3e}")
    assert not found, f"training differs from the reference beyond {limits}:\n  " + "\n  ".join(found)


def _mean_gradients(
    model: nn.Module, parts: Sequence[Batch], dtype: torch.dtype, loss_scale: float
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss, and the mean over parts of the gradients as fp32, by name; without those that got none."""
    total = 0.0
    gradients: dict[str, Tensor] = {}
    for part in parts:
        model.zero_grad(set_to_none=True)
        loss = model(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in part))
        (loss * loss_scale).backward()
        total += loss.item()
        for name, p in model.named_parameters():
            if p.grad is not None:
                gradients[name] = gradients.get(name, torch.zeros(p.shape)) + p.grad.float()
    return total / len(parts), {name: grad / (len(parts) * loss_scale) for name, grad in gradients.items()}


def _install(
    masters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], clip_norm: float, missing: str
) -> float:
    """Give the masters their clipped gradients; returns the norm before clipping."""
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in gradients.values()))
    factor = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
    for name, master in masters.items():
        grad = gradients.get(name)
        if grad is None and missing == "zero":
            grad = torch.zeros_like(master)
        master.grad = None if grad is None else grad * factor
    return norm


def _series(what: str, expected: Sequence[float], got: Sequence[float], limit: float) -> list[str]:
    if len(expected) != len(got):
        return [f"{len(got)} values of {what} instead of {len(expected)}"]
    pairs = enumerate(zip(expected, got, strict=True), start=1)
    return [f"{what} of step {i}: {b!r} instead of {a!r}" for i, (a, b) in pairs if not abs(a - b) <= limit * abs(a)]
