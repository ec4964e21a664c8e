"""`trilithon migrate FILE`: a DeepSpeed file as a native configuration, with a note on each key. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trilithon.cli.check import assignments
from trilithon.config.deepspeed_release import Release
from trilithon.config.migration import as_json, as_text, as_toml, migrate
from trilithon.engine.capabilities import refusals
from trilithon.errors import ConfigError


def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON file written for DeepSpeed.")],
    *,
    form: Annotated[
        Literal["toml", "json"], typer.Option("--format", help="json: without comments; the notes go to stderr.")
    ] = "toml",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it there instead of printing it.")] = None,
    deepspeed_release: Annotated[
        Release | None,
        typer.Option(
            "--deepspeed-release",
            help="By whose rules the file is read. Default: what TRILITHON_DEEPSPEED_RELEASE says, else 0.19.",
        ),
    ] = None,
    auto: Annotated[
        list[str] | None, typer.Option("--auto", metavar="KEY=VALUE", help='Value for an "auto" of the file.')
    ] = None,
) -> None:
    """Turn a DeepSpeed file into a native configuration that says the same, with a note on each of its keys.

    Every key is mapped onto one of ours, says what is so here in any case, has no effect here and why, or is refused
    with the way out. The result loads with trilithon.initialize and trilithon check.

    Exit status: 0 all of it has a place, 1 something was refused (the rest is printed), 2 wrong usage.

    Examples:

    trilithon migrate ds_config.json > config.toml

    trilithon migrate ds_config.json --format json --out config.json

    trilithon migrate ds_config.json --auto train_micro_batch_size_per_gpu=4 --auto optimizer.params.lr=1e-4

    trilithon migrate old_config.json --deepspeed-release 0.16
    """
    values = assignments(auto, "--auto")
    try:
        found = migrate(Path(file), auto=values, deepspeed_release=deepspeed_release)
        if found.config is not None:
            more = [(item.key, item.text) for item in refusals(found.config)]
            found = migrate(Path(file), auto=values, deepspeed_release=deepspeed_release, refusals=more)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    text = as_toml(found) if form == "toml" else as_json(found)
    if form == "json":
        typer.echo(as_text(found), err=True, nl=False)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        typer.echo(f"written: {out}")
    refused = found.of("refused")
    if refused:
        typer.echo(
            f"{len(refused)} key{'s' * (len(refused) > 1)} refused: {', '.join(n.key for n in refused)}", err=True
        )
    raise typer.Exit(1 if refused else 0)
