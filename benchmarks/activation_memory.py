"""How many bytes do activations take, kept as they are and recomputed in each manner?

    python benchmarks/activation_memory.py --ranks 1 2
    python benchmarks/activation_memory.py --ranks 2 --layers 8 --width 256 --tokens 256

Counted are tensors, not pages: every storage that operators make between the beginning of a forward and its end, and
is still there (`alive`), and the most of them at any time of forward and backward (`peak`), on rank 0; contiguous
buffers, which are made in the first step, are added. What is kept in host memory is told apart. With several ranks
matrices are cut over all of them. A row is one (ranks, manner); counts do not depend on how busy the machine is. Rows
are appended as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import trilithon
from trilithon.models import GPT, GPTConfig
from trilithon.testing import run_ranks
from trilithon.testing.live_bytes import LiveBytes

MANNERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "selective": {"policy": "selective"},
    "full": {},
    "full, partition": {"partition": True},
    "full, partition, contiguous": {"partition": True, "contiguous": True},
    "full, host": {"tier": "host"},
    "full, partition, host": {"partition": True, "tier": "host"},
}


def on_this_rank(manner: str, ranks: int, shape: Mapping[str, int], batch: int) -> dict[str, Any]:
    """Bytes of one step after the first."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=512, dropout=0.1, **shape))
    config = {
        "mesh": {"tensor": ranks},
        "recompute": MANNERS[manner],
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "batch": {"micro_size": batch},
    }
    tokens = torch.arange(batch * (shape["context"] + 1)).view(batch, -1) % 512
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with trilithon.initialize(model, config) as engine:
        engine.train_step([(inputs, targets)])
        engine.hooks.clear()
        gathered = _gathered(engine)
        with LiveBytes() as live:
            loss = engine(inputs, targets)
            alive = live.bytes
            tiers = {tier: kept.get("checkpoints", 0) for tier, kept in engine.memory_by_tier().items()}
            engine.backward(loss)
            peak = live.peak_bytes
        engine.step()
        before = tiers.get("device", 0) if (MANNERS[manner] or {}).get("contiguous") else 0
        return {
            "alive_bytes": alive + before,
            "peak_bytes": peak + before,
            "checkpoints_device_bytes": tiers.get("device", 0),
            "checkpoints_host_bytes": tiers.get("host", 0),
            "gathered_bytes": _gathered(engine) - gathered,
            "loss": engine.loss,
        }


def _gathered(engine: trilithon.Engine) -> int:
    return engine.ledger.sent_bytes("all_gather", "tensor")


def measure(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    shape = {
        "context": options.tokens, "num_layers": options.layers, "width": options.width, "num_heads": options.heads,
    }  # fmt: skip
    rows = []
    for manner, settings in MANNERS.items():
        if ranks == 1 and settings is not None and settings.get("partition"):
            continue
        found = run_ranks(on_this_rank, ranks, manner, ranks, shape, options.batch, timeout_s=500)[0]
        rows.append({"ranks": ranks, "manner": manner, "batch": options.batch, **shape, **found})
        _print(rows[-1])
    losses = {row["loss"] for row in rows}
    if len(losses) > 1:
        raise SystemExit(f"the losses differ between manners: {losses}")
    return rows


def _print(row: Mapping[str, Any]) -> None:
    sizes = ("alive_bytes", "peak_bytes", "checkpoints_device_bytes", "checkpoints_host_bytes", "gathered_bytes")
    cells = " | ".join(f"{row[name] / 2**20:.2f}" for name in sizes)
    print(f"| {row['ranks']} | {row['manner']} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "activation_memory.jsonl")
    options = parser.parse_args()
    print("| ranks | manner | alive | peak | kept on device | on host | gathered | (MiB)")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = [row for ranks in options.ranks for row in measure(ranks, options)]
    stamp = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/activation_memory.py", *sys.argv[1:]]),
    }
    with options.out.open("a", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps({**stamp, **row}) + "\n")


if __name__ == "__main__":
    main()
