"""`trilithon checkpoint COMMAND`: look at checkpoints, check them, compare them, and get plain weights out of them.

Each works on checkpoints of this library and on those that DeepSpeed wrote, on one process, without a GPU and without
the code that trained. Exit status: 0 fine, 1 something is wrong or different, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from trilithon.cli.verify_resume import verify_resume
from trilithon.errors import TrilithonError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Inspect, check, compare, export and convert checkpoints.\n\n" + (__doc__ or "").partition("\n\n")[2],
)


def _checkpoints_of(folder: str) -> Path:
    """A run of `trilithon train` has its checkpoints in a folder of that name."""
    path = Path(folder)
    inside = path / "checkpoints"
    return inside if (inside / "latest").is_file() and not (path / "latest").exists() else path


Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", parser=_checkpoints_of, help="Folder of checkpoints, of one of them, or of a training run."
    ),
]
Tag = Annotated[str, typer.Option("--tag", "-t", help="Which checkpoint of the folder.")]
Type = Literal["fp32", "bf16", "fp16", "saved"]
_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "saved": None}


@app.command()
def inspect(
    folder: Folder,
    *,
    tag: Tag = "latest",
    names: Annotated[bool, typer.Option("--names", help="List every tensor with its type and shape.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Show who wrote a checkpoint, when, and what it holds. Reads no tensor.

    \b
    Examples:
      trilithon checkpoint inspect runs/a
      trilithon checkpoint inspect runs/a --tag step-00001000 --json
    """
    from trilithon.checkpoint.description import describe

    found = describe(folder, tag, names=names)
    typer.echo(json.dumps(found, indent=2)) if as_json else _print(found)


def _print(found: dict[str, Any]) -> None:
    console = _console()
    state, counters = found["state"], found["state"]["counters"]
    console.print(f"{found['path']}: step {found['step']}, {_size(found['bytes'])}, saved {found['saved_at']}")
    ranks = f"{found['world_size']} rank{'s' * (found['world_size'] > 1)}"
    console.print(f"by {found['library']} on {ranks}, ZeRO stage {found['zero_stage']}, {found['precision']}")
    table = Table("part", "tensors", "elements", "stored", "type", box=None, pad_edge=False, header_style="bold")
    for part, one in found["parts"].items():
        stored = _size(one["bytes"]) if one["bytes"] or not one["elements"] else "(from master)"
        table.add_row(part, str(one["tensors"]), f"{one['elements']:,}", stored, ", ".join(one["dtypes"]))
    console.print(table)
    for alias, name in found["aliases"].items():
        console.print(f"tied: {alias} is {name}")
    for index, group in enumerate(state["groups"]):
        told = ", ".join(f"{key}={value}" for key, value in group["settings"].items())
        console.print(f"group {index}: {group['parameters']} parameters, {told}")
    console.print("counters: " + ", ".join(f"{key} {value}" for key, value in counters.items()))
    for key in ("optimizer", "loss_scale", "open_window", "random_states", "stateful", "client_state"):
        if state[key]:
            value = ", ".join(state[key]) if isinstance(state[key], list) else state[key]
            console.print(f"{key.replace('_', ' ')}: {'yes' if value is True else value}")
    if len(found["tags"]["complete"]) > 1:
        console.print(f"complete checkpoints here: {', '.join(found['tags']['complete'])}")
    if "tensors" in found:
        listing = Table("part", "name", "type", "shape", box=None, pad_edge=False, header_style="bold")
        for one in found["tensors"]:
            listing.add_row(one["part"], one["name"], one["dtype"], "x".join(map(str, one["shape"])) or "scalar")
        console.print(listing)


@app.command()
def verify(
    folder: Folder,
    *,
    tag: Tag = "latest",
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint of the folder.")] = False,
) -> None:
    """Read every byte of a checkpoint and name all damage: files that are missing, cut or changed, and whose tensors.

    \b
    Examples:
      trilithon checkpoint verify runs/a
      trilithon checkpoint verify runs/a --all
    """
    from trilithon.checkpoint import verify as check
    from trilithon.checkpoint.manifest import MANIFEST

    chosen = [tag]
    if every and folder.is_dir():
        chosen = sorted(path.parent.name for path in folder.glob(f"[!.]*/{MANIFEST}")) or [tag]
    wrong = 0
    for one in chosen:
        problems = _usage(lambda one=one: check(folder, one))
        label = str(folder / one) if one != "latest" else str(folder)
        for problem in problems:
            typer.echo(f"{label}: {problem}", err=True)
        found = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "whole"
        typer.echo(f"{label}: {found}")
        wrong += len(problems)
    raise typer.Exit(1 if wrong else 0)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of checkpoints, or of one of them.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    *,
    tag_a: Annotated[str, typer.Option("--tag-a", help="Which checkpoint of A.")] = "latest",
    tag_b: Annotated[str, typer.Option("--tag-b", help="Which checkpoint of B.")] = "latest",
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="0: bit for bit; else relative. Default: a few roundings of the type.", min=0),
    ] = None,
    parts: Annotated[list[str] | None, typer.Option("--part", help="Only this part (master, exp_avg, ...).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every difference as JSON.")] = False,
) -> None:
    """Compare two checkpoints by name: for each tensor that differs, its first element that does.

    Stage, number of ranks and files do not matter. 0: no difference; 1: some; 2: one of the two cannot be read.

    \b
    Examples:
      trilithon checkpoint diff runs/a runs/b --part master
      trilithon checkpoint diff runs/a runs/a --tag-a step-00000100 --tag-b step-00000200 --tolerance 0
    """
    from dataclasses import asdict

    from trilithon.checkpoint import differences

    compare = lambda: list(differences(a, b, tag_a=tag_a, tag_b=tag_b, tolerance=tolerance, parts=parts or ()))  # noqa: E731
    found = _usage(compare)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        for one in found:
            typer.echo(str(one))
        typer.echo(
            ("1 tensor differs" if len(found) == 1 else f"{len(found)} tensors differ") if found else "no difference"
        )
    raise typer.Exit(1 if found else 0)


@app.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the exported files.")],
    *,
    tag: Tag = "latest",
    form: Annotated[
        Literal["safetensors", "bin", "deepspeed"],
        typer.Option("--format", help="bin: pytorch_model.bin. deepspeed: the whole state, as DeepSpeed loads it."),
    ] = "safetensors",
    dtype: Annotated[
        Type | None, typer.Option("--dtype", help="Of floating weights; saved: as forward read them.  [default: fp32]")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Size at which the next file begins.  [default: 5GB]")
    ] = None,
    tied: Annotated[
        Literal["copy", "once"] | None,
        typer.Option("--tied", help="Write tied weights under each name, or once.  [default: copy]"),
    ] = None,
    include: Annotated[list[str] | None, typer.Option("--include", help="Pattern over names; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", help="Pattern over names; repeatable.")] = None,
    trained_only: Annotated[bool, typer.Option("--trained-only", help="Leave frozen weights out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="deepspeed: data-parallel ranks that load it. Default: as saved.", min=1),
    ] = None,
    zero_stage: Annotated[
        int | None,
        typer.Option("--zero-stage", help="deepspeed: theirs; 0: weights alone. Default: as saved.", min=0, max=3),
    ] = None,
    universal: Annotated[
        bool, typer.Option("--universal", help="deepspeed: the layout for checkpoint.load_universal.")
    ] = False,
    out_tag: Annotated[str | None, typer.Option("--out-tag", help="deepspeed: default global_stepN.")] = None,
) -> None:
    """Write the weights as safetensors in the layout of Hugging Face, in the memory of a few MiB.

    With --format deepspeed: the whole training state, for DeepSpeed to go on from, in the memory of one rank's part.

    \b
    Examples:
      trilithon checkpoint export runs/a exported --dtype bf16
      trilithon checkpoint export runs/a exported --max-shard-size 500MB --exclude "lm_head.*"
      trilithon checkpoint export runs/a for_deepspeed --format deepspeed --ranks 8 --zero-stage 3
    """
    plain = {"--dtype": dtype, "--max-shard-size": shard_size, "--tied": tied, "--include": include,
             "--exclude": exclude, "--trained-only": trained_only, "--overwrite": overwrite}  # fmt: skip
    theirs = {"--ranks": ranks, "--zero-stage": zero_stage, "--universal": universal, "--out-tag": out_tag}
    _only_with("safetensors or bin" if form == "deepspeed" else "deepspeed", plain if form == "deepspeed" else theirs)
    if form == "deepspeed":
        from trilithon.checkpoint import export_deepspeed

        made = export_deepspeed(
            folder, out, tag=tag, out_tag=out_tag, ranks=ranks, zero_stage=zero_stage,  # type: ignore[arg-type]
            universal=universal,
        )  # fmt: skip
        told = f"{len(made.files)} files, {_size(made.bytes)}, for {made.ranks} ranks at stage {made.zero_stage}"
        typer.echo(f"{told}, in {made.folder}")
        return
    from trilithon.checkpoint import export as write
    from trilithon.checkpoint.asked import bytes_asked

    try:
        limit = bytes_asked(shard_size or "5GB")
    except TrilithonError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-size") from None
    done = write(
        folder, out, tag=tag, dtype=_torch_type(dtype or "fp32"), shard_bytes=limit, tied=tied or "copy",
        include=include or (), exclude=exclude or (), frozen=not trained_only, overwrite=overwrite, form=form,
    )  # fmt: skip
    typer.echo(f"{done.tensors} tensors, {_size(done.bytes)}, in {done.folder}: {', '.join(done.files)}")


@app.command()
def convert(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the new checkpoint.")],
    *,
    tag: Tag = "latest",
    out_tag: Annotated[str | None, typer.Option("--out-tag", help="Its name. Default: as before.")] = None,
    dtype: Annotated[
        Type, typer.Option("--dtype", help="Type of the weights; another one than saved means weights only.")
    ] = "saved",
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer's state out.")] = False,
) -> None:
    """Write a checkpoint anew in this library's format: out of DeepSpeed's files, in 16 bits, or weights alone.

    \b
    Examples:
      trilithon checkpoint convert ds_run runs/a
      trilithon checkpoint convert runs/a runs/a-bf16 --dtype bf16
    """
    from trilithon.checkpoint import convert as write

    path = write(folder, out, tag=tag, out_tag=out_tag, dtype=_torch_type(dtype), weights_only=weights_only)
    typer.echo(f"written: {path}")


@app.command()
def prune(
    folder: Folder,
    *,
    keep: Annotated[int, typer.Option("--keep", "-k", help="How many of the newest stay.", min=1)],
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", help="Those at multiples of this step stay as well.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
) -> None:
    """Remove old checkpoints. The newest, and the one that `latest` names, always stay.

    \b
    Examples:
      trilithon checkpoint prune runs/a --keep 3 --dry-run
      trilithon checkpoint prune runs/a --keep 3 --keep-every 10000
    """
    from trilithon.checkpoint.removal import prune_now

    gone = _usage(lambda: prune_now(folder, keep, keep_every, dry_run=dry_run))
    verb = "would go" if dry_run else "removed"
    typer.echo(f"{verb}: {', '.join(gone)}" if gone else "nothing to remove")


def _only_with(form: str, options: dict[str, Any]) -> None:
    """Refuse options that belong to the other format."""
    given = [name for name, value in options.items() if value not in (None, False, [])]
    if given:
        raise typer.BadParameter(f"it goes with --format {form} only.", param_hint=" and ".join(given))


def _usage(work: Any) -> Any:
    """The result of `work`; its error ends with 2, as 1 says something about the checkpoint."""
    try:
        return work()
    except TrilithonError as error:
        if os.environ.get("TRILITHON_TRACEBACK", "") not in ("", "0"):
            raise
        typer.echo(f"trilithon checkpoint: {error}", err=True)
        raise typer.Exit(2) from None


def _torch_type(name: str) -> Any:
    import torch

    return None if _TYPES[name] is None else getattr(torch, str(_TYPES[name]))


def _size(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:.3g} TB"


def _console() -> Console:
    return Console(highlight=False, markup=False, soft_wrap=True)


app.command("verify-resume")(verify_resume)

if __name__ == "__main__":
    app(prog_name="trilithon checkpoint")
