"""The `trilithon` command: finds the subcommand, and turns our exceptions into one clean message.

Subcommands are imported only when they are called, so that `--help` answers at once and without torch. Each lives in a
file of this package and is one function, or one Typer with subcommands of its own; to add a command, add its file and a
line to `COMMANDS`.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from trilithon import __version__
from trilithon.errors import TrilithonError


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a subcommand lives ("module:function") and what it does, for `trilithon --help`.

    The module may set CONTEXT_SETTINGS, which is handed to typer, and define complete(arguments), which fills in what
    may be left out on the command line.
    """

    where: str
    summary: str


COMMANDS = {
    "check": Entry("trilithon.cli.check:run", "Check and explain a configuration file."),
    "migrate": Entry("trilithon.cli.migrate:run", "Turn a DeepSpeed file into a native configuration."),
    "train": Entry("trilithon.cli.train:run", "Train a language model on text files."),
    "launch": Entry("trilithon.cli.launch:run", "Start a script on several processes."),
    "doctor": Entry("trilithon.cli.doctor:run", "Report on this machine: devices, backends, packages."),
    "compare": Entry("trilithon.cli.compare:run", "Find the first tensor that differs between two configurations."),
    "generate": Entry("trilithon.cli.generate:run", "Generate text from a trained model."),
    "plan": Entry("trilithon.cli.plan:run", "Predict memory and time without running."),
    "checkpoint": Entry("trilithon.cli.checkpoint:app", "Inspect, convert and verify checkpoints."),
    "moe": Entry("trilithon.cli.moe:app", "Join or prune trained mixtures of experts."),
    "bench": Entry("trilithon.cli.bench:run", "Measure speed and memory."),
}


def _present(name: str) -> bool:
    """Whether this installation has the file of a subcommand."""
    return name in COMMANDS and find_spec(COMMANDS[name].where.partition(":")[0]) is not None


class _Lazy(TyperCommand):
    """Stands for a subcommand in the list; becomes the real one when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module_name, _, function = COMMANDS[str(self.name)].where.partition(":")
        module = import_module(module_name)
        if isinstance(getattr(module, function), typer.Typer):  # a command with subcommands of its own
            group = typer.main.get_command(getattr(module, function))
            return group.make_context(info_name, args, parent=parent, **extra)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=self.name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(
            getattr(module, function)
        )
        args = getattr(module, "complete", list)(args)
        return typer.main.get_command(app).make_context(info_name, args, parent=parent, **extra)


class _Commands(TyperGroup):
    """The subcommands whose files are there."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if _present(name)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        here = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in here:
            near = difflib.get_close_matches(args[0], here, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(here)}."
            ctx.fail(f"There is no command {args[0]}. {hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _Lazy(name=cmd_name, help=COMMANDS[cmd_name].summary) if _present(cmd_name) else None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"trilithon {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of an error (or set TRILITHON_TRACEBACK=1).")
    ] = False,
) -> None:
    """Train PyTorch models whose state does not fit on one device: ZeRO stages 0 to 3, mixed precision.

    `trilithon COMMAND --help` explains one command.
    """
    if show_traceback:
        os.environ["TRILITHON_TRACEBACK"] = "1"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 an error of ours, 2 wrong usage, 130 interrupted."""
    try:
        typer.main.get_command(app).main(args=None if argv is None else list(argv), prog_name="trilithon")
    except TrilithonError as error:
        if os.environ.get("TRILITHON_TRACEBACK", "") not in ("", "0"):
            traceback.print_exc()
        else:
            print(f"trilithon: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
