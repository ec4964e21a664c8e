"""Which systems there are, by name, without importing any of them.

A name is a base and, after "+" signs, variants: `trilithon-2-bf16+accum4+clip`. Systems are comparable in their losses
when dtype, accumulation and clipping agree, which is their `family`.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

CLIP_NORM = 0.5  # below the norm of the first gradients, so that it acts
VARIANTS = {
    "accum4": "four micro-batches before each update",
    "clip": f"the gradient is clipped to a norm of {CLIP_NORM:g}",
    "tcp": "trilithon through TCP instead of shared memory",
    "init": "trilithon with the model built under zero.init",
}
_OURS_ONLY = {"tcp", "init"}


@dataclass(frozen=True)
class System:
    """One way to train. maker: name of the function in `systems`; imports: its packages, timed apart from set-up."""

    name: str
    maker: str
    dtype: str  # "fp32" or "bf16": what forward computes in
    imports: tuple[str, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    accumulation: int = 1
    clip_norm: float = 0.0

    @property
    def base(self) -> str:
        return self.name.partition("+")[0]

    @property
    def family(self) -> tuple[str, int, float]:
        return self.dtype, self.accumulation, self.clip_norm

    @property
    def ours(self) -> bool:
        return self.maker == "trilithon"


def _bases() -> list[System]:
    ddp, fsdp = ("torch.nn.parallel.distributed",), ("torch.distributed.fsdp",)
    zero_redundancy = (*ddp, "torch.distributed.optim")
    found = []
    for dtype, name in (("fp32", "fp32"), ("bf16", "amp")):  # DDP keeps fp32 parameters and computes under autocast
        found.append(System(f"ddp-{name}", "ddp", dtype, ddp))
        found.append(System(f"zro-{name}", "zero_redundancy", dtype, zero_redundancy))
    for dtype in ("fp32", "bf16"):
        for kind, reshard in (("keep", False), ("reshard", True)):
            found.append(System(f"fsdp2-{kind}-{dtype}", "fsdp2", dtype, fsdp, {"reshard": reshard}))
    for dtype in ("fp32", "bf16"):
        for stage in range(4):
            found.append(_ours(f"trilithon-{stage}-{dtype}", dtype, stage))
        found.append(_ours(f"trilithon-3keep-{dtype}", dtype, 3, reshard_after_forward=False))
    if importlib.util.find_spec("deepspeed") is not None:
        for dtype in ("fp32", "bf16"):
            for stage in range(4):
                options: dict[str, object] = {"stage": stage}
                found.append(System(f"deepspeed-{stage}-{dtype}", "deepspeed", dtype, ("deepspeed",), options))
    return found


def _ours(name: str, dtype: str, stage: int, **zero: object) -> System:
    options: dict[str, object] = {"zero": {"stage": stage, **zero}}
    return System(name, "trilithon", dtype, ("trilithon.engine.build",), options)


def with_variant(system: System, variant: str) -> System:
    """The same system under one of `VARIANTS`."""
    name = f"{system.name}+{variant}"
    match variant:
        case "accum4":
            return replace(system, name=name, accumulation=4)
        case "clip":
            return replace(system, name=name, clip_norm=CLIP_NORM)
        case "tcp":
            return replace(system, name=name, options={**system.options, "comm": {"shared_memory": False}})
        case "init":
            return replace(system, name=name, options={**system.options, "init": True})
    raise AssertionError(variant)


def catalogue() -> dict[str, System]:
    """Every system and its variants, in order of the table."""
    found: dict[str, System] = {}
    for base in _bases():
        allowed = [variant for variant in VARIANTS if base.ours or variant not in _OURS_ONLY]
        for count in range(len(allowed) + 1):
            for chosen in combinations(allowed, count):
                system = base
                for variant in chosen:
                    system = with_variant(system, variant)
                found[system.name] = system
    return found


def select(patterns: Sequence[str], known: dict[str, System]) -> list[System]:
    """Systems that match any pattern; only patterns with a "+" reach variants. Raises ValueError if none does."""
    chosen: dict[str, System] = {}
    for pattern in patterns:
        hits = [
            s
            for s in known.values()
            if fnmatch.fnmatchcase(s.name, pattern) and s.name.count("+") == pattern.count("+")
        ]
        if not hits:
            raise ValueError(f"no system is called {pattern!r}; --list shows the names")
        chosen.update({system.name: system for system in hits})
    return list(chosen.values())


def reference_of(system: System, reference: str, known: dict[str, System]) -> System:
    """What `system` is compared with: `reference` under the same accumulation and clipping."""
    name = reference
    for variant in ("accum4", "clip"):
        if f"+{variant}" in f"{system.name}+" and f"+{variant}" not in name:
            name += f"+{variant}"
    return known[name]
