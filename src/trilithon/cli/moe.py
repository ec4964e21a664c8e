"""`trilithon moe aggregate | prune`: finished runs with experts, joined or made smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from trilithon.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Join two trained mixtures of experts, or keep some of the experts of one.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("aggregate")
def aggregate(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="Folder of a finished run.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Folder of another, of the same shape.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the result.")],
    dense: Annotated[str, typer.Option("--dense", help="Everything else: the mean of both, or of the first.")] = "mean",
) -> None:
    """Write a model that has the experts of both runs in every layer."""
    if dense not in ("mean", "first"):
        raise ConfigError(f"--dense {dense}: give mean or first.")
    from trilithon.pretrain.expert_tools import aggregate_runs

    shape = aggregate_runs(first, second, out, cast(Literal["mean", "first"], dense))
    typer.echo(f"{out}: {shape.experts} experts in {len(shape.sparse_layers())} layers, {shape.num_parameters():,} "
               "parameters; the optimizer starts anew")  # fmt: skip


@app.command("prune")
def prune(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    *,
    keep: Annotated[int, typer.Option("--keep", "-k", help="Experts to keep in each layer.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the result.")],
    by: Annotated[str, typer.Option("--by", help="utilization (on --data) or random.")] = "utilization",
    data: Annotated[Path | None, typer.Option("--data", "-d", help="Text whose tokens choose experts.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of it to look at.")] = 65536,
    seed: Annotated[int, typer.Option("--seed", help="Of a random choice.")] = 0,
) -> None:
    """Write the run's model with fewer experts in every layer."""
    if by not in ("utilization", "random"):
        raise ConfigError(f"--by {by}: give utilization or random.")
    from trilithon.pretrain.expert_tools import prune_run

    choice = cast(Literal["random", "utilization"], by)
    shape, kept = prune_run(run, out, keep, choice, text=data, max_tokens=max_tokens, seed=seed)
    for layer, experts in kept.items():
        typer.echo(f"{layer}: kept {', '.join(map(str, experts))}")
    typer.echo(f"{out}: {shape.num_parameters():,} parameters")
