"""`trilithon compare A B --script FILE`: which tensor differs first between two ways to train, and is it rounding?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from trilithon.errors import TrilithonError


def run(
    a: Annotated[str, typer.Argument(metavar="A", help="Configuration file, or the word plain.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Configuration file, or the word plain.")],
    *,
    script: Annotated[Path, typer.Option("--script", help="Defines build() and batches(rank, world_size).")],
    steps: Annotated[int, typer.Option("--steps", help="Updates to compare.")] = 3,
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks of each configuration.")] = 2,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds each side may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Every difference, as one JSON object.")] = False,
) -> None:
    """Train a few steps under A and under B; exits with 0 if they agree within rounding and 1 if they differ."""
    from trilithon import compare

    try:
        outcome = compare.compare(a, b, script, steps=steps, nproc=nproc, timeout_s=timeout_s)
    except TrilithonError as error:  # not status 1, which says that the sides differ
        if os.environ.get("TRILITHON_TRACEBACK", "") not in ("", "0"):
            raise
        typer.echo(f"trilithon compare: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(compare.as_json(outcome) if as_json else compare.as_text(outcome))
    raise typer.Exit(0 if outcome.agree else 1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(run)

if __name__ == "__main__":
    app(prog_name="trilithon compare")
