"""Does the library do on GPUs what it does on CPUs, and at what share of the hardware's speed? Under six minutes.

    python benchmarks/gpu_check.py --out check.json                            one GPU
    torchrun --nproc-per-node 8 benchmarks/gpu_check.py --out check.json       several: stages 2 and 3 in earnest

Parts, each of which may be left out (--parts):

    kernels      the update rules and sums on the GPU give the bits that they give on the CPU
    equality     stages 0 to 3, bf16 and fp16: losses and parameters after some steps equal those of a CPU process
    shared-gpu   the same for stages 2 and 3 with two ranks on one GPU over gloo (where there is only one GPU, a group
                 of one has nothing to cut, and NCCL refuses two ranks on a device)
    throughput   tokens/s and share of the peak of a GPT of 1.3 billion parameters: bf16, recomputation, the largest
                 batch that fits; memory that is held against the formula; how often a step stops to wait for the GPU
    overlap      step time with overlap against without (several GPUs)

Without a GPU everything runs at toy size on the CPU, to show that the script works, and what needs a GPU says
"not measured: no GPU". The result is JSON, written to --out, else to $OUT/gpu_check.json, else only printed.
The exit status is 1 if a comparison failed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from side_by_side.about import about
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trilithon import Engine, initialize
from trilithon import kernels as loops
from trilithon.comm.mesh import init_distributed
from trilithon.models import GPT, preset

NO_GPU = "not measured: no GPU"
PARTS = ("kernels", "equality", "shared-gpu", "throughput", "overlap")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cpu")
if GPU:
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
# Dense bf16 peaks from the makers' data sheets, operations per second.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
STEPS = 5
# Losses in nats; the update's distance relative to the update itself. Rounding is relative: 2^-8 per bf16 and 2^-11 per
# fp16 operation, in places where libraries differ (order of sums, fused attention), and momentum adds five steps up.
TOLERANCE = {"bf16": (0.03, 0.08), "fp16": (0.005, 0.02)}
VOCABULARY = 257

Result = dict[str, Any]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# ------------------------------------------------------------------------------------------------------------- kernels
def check_kernels() -> Result:
    """Each update rule and sum on random values, on the CPU and on the device: equal bits, sums of squares to 1e-12."""
    chance = torch.Generator().manual_seed(3)
    p, g, m = (torch.randn(1 << 18, generator=chance) for _ in range(3))
    v, found = torch.rand(1 << 18, generator=chance), {}

    def both(run: Callable[[Sequence[Tensor]], object], *operands: Tensor) -> bool:
        on_cpu, on_device = [x.clone() for x in operands], [x.to(DEVICE, copy=True) for x in operands]
        run(on_cpu)
        run(on_device)
        return all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_device, strict=True))

    for name, low in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        g16, out = g.to(low), torch.zeros_like(g, dtype=low)
        found[f"adam {name}"] = both(
            lambda t: loops.adam_step(*t, lr=1e-3, weight_decay=0.01, step=3, grad_scale=0.5), p, g16, m, v, out
        )
        found[f"sgd {name}"] = both(lambda t: loops.sgd_step(*t, lr=0.1, momentum=0.9), p, g16, m, out)
        found[f"lion {name}"] = both(lambda t: loops.lion_step(*t, lr=1e-3, weight_decay=0.01), p, g16, m, out)
        found[f"ordered_sum {name}"] = both(
            lambda t: loops.ordered_sum(t[0].view(4, -1), t[1], 0.25, True), g16, p[: 1 << 16].clone()
        )
    here, there = loops.sum_of_squares(g), loops.sum_of_squares(g.to(DEVICE))
    found["sum_of_squares"] = abs(here - there) <= 1e-12 * here
    found["count_non_finite"] = loops.count_non_finite((g / 0.0).to(DEVICE)) == g.numel()
    return {"ok": all(found.values()), "equal": found}


# ------------------------------------------------------------------------------------------------------------ equality
def tokens(of_rank: int, step: int) -> Tensor:
    """[2, 65] of one rank in one step, the same on every device."""
    chance = torch.Generator().manual_seed(1000 * of_rank + step)
    start, stride = (torch.randint(1, 60, (2, 1), generator=chance) for _ in range(2))
    return (start + stride * torch.arange(65)) % 61


def train(stage: int, precision: str, ranks: int, backend: str | None = None) -> tuple[list[float], Tensor, Tensor]:
    """Losses, and all parameters before and after, flat on the CPU. A lone process sees the data of all `ranks`."""
    torch.manual_seed(7)
    model = GPT(preset("nano", VOCABULARY))
    accumulation = ranks if world_size() == 1 else 1
    engine = initialize(
        model,
        {
            "precision": {"kind": precision, **({"initial_scale_power": 8} if precision == "fp16" else {})},
            "zero": {"stage": stage, "accumulate_dtype": "fp32"},
            "batch": {"micro_size": 2, "accumulation": accumulation},
            "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
            "clip_norm": 1.0,
            "comm": {"backend": backend},
        },
    )
    before = torch.cat([value.flatten().cpu() for _, value in engine.full_parameters()])
    losses = []
    for step in range(STEPS):
        mine = range(ranks) if world_size() == 1 else [rank()]
        losses.append(_step(engine, [tokens(of_rank, step).to(DEVICE) for of_rank in mine]))
    after = torch.cat([value.flatten().cpu() for _, value in engine.full_parameters()])
    engine.close()
    return losses, before, after


def _step(engine: Engine, batches: Sequence[Tensor]) -> float:
    return engine.train_step(batches, lambda run, batch: run(batch[:, :-1], batch[:, 1:]))


def reference(ranks: int, limit_s: float) -> dict[str, Any]:
    """What a process without a GPU gets, stage 0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.pt"
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--reference", str(file), "--ranks", str(ranks)]
        subprocess.run(command, env=environment, timeout=limit_s, check=True)
        found: dict[str, Any] = torch.load(file)
        return found


def check_equality(limit_s: float, stages: Sequence[int] = (0, 1, 2, 3), backend: str | None = None) -> Result:
    """Every stage and precision against the reference. Collective; only rank 0 compares."""
    expected = reference(world_size(), limit_s) if rank() == 0 else {}
    found: Result = {"ranks": world_size(), "device": DEVICE.type, "runs": {}, "ok": True}
    for precision, (loss_tolerance, update_tolerance) in TOLERANCE.items():
        for stage in stages:
            losses, before, after = train(stage, precision, world_size(), backend)
            if rank() != 0:
                continue
            want = expected[precision]
            update = (want["after"] - want["before"]).norm()
            apart = {
                "loss_apart": max(abs(a - b) for a, b in zip(losses, want["losses"], strict=True)),
                "update_apart": float((after - want["after"]).norm() / update),
                "start_equal": torch.equal(before, want["before"]),
            }
            ok = apart["loss_apart"] <= loss_tolerance and apart["update_apart"] <= update_tolerance
            found["runs"][f"stage {stage} {precision}"] = {**apart, "ok": ok and apart["start_equal"]}
            found["ok"] &= ok and apart["start_equal"]
    return found


def write_reference(file: Path, ranks: int) -> None:
    """The process that `reference` starts."""
    torch.set_num_threads(1)
    found = {}
    for precision in TOLERANCE:
        losses, before, after = train(0, precision, ranks)
        found[precision] = {"losses": losses, "before": before, "after": after}
    torch.save(found, file)


def check_shared_gpu(limit_s: float) -> Result:
    """Two processes of this script on the same device, over gloo."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        out = Path(folder) / "shared.json"
        backend = "cpu:gloo,cuda:gloo" if GPU else "gloo"
        command = [sys.executable, __file__, "--parts", "equality", "--backend", backend, "--stages", "2", "3"]
        started = []
        for number in range(2):
            environment = {**os.environ, "RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            started.append(
                subprocess.Popen(
                    [*command, "--out", str(out)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        try:
            said = [process.communicate(timeout=limit_s)[0].decode() for process in started]
        except subprocess.TimeoutExpired:
            return {"ok": False, "why": f"no end within {limit_s:.0f} s"}
        finally:
            for process in started:
                process.kill()
                process.wait()
        if not out.exists():
            return {"ok": False, "why": said[0][-1500:]}
        found: Result = json.loads(out.read_text())["equality"]
        return found


# ---------------------------------------------------------------------------------------------------------- throughput
class Recomputed(nn.Module):
    """A block whose activations are computed again in backward instead of kept."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def big_engine(stage: int, *, overlap: bool = True, name: str | None = None) -> tuple[Engine, GPT]:
    """A GPT with recomputation, built on the device; 1.3 billion parameters, or the toy without a GPU."""
    shape = preset(name or "xl", 50304) if GPU else preset("nano", VOCABULARY)
    torch.manual_seed(1)
    with DEVICE:
        model = GPT(shape)
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    config = {"precision": "bf16", "zero": {"stage": stage, "overlap": overlap}, "optimizer": "adamw", "clip_norm": 1.0}
    return initialize(model, config), model


def measure_throughput(sizes: Sequence[int]) -> Result:
    """The largest batch of `sizes` that fits: seconds, tokens/s, share of peak, memory, waits for the device."""
    stage = 3 if world_size() > 1 else 1
    for size in sizes:
        engine, model = big_engine(stage)
        try:
            return _measure(engine, model, size, stage)
        except torch.OutOfMemoryError:
            if world_size() > 1:
                raise  # ranks may not agree on whether it fits: name one size with --batch
        engine.close()
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
    return {"ok": False, "why": f"none of the batches {list(sizes)} fits"}


def _measure(engine: Engine, model: GPT, size: int, stage: int) -> Result:
    context = model.config.context
    batch = torch.randint(model.config.vocab_size, (size, context + 1), device=DEVICE)
    for _ in range(2):
        _step(engine, [batch])
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(lambda: _step(engine, [batch])) for _ in range(8 if GPU else 2)]
    median = statistics.median(seconds)
    rate = size * context / median  # of one rank
    flops = rate * model.config.training_flops_per_token()
    peak = next((value for name, value in PEAKS.items() if GPU and name in torch.cuda.get_device_name()), None)
    return {
        "ok": True,
        "parameters": model.config.num_parameters(),
        "stage": engine.config.zero.stage,
        "batch_per_rank": size,
        "context": context,
        "step_s": median,
        "step_s_range": [min(seconds), max(seconds)],
        "n": len(seconds),
        "tokens_per_s_per_rank": rate if GPU else NO_GPU,
        "tflops_per_rank": flops / 1e12 if GPU else NO_GPU,
        "share_of_peak": (flops / peak if peak else "not measured: peak unknown") if GPU else NO_GPU,
        "peak_assumed_tflops": peak / 1e12 if peak else None,
        "memory": memory(engine, model, stage),
        "host_waits_per_step": host_waits(lambda: _step(engine, [batch])) if GPU else NO_GPU,
    }


def timed(action: Callable[[], object]) -> float:
    """Seconds until the device has finished."""
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def memory(engine: Engine, model: GPT, stage: int) -> Result:
    """Bytes that engine.memory() reports, what the formula of ZeRO says, and what the allocator holds."""
    numel, ranks = model.config.num_parameters(), world_size()
    cut = [1, 1, 1, 1] if ranks == 1 else [ranks if stage >= at else 1 for at in (3, 2, 1, 1)]
    formula = dict(zip(("parameters", "gradients", "master", "optimizer"), (2, 2, 4, 8), strict=True))
    formula = {name: each * numel // ways for (name, each), ways in zip(formula.items(), cut, strict=True)}
    reported = engine.memory()
    found: Result = {"reported": reported, "formula": formula, "formula_total": sum(formula.values())}
    if GPU:
        gc.collect()
        held = torch.cuda.memory_allocated()
        found |= {"allocated_between_steps": held, "unexplained": held - sum(reported.values())}
        found["peak_in_step"] = torch.cuda.max_memory_allocated()
        found["within_5_percent"] = abs(held - found["formula_total"]) <= 0.05 * found["formula_total"]
    else:
        found["allocated_between_steps"] = NO_GPU
    return found


def host_waits(action: Callable[[], object]) -> int:
    """How often the host stopped until the GPU had caught up, as far as torch notices."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def measure_overlap() -> Result:
    """Overlap must not cost; with several GPUs it should gain."""
    if not GPU:
        return {"ok": True, "why": NO_GPU}
    if world_size() == 1:
        return {"ok": True, "why": "not measured: one GPU"}
    found: Result = {"ok": True}
    for stage in (2, 3):
        medians = []
        for overlap in (True, False):
            engine, model = big_engine(stage, overlap=overlap, name="large")
            batch = torch.randint(model.config.vocab_size, (4, model.config.context + 1), device=DEVICE)
            once = functools.partial(_step, engine, [batch])
            medians.append(statistics.median([timed(once) for _ in range(8)][3:]))
            engine.close()
            del engine, model, once
            gc.collect()
            torch.cuda.empty_cache()
        found[f"stage {stage}"] = {"overlap_s": medians[0], "without_s": medians[1]}
        found["ok"] &= medians[0] <= 1.05 * medians[1]
    return found


# ---------------------------------------------------------------------------------------------------------- the script
def run_part(name: str, options: argparse.Namespace, left_s: float) -> Result:
    if left_s < 10:
        return {"ok": True, "why": "not measured: no time left"}
    match name:
        case "kernels":
            return check_kernels()
        case "equality":
            return check_equality(left_s, options.stages, options.backend)
        case "shared-gpu":
            if torch.cuda.device_count() > 1 or world_size() > 1:
                return {"ok": True, "why": "not needed: several GPUs or ranks"}
            return check_shared_gpu(min(left_s, 120.0))
        case "throughput":
            return measure_throughput(options.batch or ((32, 16, 8, 4, 2, 1) if GPU and world_size() == 1 else (8,)))
    return measure_overlap()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=330.0, help="no part starts after this")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences per rank to try, largest first")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="for equality")
    parser.add_argument("--backend", help="of torch.distributed, for equality")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        write_reference(options.reference, options.ranks)
        return 0
    started = time.monotonic()
    if not GPU:
        torch.set_num_threads(1)
    init_distributed(options.backend)
    name = torch.cuda.get_device_name() if GPU else "none"
    found: Result = {"about": about("gpu_check.py"), "gpu": name, "ranks": world_size()}
    if not GPU and rank() == 0:
        print(f"{NO_GPU}; everything runs at toy size on the CPU")
    for part in options.parts:
        began = time.monotonic()
        try:
            found[part] = run_part(part, options, options.limit_s - (began - started))
        except Exception as error:
            if world_size() > 1:
                raise  # the other ranks may be waiting: end, so that the launcher ends them
            found[part] = {"ok": False, "why": f"{type(error).__name__}: {error}"[:1500]}
        found[part]["seconds"] = round(time.monotonic() - began, 1)
        if rank() == 0:
            print(f"{part}: {json.dumps(found[part])}", flush=True)
    out = options.out or (Path(os.environ["OUT"]) / "gpu_check.json" if os.environ.get("OUT") else None)
    if out is not None and rank() == 0:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(not all(found[part]["ok"] for part in options.parts)) if rank() == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
