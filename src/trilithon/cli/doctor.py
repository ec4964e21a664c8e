"""`trilithon doctor [--json] [--no-bandwidth]`: what this machine offers for training, and what is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer


def run(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth/--no-bandwidth", help="Measure memory, two ranks and the disk.")
    ] = True,
) -> None:
    """Report versions, devices, memory and bandwidth; exits with 1 only if training is impossible here."""
    from trilithon import doctor

    report = doctor.examine(bandwidth=bandwidth)
    typer.echo(doctor.as_json(report) if as_json else doctor.as_text(report))
    raise typer.Exit(0 if report.can_train else 1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(run)

if __name__ == "__main__":
    app(prog_name="trilithon doctor")
