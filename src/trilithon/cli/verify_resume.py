"""`trilithon checkpoint verify-resume [RUN]`: does training continue exactly after a save and a load?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trilithon.cli.train import parse_setting
from trilithon.errors import ConfigError


def verify_resume(
    folder: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run, for its settings.")] = None,
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Settings as trilithon train takes them.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option("--data", "-d", help="File, folder or pattern; repeatable.")] = None,
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks to start on this machine.")] = 1,
    steps: Annotated[int, typer.Option("--steps", "-s", help="Steps of each of the two runs.")] = 6,
    at: Annotated[int | None, typer.Option("--at", help="Step to save and load after. Default: half of them.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE for any setting; repeatable.")] = None,
) -> None:
    """Train some steps straight and across a save and a load, and name the first difference.

    Ends with 0 when all steps, weights, optimizer state and counters are equal bit for bit, with 1 when they are not.

    \b
    Examples:
      trilithon checkpoint verify-resume runs/a --nproc 2
      trilithon checkpoint verify-resume --data texts/ --set zero.stage=3 --set precision=bf16 --nproc 2
    """
    from trilithon.pretrain.settings import load_pretrain
    from trilithon.pretrain.start import settings_of_run

    if folder is not None and config is not None:
        raise ConfigError(f"RUN {folder} and --config {config} both give the settings: keep one of the two.")
    source: Path | dict[str, Any] | None = settings_of_run(folder) if folder is not None else config
    overrides: dict[str, Any] = {"data.paths": data} if data else {}
    overrides.update(parse_setting(setting) for setting in settings or [])
    loaded = load_pretrain(source, overrides)
    from trilithon.pretrain.verify_resume import verify_resume as verify

    verdict = verify(loaded, steps=steps, save_at=at, nproc=nproc)
    typer.echo(str(verdict))
    raise typer.Exit(0 if verdict.difference is None else 1)
