"""`trilithon check FILE`: everything that is wrong with a configuration, or every value in force and its origin.

Needs no torch and no process group; `--world-size` solves mesh and batch sizes for that many ranks, and `--mesh` draws
where each of them is and who it talks to.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from trilithon.config.deepspeed_release import ENVIRONMENT, Release
from trilithon.config.mesh import Axes, draw
from trilithon.config.origin import Problem
from trilithon.config.root import Config, Examined, examine, explain
from trilithon.config.schema import deepspeed_reference, json_schema, reference
from trilithon.config.sources import parse_json
from trilithon.engine.capabilities import refusals
from trilithon.errors import ConfigError


def run(  # noqa: PLR0917 (options of a command line)
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="JSON or TOML file of trilithon, or JSON file of DeepSpeed.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", min=1, help="Solve mesh and batch sizes for this many ranks.")
    ] = None,
    mesh: Annotated[bool, typer.Option("--mesh", help="Draw the mesh of --world-size ranks; needs no FILE.")] = False,
    deepspeed_release: Annotated[
        Release | None,
        typer.Option(
            "--deepspeed-release",
            help="By whose rules a DeepSpeed file is read. Default: what TRILITHON_DEEPSPEED_RELEASE says, else 0.19.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value, as in --set zero.stage=2.")
    ] = None,
    auto: Annotated[
        list[str] | None, typer.Option("--auto", metavar="KEY=VALUE", help='Value for an "auto" of a DeepSpeed file.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of trilithon's own format.")] = False,
    show_reference: Annotated[bool, typer.Option("--reference", help="Print the reference of all keys.")] = False,
    show_deepspeed: Annotated[
        bool, typer.Option("--deepspeed-reference", help="Print what becomes of each key of a DeepSpeed file.")
    ] = False,
) -> None:
    """Check a configuration file, and explain every value in force.

    Settings that `trilithon.initialize` refuses together, whatever the model, are problems as well.

    Exit status: 0 all is well, 1 problems were found (all of them are listed), 2 wrong usage.

    Examples:

    trilithon check config.json

    trilithon check ds_config.json --world-size 8 --deepspeed-release 0.16

    trilithon check config.toml --set zero.stage=3 --json

    trilithon check --world-size 8 --mesh --set mesh.tensor=2

    trilithon check --schema > trilithon.schema.json
    """
    if schema or show_reference or show_deepspeed:
        typer.echo(json.dumps(json_schema(), indent=2) if schema else reference() if show_reference else "", nl=schema)
        typer.echo(deepspeed_reference() if show_deepspeed and not schema else "", nl=False)
        return
    if mesh and world_size is None:
        raise typer.BadParameter("say for how many ranks, as in --world-size 8.", param_hint="--mesh")
    if file is None and not mesh:
        raise typer.BadParameter("name the file to check, or ask for --schema or --reference.", param_hint="FILE")
    try:
        found = examine(
            Path(file) if file is not None else {},
            name="the defaults",
            overrides=assignments(changes, "--set"),
            auto=assignments(auto, "--auto"),
            deepspeed_release=deepspeed_release,
        )
    except ConfigError as error:
        found = Examined(
            None, (Problem(file or "", "", str(error).removeprefix(f"{file}: ")),), (), file or "", "native"
        )
    problems = [*found.problems, *_refused(found)]
    axes, batch = None, None
    if found.config is not None and world_size is not None:
        try:
            axes = found.config.mesh.axes(world_size)
            batch = found.config.resolve_batch(axes.size("data")).model_dump()
        except ConfigError as error:
            problems.append(Problem(found.where, "batch" if axes is not None else "mesh", str(error)))
    if as_json:
        _print_json(found, problems, batch, axes)
    else:
        _print_text(found, problems, batch, table=not mesh)
        if mesh and axes is not None:
            typer.echo("" if problems else draw(axes))
    raise typer.Exit(1 if problems else 0)


def _refused(found: Examined) -> list[Problem]:
    """What `trilithon.initialize` refuses in a configuration that was read without problems."""
    if found.config is None:
        return []
    problems, origins = [], explain(found.config)
    for refusal in refusals(found.config):
        named = {refusal.key, *_settings_in(refusal.text)} if found.format == "deepspeed" else set()
        written = [
            f"{item.key} comes from {item.source}" for item in origins if item.key in named and item.kind != "default"
        ]
        text = f"{refusal.text} ({'; '.join(written)}.)" if written else refusal.text
        problems.append(Problem(found.where, refusal.key, text))
    return problems


def _settings_in(text: str) -> list[str]:
    """Settings that a message names, such as zero.stage in "use zero.stage=0"."""
    return re.findall(r"[a-z_]+\.[a-z_]+", text)


def assignments(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """["zero.stage=2"] -> {"zero.stage": 2}; a value that is not JSON is text."""
    values = {}
    for pair in pairs or []:
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE.", param_hint=option)
        try:
            values[key] = parse_json(f'{{"value": {text}}}', option)["value"]
        except ConfigError:
            values[key] = text
    return values


def _print_json(found: Examined, problems: list[Problem], batch: dict[str, int] | None, axes: Axes | None) -> None:
    result: dict[str, Any] = {
        "ok": not problems,
        "file": found.where,
        "format": found.format,
        "deepspeed_release": found.deepspeed_release,
        "problems": [{"where": item.where, "key": item.key, "text": item.text} for item in problems],
        "notes": list(found.notes),
        "batch": batch,
        "mesh": None if axes is None else dict(zip(axes.names, axes.sizes)),
        "config": None,
        "origins": None,
    }
    if found.config is not None:
        result["config"] = found.config.model_dump(mode="json")
        result["origins"] = {
            item.key: {"kind": item.kind, "source": str(item.source)} for item in explain(found.config)
        }
    typer.echo(json.dumps(result, indent=2))


def _print_text(found: Examined, problems: list[Problem], batch: dict[str, int] | None, *, table: bool) -> None:
    for problem in dict.fromkeys(problems):
        typer.echo(str(problem), err=True)
    if problems:
        if found.deepspeed_release is not None:
            typer.echo(f"{found.where}: {_read_as(found)}", err=True)
        typer.echo(f"{len(problems)} problem{'s' * (len(problems) > 1)} found.", err=True)
    if found.config is None or not table:
        return
    typer.echo(f"{found.where}: {_read_as(found)}\n")
    _print_table(found.config)
    if found.notes:
        typer.echo("\nNotes:")
        for note in found.notes:
            typer.echo(f"  {note}")
    if batch is not None:
        typer.echo(
            f"\nBatch on {batch['data_parallel_size']} data-parallel ranks: global size {batch['global_size']} = "
            f"{batch['micro_size']} (micro) x {batch['accumulation']} (accumulation) x {batch['data_parallel_size']}"
        )


def _read_as(found: Examined) -> str:
    """The format that was recognised; for a DeepSpeed file also the release, and how to ask for the other one."""
    if found.deepspeed_release is None:
        return "read as a trilithon configuration"
    other = next(release for release in get_args(Release) if release != found.deepspeed_release)
    return (
        f"read as a DeepSpeed file, by the rules of release {found.deepspeed_release} (--deepspeed-release {other} or "
        f"{ENVIRONMENT}={other} asks for the other ones)"
    )


def _print_table(config: Config) -> None:
    rows = [("key", "value", "origin")]
    rows += [(item.key, _json_text(item.value), str(item.source)) for item in explain(config)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, origin in rows:
        typer.echo(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


def _json_text(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)
