"""Train a small language model on this file's own folder from Python, then load it again and let it write.

Run it alone, or on several ranks: torchrun --nproc-per-node 2 examples/train_from_python.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from trilithon.pretrain import load_model, load_pretrain, run


def main(folder: Path, steps: int = 60) -> float:
    """Train, show what the run left behind, and return the validation loss in nats per token."""
    config = load_pretrain(
        overrides={
            "data.paths": [str(Path(__file__).parent)],
            "data.suffixes": [".py"],
            "data.held_out": 0.2,
            "data.cache": str(folder / "tokens"),
            "model.preset": "nano",
            "run.steps": steps,
            "run.eval_every": 20,
            "run.out": str(folder / "run"),
            "run.prompt": "def ",
            "zero.stage": 2,
        }
    )
    report = run(config)
    if os.environ.get("RANK", "0") == "0":
        model, tokenizer = load_model(report.out)
        start = torch.from_numpy(tokenizer.encode("import ")[None])
        written = model.generate(start, 40, temperature=0.7, generator=torch.Generator().manual_seed(0))
        print("loaded again, it writes:", repr(tokenizer.decode(written[0].tolist())))
    if dist.is_initialized():
        dist.destroy_process_group()
    return report.validation_loss


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            # under torchrun the ranks agree on rank 0's folder
            main(Path(scratch))
