"""Train a model whose states do not fit into the memory it is given: everything rests on disk between its uses.

python examples/bigger_than_memory.py
torchrun --nproc-per-node 2 examples/bigger_than_memory.py --width 512 --layers 24 --limit-mib 64

The 16 bytes per parameter of mixed-precision Adam (bf16 values and gradients, fp32 masters, two moments) are kept under
`--folder`, which should lie on a local disk; the inputs of the blocks wait for backward in host memory. It is an error
if resident memory grows by more than the limit. (Peaks are read from /proc, so on Linux.)
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import trilithon
from trilithon.models import GPT, GPTConfig

VOCABULARY = 257
MIB = 2**20


def config(folder: str) -> dict[str, object]:
    return {
        "batch": {"micro_size": 1},
        "precision": "bf16",
        "zero": {"stage": 3, "unit_classes": ["Block"], "tile_above_numel": 2**17},
        "offload": {"state": "disk", "parameters": "disk", "path": folder, "sub_group_numel": 2**17, "buffers": 3},
        "recompute": {"classes": ["Block"], "tier": "host"},
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "clip_norm": 1.0,
    }


def resident_bytes(line: str) -> int:
    """VmRSS now, or VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(found.split()[1]) * 1024 for found in lines if found.startswith(line))


def train(shape: GPTConfig, folder: str, steps: int) -> tuple[trilithon.Engine, GPT]:
    with trilithon.zero.init(path=folder, open_numel=2**18):  # slices go to disk while the model is built
        model = GPT(shape)
    engine = trilithon.initialize(model, config(folder))
    generator = torch.Generator().manual_seed(engine.rank)
    for _ in range(steps):
        tokens = torch.randint(0, 32, (1, shape.context + 1), generator=generator)
        engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
    return engine, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-mib", type=int, default=32, help="memory that each rank may grow by")
    parser.add_argument("--folder", help="on the disk to use; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        shape = GPTConfig(
            vocab_size=VOCABULARY, width=options.width, num_layers=options.layers, num_heads=4, context=32
        )
        small = shape.model_copy(update={"num_layers": 1})
        train(small, folder, 1)[0].close()  # what any engine takes: compiled kernels, threads, connections
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident_bytes("VmRSS")
        engine, model = train(shape, folder, options.steps)
        grown = resident_bytes("VmHWM") - before
        numel = sum(param.numel() for param in model.parameters())
        if engine.rank == 0:
            states = 16 * numel / engine.world_size
            print(f"{engine.steps} steps of {numel:,} parameters, loss {engine.loss:.3f}")
            print(f"model states {states / MIB:.0f} MiB a rank, resident memory grew by {grown / MIB:.0f} MiB")
            for tier, sizes in engine.memory_by_tier().items():
                print(f"  {tier}: " + ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in sizes.items() if size))
        engine.close(give_back=False)  # no rank has room for the whole model
    if grown > options.limit_mib * MIB:
        raise SystemExit(f"grew by {grown / MIB:.0f} MiB, and {options.limit_mib} were allowed")


if __name__ == "__main__":
    main()
