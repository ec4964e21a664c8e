"""How fast is one model on a mesh, beside plain torch on the same ranks and the same model?

    python benchmarks/parallel.py --ranks 2 4 --rounds 7
    python benchmarks/parallel.py --only tensor norms --width 512

Both systems of a pair train in the same processes, in turn within a round, so that a busy machine disturbs them alike;
the order alternates. A row is one (axis, system, ranks): median and quartiles of the slowest rank's time for a step,
and torch's time by ours three ways: the median over rounds of the ratio, the ratio of the fastest rounds, and the ratio
of CPU time (of all ranks and their threads, median), which other programs on the machine disturb least. Rows are
appended as JSON lines. The losses have to agree.

    tensor     matrices cut; torch: DTensor with column and row styles, loss_parallel, fused AdamW
    norms      tokens cut between them; torch: its SequenceParallel style
    sequence   head-scattering exchanges; torch: functional all_to_all_single around SDPA, DDP's mean by all_reduce
    pipe       1F1B over stages, a micro-batch of each row; torch: distributed.pipelining's Schedule1F1B, same cut
    pipe-clip  as pipe, both clip the norm over all stages at 1, as torchtitan does; torch's one all_reduce for it
               brings the loss as well, and it joins no outputs
    one        no axis, one rank: the modules of the mesh beside a model without them, both under the engine, in many
               rounds of one step, since less than 2 % is to be seen

A step on both sides: forwards, backwards, one AdamW update in fp32, the mean loss on every rank. Ours also computes the
norm of the gradient, looks for elements that are not finite, lets the ranks agree on them, and in a pipeline seeds
every layer; torch's pipeline also joins the outputs of its micro-batches. In pipe-clip only finiteness and the seeds
differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import trilithon
from trilithon.models import Llama, LlamaConfig
from trilithon.parallel.pipeline.layers import layers_of
from trilithon.parallel.pipeline.partition import cut_by_weight
from trilithon.testing import run_ranks

AXES = ("tensor", "norms", "sequence", "pipe", "pipe-clip", "one")
Step = Callable[[Tensor, Tensor], float]
_MORE_ROUNDS = 6  # on one rank, where the difference is small


class BareLoss(nn.Module):
    """torch's cross entropy, where the model has its TokenLoss."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Whole(nn.Module):
    """Instead of CutTokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class TorchExchange(nn.Module):
    """Ulysses in plain torch: one all-to-all for each of query, key, value and result."""

    def __init__(self, core: nn.Module, ranks: int) -> None:
        super().__init__()
        self.core, self.ranks = core, ranks

    def _swap(self, x: Tensor, split: int, join: int) -> Tensor:
        parts = torch.stack(x.chunk(self.ranks, split))
        sizes = [1] * self.ranks
        return torch.cat(all_to_all_single_autograd(parts, sizes, sizes, dist.group.WORLD).unbind(0), join)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (self._swap(x, 1, 2) for x in (query, key, value))
        return self._swap(self.core(query, key, value), 2, 1)


def bare(shape: LlamaConfig) -> Llama:
    """The model without the modules of the mesh."""
    torch.manual_seed(0)
    model = Llama(shape)
    model.cut, model.loss = Whole(), BareLoss()
    for block in model.blocks:
        block.attention.attend = block.attention.attend.core
    return model


def torch_plan(layers: int, cut_norms: bool) -> dict[str, ParallelStyle]:
    """The styles of a Llama, as torchtitan applies them."""
    between = Shard(1) if cut_norms else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(layers):
        name = f"blocks.{index}"
        for part in ("attention", "mlp"):
            plan[f"{name}.{part}"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
            if cut_norms:
                plan[f"{name}.{part}_norm"] = SequenceParallel()
        for column in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            plan[f"{name}.{column}"] = ColwiseParallel()
        for row in ("attention.out", "mlp.down"):
            plan[f"{name}.{row}"] = RowwiseParallel(output_layouts=between)
    if cut_norms:
        plan["norm"] = SequenceParallel()
    return plan


def torch_step(axis: str, shape: LlamaConfig) -> Step:
    """Plain torch on this rank."""
    model = bare(shape)
    ranks = dist.get_world_size()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if axis in ("tensor", "norms"):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
        model = parallelize_module(model, mesh, torch_plan(shape.num_layers, axis == "norms"))
        context = loss_parallel
    if axis in ("pipe", "pipe-clip"):
        return torch_pipeline_step(shape, clips=axis == "pipe-clip")
    if axis == "sequence":
        for block in model.blocks:
            block.attention.attend = TorchExchange(block.attention.attend, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=axis not in ("tensor", "norms"))

    def step(tokens: Tensor, targets: Tensor) -> float:
        if axis == "sequence":  # each rank reads its own tokens; positions follow from the exchange
            tokens, targets = (x.chunk(ranks, 1)[dist.get_rank()].contiguous() for x in (tokens, targets))
        with context():
            loss = model(tokens, targets)
            loss.backward()
        value = loss.detach()
        if axis == "sequence":
            flat = torch.cat([param.grad.flatten() for param in model.parameters()])
            dist.all_reduce(flat)
            flat.div_(ranks)
            for param, grad in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                param.grad = grad.view_as(param)
            value = value.clone()
            dist.all_reduce(value)
            value /= ranks
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.full_tensor() if hasattr(value, "full_tensor") else value)

    return step


class TorchStage(nn.Module):
    """Some of the layers of a model, in order."""

    def __init__(self, model: Llama, stages: int, stage: int) -> None:
        super().__init__()
        layers = layers_of(model)
        bounds = cut_by_weight([layer.parameters for layer in layers], stages)
        self.runs = [layer.run for layer in layers[bounds[stage] : bounds[stage + 1]]]
        names = [name for layer in layers[bounds[stage] : bounds[stage + 1]] for name in layer.modules]
        self.parts = nn.ModuleList(model.get_submodule(name) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        for run in self.runs:
            x = run(x)
        return x


def torch_pipeline_step(shape: LlamaConfig, *, clips: bool) -> Step:
    """torch.distributed.pipelining on this rank, which has one stage."""
    rank, stages, loss_of = dist.get_rank(), dist.get_world_size(), BareLoss()
    part = TorchStage(bare(shape), stages, rank)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedules: dict[int, Schedule1F1B] = {}

    def step(tokens: Tensor, targets: Tensor) -> float:
        micros = tokens.shape[0]
        if micros not in schedules:
            schedules[micros] = Schedule1F1B(stage, micros, loss_fn=loss_of)
        losses: list[Tensor] = []
        last = rank == stages - 1
        keywords = {"target": targets, "losses": losses} if last else {}
        schedules[micros].step(*([tokens] if rank == 0 else []), return_outputs=not clips, **keywords)
        value = torch.stack(losses).mean().detach() if last else torch.zeros(())
        if clips:
            grads = [param.grad for param in part.parameters() if param.grad is not None]
            told = torch.stack([torch.nn.utils.get_total_norm(grads).square(), value])
            dist.all_reduce(told)
            squares, value = told.unbind()
            torch.nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not clips:
            dist.broadcast(value, stages - 1)
        return float(value)

    return step


def our_step(axis: str, shape: LlamaConfig, batch: int) -> Step:
    """The engine on this rank."""
    ranks = dist.get_world_size()
    mesh = {"tensor": {"tensor": ranks}, "norms": {"tensor": ranks}, "sequence": {"sequence": ranks}, "one": {}}.get(
        axis
    )
    piped = axis in ("pipe", "pipe-clip")
    if piped:
        mesh = {"pipe": ranks}
    torch.manual_seed(0)
    config = {
        "mesh": mesh,
        **({"tensor": {"cut_norms": True}} if axis == "norms" else {}),
        "optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.0},
        "batch": {"micro_size": 1, "accumulation": batch} if piped else {"micro_size": batch},
        **({"clip_norm": 1.0} if axis == "pipe-clip" else {}),
    }
    engine = trilithon.initialize(Llama(shape), config)
    engine.hooks.clear()  # the comparison of replicas belongs to single steps
    if piped:
        return lambda tokens, targets: engine.train_step(list(zip(tokens.split(1), targets.split(1))))
    return lambda tokens, targets: engine.train_step([(tokens, targets)])


def bare_step(shape: LlamaConfig, batch: int) -> Step:
    """The engine with a model that has no modules of the mesh."""
    config = {"optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.0}, "batch": {"micro_size": batch}}
    engine = trilithon.initialize(bare(shape), config)
    engine.hooks.clear()
    return lambda tokens, targets: engine.train_step([(tokens, targets)])


def on_this_rank(axis: str, shape: dict[str, int], batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a step and of CPU time in it, by system and round, and the losses; the first round is left out."""
    made = LlamaConfig(**shape)
    torch.manual_seed(1)
    tokens = torch.randint(0, made.vocab_size, (batch, made.context + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    theirs = bare_step(made, batch) if axis == "one" else torch_step(axis, made)
    systems = {"torch": theirs, "trilithon": our_step(axis, made, batch)}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    cpu: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    for round_ in range(rounds + 1):
        for name in list(systems)[:: 1 if round_ % 2 else -1]:
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            for _ in range(steps):
                losses[name].append(systems[name](inputs, targets))
            took, cpu_took = time.perf_counter() - started, time.process_time() - cpu_started
            if round_:
                seconds[name].append(took / steps)
                cpu[name].append(cpu_took / steps)
    return {"seconds": seconds, "cpu": cpu, "losses": losses}


def measure(axis: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both systems on one axis, as two rows."""
    shape = {
        "vocab_size": options.vocab, "context": options.context, "num_layers": options.layers, "width": options.width,
        "num_heads": options.heads, "num_kv_heads": options.heads, "inner_width": 4 * options.width,
    }  # fmt: skip
    rounds, steps = (options.rounds * _MORE_ROUNDS, 1) if axis == "one" else (options.rounds, options.steps)
    found = run_ranks(on_this_rank, ranks, axis, shape, options.batch, rounds, steps, timeout_s=580)
    slowest, cpu = (
        {name: [by(rank[what][name][r] for rank in found) for r in range(rounds)] for name in ("torch", "trilithon")}
        for what, by in (("seconds", max), ("cpu", sum))
    )
    losses = found[0]["losses"]
    apart = max(abs(a - b) / abs(a) for a, b in zip(losses["torch"], losses["trilithon"]))
    if not apart < 1e-3:
        raise SystemExit(f"{axis} on {ranks} ranks: the losses part by {apart:.1e}; the systems do not train alike.")
    rows = []
    for name, times in slowest.items():
        low, _, high = statistics.quantiles(times, n=4)
        ratios = [a / b for a, b in zip(slowest["torch"], times)]
        rows.append(
            {
                "axis": axis,
                "system": "without modules" if axis == "one" and name == "torch" else name,
                "ranks": ranks,
                "step_ms": round(statistics.median(times) * 1e3, 2),
                "step_ms_quartiles": [round(low * 1e3, 2), round(high * 1e3, 2)],
                "cpu_ms": round(statistics.median(cpu[name]) * 1e3, 2),
                "speed_ratio": round(statistics.median(ratios), 3),
                "fastest_ratio": round(min(slowest["torch"]) / min(times), 3),
                "cpu_ratio": round(statistics.median(cpu["torch"]) / statistics.median(cpu[name]), 3),
                "losses_apart": apart,
                "rounds": rounds,
                "steps": steps,
                "batch": options.batch,
                **shape,
            }
        )
    return rows


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"benchmarks/parallel.py: {__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each system (at least 2)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of one turn")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "parallel.jsonl")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/parallel.py", *sys.argv[1:]]),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print("axis      ranks  system            step ms (quartiles)          speed beside torch: rounds, fastest, CPU")
    with options.out.open("a") as out:
        for axis in options.only:
            for ranks in [1] if axis == "one" else options.ranks:
                for row in measure(axis, ranks, options):
                    out.write(json.dumps({**row, **about}) + "\n")
                    low, high = row["step_ms_quartiles"]
                    print(
                        f"{row['axis']:9} {row['ranks']:5}  {row['system']:16} {row['step_ms']:9.2f} "
                        f"({low:.2f} - {high:.2f}) {row['speed_ratio']:12.3f} {row['fastest_ratio']:8.3f} "
                        f"{row['cpu_ratio']:8.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
