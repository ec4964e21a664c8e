"""DeepSpeed's CPU Adam, one step for every line that arrives, in an interpreter that has DeepSpeed.

    python deepspeed_step.py '{"numel": 1000000, "sixteen": false, "threads": 1}'

Answers with one JSON object a line: {"ready": version} once its extension is built and loaded, or {"error": reason};
then {"seconds": processor time of this process} for every step. It ends at the end of its input.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any


def make_step(numel: int, sixteen: bool, threads: int) -> tuple[str, Callable[[], None]]:
    """fp32 throughout, or a bf16 gradient with a factor in and bf16 weights out, by the passes it needs besides."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(threads)
    adam: Any = importlib.import_module("deepspeed.ops.adam")
    weights = torch.nn.Parameter(torch.zeros(numel))
    weights.grad = torch.full((numel,), 1e-3)
    gradient = weights.grad.bfloat16() if sixteen else None
    low = torch.empty(numel, dtype=torch.bfloat16) if sixteen else None
    optimizer = adam.DeepSpeedCPUAdam([weights], lr=1e-3, weight_decay=0.01, adamw_mode=True)

    def step() -> None:
        if gradient is not None:
            weights.grad.copy_(gradient).mul_(0.7)
        optimizer.step()
        if low is not None:
            low.copy_(weights.detach())

    step()  # which makes the state
    return importlib.import_module("deepspeed").__version__, step


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # it prints while it builds
    try:
        version, step = make_step(**json.loads(sys.argv[1]))
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=answers, flush=True)
        return
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        step()
        print(json.dumps({"seconds": time.process_time() - began}), file=answers, flush=True)


if __name__ == "__main__":
    main()
