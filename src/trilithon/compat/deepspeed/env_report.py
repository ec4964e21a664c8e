"""`ds_report`: what runs here, in the order in which DeepSpeed reports it."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence

import torch

from trilithon import doctor
from trilithon.compat.deepspeed.resolve import NAME
from trilithon.doctor.machine import versions


def main(args: Sequence[str] | None = None) -> None:
    """Print the report."""
    p = argparse.ArgumentParser(prog="ds_report", description="Versions, and what `trilithon doctor` finds.")
    p.add_argument("--hide_operator_status", action="store_true", help="leave the list of operators out")
    p.add_argument("--hide_errors_and_warnings", action="store_true", help="versions only")
    flags = p.parse_args(args)
    if not flags.hide_operator_status:
        print("operators: none is compiled ahead; kernels are compiled on first use, with plain torch beside them")
    seen = [found.version for found in importlib.metadata.distributions(name=NAME)]
    shown = {NAME: seen[0] if seen else None, **versions(), "cuda of torch": torch.version.cuda}
    for name, version in shown.items():
        print(f"{name + ' ':.<19} {version or 'none'}")
    if not flags.hide_errors_and_warnings:
        print(doctor.as_text(doctor.examine(bandwidth=False)))


cli_main = main

if __name__ == "__main__":
    main()
