"""What does a layer of experts cost beside a dense block of the same arithmetic per token, forward and backward?

    python benchmarks/moe_layer.py --tokens 4096 --hidden 512 --experts 8 --threads 1
    python benchmarks/moe_layer.py --tokens 64 --hidden 16 --repeats 1 --out /tmp/rows.jsonl     # does it run?

Contestants take turns in one process: the dense block; ours with capacity and dropless; the same layer written with
S x E x C masks and einsums; gated blocks, dense and ours, and the block of transformers' Mixtral where it is installed.
All route top-1 from the same seed. Times are processor seconds of all threads, with memory that was freed kept in the
process, as an engine sets it; `over_dense` compares medians, `over_dense_min` the fastest turns. Beside them: the bytes
that autograd keeps for backward, at the given number of tokens and at twice as many, which shows what grows with their
square.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trilithon
from trilithon.engine.allocator import keep_freed_memory
from trilithon.parallel.moe import FeedForward

RESULTS = Path(__file__).parent / "results" / "moe_layer.jsonl"
Layer = Callable[[Tensor], Tensor]


class Einsum(nn.Module):
    """The layer as Lepikhin et al. 2020 (arXiv:2006.16668, algorithm 1) write it, with masks."""

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, hidden) / hidden**0.5)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        experts, capacity = len(self.gate), math.ceil(len(x) / len(self.gate))
        probs = (x @ self.gate.t()).softmax(-1)
        chosen = F.one_hot(probs.argmax(-1), experts)
        place = chosen.cumsum(0) * chosen - 1
        slots = F.one_hot(place.clamp(0, capacity - 1), capacity) * ((place >= 0) & (place < capacity)).unsqueeze(-1)
        mask = slots.to(x.dtype)
        inputs = torch.einsum("sec,sm->ecm", mask, x)
        outputs = torch.bmm(F.gelu(torch.bmm(inputs, self.up)), self.down)
        return torch.einsum("sec,ecm->sm", mask * probs.unsqueeze(-1), outputs)


def ours(hidden: int, inner: int, experts: int, *, drop: bool, gated: bool = False) -> nn.Module:
    expert = FeedForward(hidden, inner, activation="silu" if gated else "gelu", gated=gated, bias=not gated)
    return trilithon.MoE(hidden, expert, experts, drop_tokens=drop, min_capacity=1)


def mixtral(hidden: int, inner: int, experts: int) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    block = MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=1)
    )
    for param in block.parameters():
        nn.init.normal_(param, std=0.05)
    return block


def contestants(hidden: int, inner: int, experts: int) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {
        "dense": FeedForward(hidden, inner),
        "ours, capacity 1": ours(hidden, inner, experts, drop=True),
        "ours, dropless": ours(hidden, inner, experts, drop=False),
        "einsum with masks": Einsum(hidden, inner, experts),
        "dense, gated": FeedForward(hidden, inner, activation="silu", gated=True, bias=False),
        "ours, gated, dropless": ours(hidden, inner, experts, drop=False, gated=True),
    }
    if find_spec("transformers") is not None:
        found["transformers' Mixtral"] = mixtral(hidden, inner, experts)
    return found


def forward(layer: nn.Module, x: Tensor) -> Tensor:
    if "Mixtral" in type(layer).__name__:
        x = x.unsqueeze(0)
    out = layer(x)
    y: Tensor = out[0] if isinstance(out, tuple) else out
    return y


def once(layer: nn.Module, x: Tensor) -> float:
    """Processor seconds of forward and backward."""
    layer.zero_grad(set_to_none=True)
    started = time.process_time()
    forward(layer, x.requires_grad_(True)).sum().backward()
    return time.process_time() - started


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """What autograd saves for backward, parameters and the input not counted."""
    seen: dict[int, int] = {}
    known = {param.untyped_storage().data_ptr() for param in layer.parameters()} | {x.untyped_storage().data_ptr()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward(layer, x.requires_grad_(True))
    del kept
    return sum(seen.values())


def hardware() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=None, help="width inside a block; default 4 x hidden")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    inner = arguments.inner or 4 * arguments.hidden
    layers = contestants(arguments.hidden, inner, arguments.experts)
    x, more = (torch.randn(n, arguments.hidden) for n in (arguments.tokens, 2 * arguments.tokens))
    kept = {name: (kept_bytes(layer, x), kept_bytes(layer, more)) for name, layer in layers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(arguments.repeats + 1):
        for name, layer in layers.items():
            took = once(layer, x)
            if turn:
                seconds[name].append(took)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in layers:
        beside = "dense, gated" if "gated" in name or "Mixtral" in name else "dense"
        row = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "question": "forward and backward of a layer of experts beside a dense block of equal arithmetic",
            "layer": name,
            "tokens": arguments.tokens,
            "hidden": arguments.hidden,
            "inner": inner,
            "experts": arguments.experts,
            "threads": arguments.threads,
            "repeats": arguments.repeats,
            "unit": "processor milliseconds",
            "median": round(1e3 * medians[name], 2),
            "min": round(1e3 * min(seconds[name]), 2),
            "max": round(1e3 * max(seconds[name]), 2),
            "over_dense": round(medians[name] / medians[beside], 3),
            "over_dense_min": round(min(seconds[name]) / min(seconds[beside]), 3),
            "kept_mib": round(kept[name][0] / 2**20, 3),
            "kept_growth_when_tokens_double": round(kept[name][1] / max(kept[name][0], 1), 3),
            "load_before": round(os.getloadavg()[0], 2),
            "hardware": hardware(),
            "torch": torch.__version__,
            "command": shlex.join(["python", "benchmarks/moe_layer.py", *sys.argv[1:]]),
        }
        print(json.dumps(row))
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
