"""`trilithon launch [options] script.py arguments...`: run a script on several processes, devices or machines.

Options of the launcher come before the script; everything after it reaches the script untouched. What the launcher
refuses ends with status 2, so that status 1 is the script's own.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from trilithon.compat.deepspeed import stand_in
from trilithon.errors import TrilithonError
from trilithon.launch import Command, LaunchOptions, make_plan
from trilithon.launch.deepspeed import environment_file, native_arguments

CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows the script is the script's

DeviceChoice = Literal["auto", "cuda", "cpu"]


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script (or module, program) of every rank.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed on untouched.")] = None,
    *,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "-n", help="Processes on this machine. Default: its visible accelerators, or 1."),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program of its own.")] = False,
    host_file: Annotated[
        Path | None, typer.Option("--host-file", "--hostfile", "-H", help="One line `name slots=N` per machine.")
    ] = None,
    include: Annotated[
        str | None, typer.Option("--include", "-i", help="Only these: HOST[:DEVICE,DEVICE][@HOST...].")
    ] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", "-e", help="All but these, same form.")] = None,
    num_nodes: Annotated[int | None, typer.Option("--num-nodes", help="Machines, without a host file.")] = None,
    node_rank: Annotated[int | None, typer.Option("--node-rank", help="This machine's place among them.")] = None,
    master_addr: Annotated[str | None, typer.Option("--master-addr", help="Where the nodes meet.")] = None,
    master_port: Annotated[int | None, typer.Option("--master-port", help="Port to meet at.")] = None,
    device: Annotated[DeviceChoice, typer.Option("--device", help="cpu hides every accelerator.")] = "auto",
    max_restarts: Annotated[int, typer.Option("--max-restarts", help="Starts again after a failure.")] = 0,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that ranks have to save and end once this is asked to stop.")
    ] = 5.0,
    ssh: Annotated[bool, typer.Option("--ssh", help="Start every machine of the host file from here.")] = False,
    ssh_command: Annotated[str, typer.Option("--ssh-command", help="The ssh program.")] = "ssh -o BatchMode=yes",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the process table and start nothing.")] = False,
    local_rank: Annotated[
        bool, typer.Option("--local-rank", help="Append --local_rank=N to the arguments of rank N of a machine.")
    ] = False,
    export: Annotated[
        list[str] | None, typer.Option("--export", help="With --ssh: a variable that the machines get as well.")
    ] = None,
    deepspeed: Annotated[
        bool,
        typer.Option(
            "--deepspeed",
            help="SCRIPT is written for DeepSpeed: its module is put in place. As the first option, those that follow "
            "are the flags of DeepSpeed's own launcher.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table of --dry-run as JSON.")] = False,
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
) -> None:
    """Run SCRIPT on several processes; options of the launcher come before SCRIPT."""
    try:
        if module and no_python:
            raise typer.BadParameter("--module and --no-python exclude each other; keep one.")
        kind: Literal["script", "module", "program"] = "module" if module else "program" if no_python else "script"
        options = LaunchOptions(
            command=Command(kind, target, tuple(arguments or ()), local_rank),
            nproc=nproc,
            host_file=host_file,
            include=include,
            exclude=exclude,
            num_nodes=num_nodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            device=device,
            max_restarts=max_restarts,
            grace_s=grace,
            ssh=ssh,
        )
        if deepspeed:
            os.environ.update({**environment_file(), **stand_in.environment()})
        status = _carry_out(options, shlex.split(ssh_command), dry_run, as_json, stop_with_stdin, export or [])
    except TrilithonError as error:
        if os.environ.get("TRILITHON_TRACEBACK", "") not in ("", "0"):
            raise
        typer.echo(f"trilithon launch: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(status)


def complete(arguments: list[str]) -> list[str]:
    """`--deepspeed` first: DeepSpeed's flags follow. Exits with 2 where they are wrong."""
    if arguments[:1] != ["--deepspeed"]:
        return arguments
    try:
        return native_arguments(arguments[1:])
    except TrilithonError as error:
        typer.echo(f"trilithon launch: {error}", err=True)
        raise typer.Exit(2) from None


def _carry_out(  # noqa: PLR0917 (called once)
    options: LaunchOptions, ssh: list[str], dry_run: bool, as_json: bool, stop_with_stdin: bool, export: list[str]
) -> int:
    from trilithon.launch import checks, remote, table

    plan = make_plan(options, os.environ)
    if not options.ssh:  # over ssh each machine looks for itself
        checks.check_command(options.command)
    if dry_run:
        typer.echo(json.dumps(table.process_records(plan), indent=1) if as_json else table.process_table(plan))
        return 0
    if options.ssh:
        return remote.run_over_ssh(plan, ssh, export)
    if stop_with_stdin:
        remote.stop_with_stdin()
    from trilithon.launch.agent import run_node  # torch is imported here and not before

    return run_node(plan)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings=CONTEXT_SETTINGS)(run)

if __name__ == "__main__":
    app(prog_name="trilithon launch")
