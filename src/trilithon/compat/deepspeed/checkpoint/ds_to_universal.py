"""`python -m deepspeed.checkpoint.ds_to_universal`: a checkpoint written anew, as ours, which load on any mesh.

python -m deepspeed.checkpoint.ds_to_universal --input_folder run/global_step10 --output_folder run/universal
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trilithon.checkpoint import convert
from trilithon.errors import CheckpointError


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of DeepSpeed's command; those about its workers are accepted without effect."""
    p = argparse.ArgumentParser(prog="ds_to_universal")
    p.add_argument("--input_folder", required=True, help="one checkpoint")
    p.add_argument("--output_folder", required=True, help="where the new one goes")
    for flag in ("--num_extract_workers", "--num_merge_workers"):
        p.add_argument(flag, type=int)
    for flag in ("--keep_temp_folder", "--inject_missing_state", "--no_strict"):
        p.add_argument(flag, action="store_true")
    return p.parse_args(args)


def main(args: argparse.Namespace | None = None) -> None:
    """Raises CheckpointError if the input cannot be read, or the output is there."""
    chosen = args or parse_arguments()
    source, target = Path(chosen.input_folder), Path(chosen.output_folder)
    if not source.is_dir():
        raise CheckpointError(f"--input_folder {source} does not exist. Name the folder of one checkpoint.")
    convert(source.parent, target.parent, tag=source.name, out_tag=target.name)
    (target.parent / "latest_universal").write_text(target.name)


if __name__ == "__main__":
    main()
