"""`trilithon train --data PATH...`: train a language model on text files, on one or several ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from trilithon.errors import ConfigError
from trilithon.pretrain.settings import PretrainConfig, load_pretrain
from trilithon.pretrain.start import AUTO, run_folder, settings_of_run

CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

# option of the command -> dotted key of the configuration
_KEYS = {
    "suffix": "data.suffixes",
    "tokenizer": "data.tokenizer",
    "vocab": "data.vocab_size",
    "max_tokens": "data.max_tokens",
    "held_out": "data.held_out",
    "cache": "data.cache",
    "workers": "data.workers",
    "model": "model.preset",
    "layers": "model.num_layers",
    "width": "model.width",
    "heads": "model.num_heads",
    "context": "model.context",
    "experts": "model.experts",
    "top_k": "model.top_k",
    "ep_size": "model.ep_size",
    "steps": "run.steps",
    "eval_every": "run.eval_every",
    "eval_batches": "run.eval_batches",
    "out": "run.out",
    "save_every": "run.save_every",
    "keep": "checkpoints.keep",
    "save_on_signal": "run.save_on_signal",
    "resume": "run.resume",
    "max_restarts": "run.max_restarts",
    "prompt": "run.prompt",
    "sample_tokens": "run.sample_tokens",
    "zero_stage": "zero.stage",
    "tp": "mesh.tensor",
    "sp": "mesh.sequence",
    "pp": "mesh.pipe",
    "pipe_schedule": "pipeline.schedule",
    "precision": "precision",
    "batch_size": "batch.global_size",
    "micro_batch": "batch.micro_size",
    "accumulation": "batch.accumulation",
    "optimizer": "optimizer",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "schedule": "lr_schedule",
    "warmup": "lr_schedule.warmup_steps",
    "clip": "clip_norm",
    "state_tier": "offload.state",
    "param_tier": "offload.parameters",
    "tier_path": "offload.path",
    "recompute": "recompute.policy",
    "activation_tier": "recompute.tier",
    "partition_activations": "recompute.partition",
    "contiguous_activations": "recompute.contiguous",
    "seed": "seed",
}


def run(
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="File, folder or pattern; may be given several times.")
    ] = None,
    *,
    more_data: Annotated[list[str] | None, typer.Argument(metavar="PATH", help="Further files or folders.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", "-n", help="Ranks to start on this machine.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="JSON or TOML with any of the settings; options win.")
    ] = None,
    suffix: Annotated[
        list[str] | None, typer.Option("--suffix", help="Ending that files in folders must have; repeatable.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="bytes, or bpe learnt from the data.")] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", help="Tokens of a bpe vocabulary.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Training tokens to stop reading at.")] = None,
    held_out: Annotated[float | None, typer.Option("--held-out", help="Share of the text for validation.")] = None,
    cache: Annotated[Path | None, typer.Option("--cache", help="Folder of tokenised data.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes that load ahead, on each rank.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="nano, tiny, small, medium, base, large, xl.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Blocks.")] = None,
    width: Annotated[int | None, typer.Option("--width", help="Channels of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Attention heads.")] = None,
    context: Annotated[int | None, typer.Option("--context", help="Tokens of a sequence.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", help="Experts in every other layer; 0: dense.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Experts that each token goes to.")] = None,
    ep_size: Annotated[int | None, typer.Option("--ep-size", help="Ranks over which experts are spread.")] = None,
    zero_stage: Annotated[int | None, typer.Option("--zero-stage", "-z", help="0, 1, 2 or 3: what is sharded.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Ranks that share each matrix (tensor slices).")] = None,
    sp: Annotated[int | None, typer.Option("--sp", help="Ranks that share each sequence.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", help="Stages of a pipeline: ranks with different layers.")] = None,
    pipe_schedule: Annotated[
        str | None, typer.Option("--pipe-schedule", help="With --pp: 1f1b, gpipe, interleaved or zero-bubble.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", "-p", help="fp32, bf16 or fp16.")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-b", help="Sequences of a step, all ranks.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Sequences of one forward.")] = None,
    accumulation: Annotated[int | None, typer.Option("--accumulation", help="Micro-batches of a step.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", "-s", help="Updates of the weights, those before --resume included.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="adamw, adam, sgd, lion, adagrad, lamb, onebit_adam, ...")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", help="Steps over which the rate rises.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="cosine, linear, constant, ...")] = None,
    weight_decay: Annotated[float | None, typer.Option("--weight-decay", help="Decay of the weights.")] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of the gradient; 0: no limit.")] = None,
    eval_every: Annotated[
        int | None, typer.Option("--eval-every", help="Steps between evaluations; 0: at the end.")
    ] = None,
    eval_batches: Annotated[
        int | None, typer.Option("--eval-batches", help="Batches of 8 sequences in an evaluation, all ranks together.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the results. Default: runs/TIME.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that --out holds.")] = False,
    save_every: Annotated[
        int | None, typer.Option("--save-every", help="Steps between checkpoints; 0: only when a signal asks.")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", help="Newest checkpoints to keep. Default: 2.")] = None,
    save_on_signal: Annotated[
        bool | None,
        typer.Option("--save-on-signal/--no-save-on-signal", help="Save on Ctrl-C, SIGTERM and SIGUSR1. Default: yes."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[DIR]",
            help="Continue the run in DIR, with its settings if no --data is given. Without DIR: the run that --out "
            "holds, if there is one.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", help="Starts after a rank failed, from the last checkpoint.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text that the sample continues.")] = None,
    sample_tokens: Annotated[int | None, typer.Option("--sample-tokens", help="Length of the sample; 0: none.")] = None,
    state_tier: Annotated[
        str | None, typer.Option("--state-tier", help="Where masters and optimizer state rest: device, host or disk.")
    ] = None,
    param_tier: Annotated[
        str | None,
        typer.Option("--param-tier", help="Stage 3: where parameters and gradients rest: device, host, disk."),
    ] = None,
    tier_path: Annotated[Path | None, typer.Option("--tier-path", help="Folder for what rests on disk.")] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            "--recompute",
            metavar="[POLICY]",
            help="Compute the activations of blocks again in backward: full (also without a word), or selective, which "
            "keeps the products.",
        ),
    ] = None,
    activation_tier: Annotated[
        str | None, typer.Option("--activation-tier", help="With --recompute, where inputs rest: device or host.")
    ] = None,
    partition_activations: Annotated[
        bool | None, typer.Option("--partition-activations", help="With --tp, inputs are cut over the tensor ranks.")
    ] = None,
    contiguous_activations: Annotated[
        bool | None, typer.Option("--contiguous-activations", help="Inputs lie in buffers that are made once.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of weights, order and sample.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show settings, sizes and memory; start nothing.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE for any setting, such as zero.bucket_numel=1000000; repeatable."),
    ] = None,
) -> None:
    """Train a language model on text files.

    Leaves metrics, a loss curve, the weights and a sample in a folder of its own. Everything that is not given has a
    default. With --nproc N it starts N ranks itself; under torchrun it is one of torchrun's ranks.

    \b
    Examples:
      trilithon train --data notes/ --steps 200
      trilithon train --data src/ --suffix .py --nproc 2 --zero-stage 3 --precision bf16
      trilithon train --data 'books/*.txt' --tokenizer bpe --vocab 8192 --model small
      trilithon train --data texts/ --experts 8 --top-k 1 --ep-size 2 --nproc 2
      trilithon train --data src/ --suffix .py --nproc 4 --tp 2 --zero-stage 1
      trilithon train --data src/ --suffix .py --nproc 4 --pp 2 --accumulation 8
      trilithon train --data src/ --suffix .py --nproc 4 --tp 2 --zero-stage 1 --recompute --partition-activations
      trilithon train --data texts/ --zero-stage 3 --state-tier disk --param-tier disk --tier-path /mnt/fast --recompute
      trilithon train --config run.toml --lr 6e-4 --set zero.bucket_numel=1000000
      trilithon train --data texts/ --nproc 2 --out runs/a --save-every 100 --max-restarts 3
      trilithon train --resume runs/a --nproc 4
      torchrun --nproc-per-node 4 -m trilithon.cli.main train --data texts/ --zero-stage 2
    """
    given = {name: value for name, value in locals().items() if name in _KEYS and value is not None}
    overrides: dict[str, Any] = {
        _KEYS[name]: str(value) if isinstance(value, Path) else value for name, value in given.items()
    }
    if data or more_data:
        overrides["data.paths"] = [*(data or []), *(more_data or [])]
    if overwrite:
        overrides["run.overwrite"] = True
    if quiet:
        overrides["monitor.quiet"] = True
    overrides.update(parse_setting(setting) for setting in settings or [])
    source: Path | dict[str, Any] | None = config
    if resume is not None and config is None and "data.paths" not in overrides:
        source = settings_of_run(run_folder(resume, out))
    loaded = load_pretrain(source, overrides)
    if dry_run:
        from trilithon.pretrain.preview import preview

        typer.echo(preview(loaded, nproc or int(os.environ.get("WORLD_SIZE", "1"))))
        raise typer.Exit
    raise typer.Exit(_train(loaded, nproc))


def complete(arguments: list[str]) -> list[str]:
    """--resume may stand alone: then it means the run that --out holds. So may --recompute: then it is full."""
    found: list[str] = []
    for place, argument in enumerate(arguments):
        found.append(argument)
        after = arguments[place + 1 : place + 2]
        if argument == "--resume" and (not after or after[0].startswith("-")):
            found.append(AUTO)
        if argument == "--recompute" and after not in (["full"], ["selective"]):
            found.append("full")
    return found


def parse_setting(setting: str) -> tuple[str, Any]:
    """ "zero.stage=3" -> ("zero.stage", 3): the value is JSON, and plain text if it is not."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {setting}: write KEY=VALUE, such as --set zero.bucket_numel=1000000.")
    try:
        return key.strip(), json.loads(text)
    except ValueError:
        return key.strip(), text


def _train(config: PretrainConfig, nproc: int | None) -> int:
    """Train on this process or on new ones; returns the exit status."""
    from trilithon.pretrain.rank import main

    started = os.environ.get("WORLD_SIZE")
    if started is not None:
        if nproc is not None and nproc != int(started):
            raise ConfigError(
                f"--nproc {nproc}, but this is already one of WORLD_SIZE={started} ranks of another launcher. "
                "Leave --nproc out there, or start the command alone."
            )
        return main(config)
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: give at least 1.")
    if (nproc is None or nproc == 1) and not config.run.max_restarts:
        return main(config)

    from trilithon.pretrain.ranks import RankFailedError, start_ranks

    try:
        return start_ranks(config, nproc or 1)
    except RankFailedError as error:
        typer.echo(f"trilithon: {error}", err=True)
        return error.exit_status
