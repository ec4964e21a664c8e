"""`python -m deepspeed.launcher.launch`: one machine's processes, for programs that call DeepSpeed's launcher there."""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Sequence

from trilithon.compat.deepspeed.stand_in import environment
from trilithon.errors import ConfigError


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """world_info: machine -> slots as `runner.encode_world_info` writes it."""
    p = argparse.ArgumentParser(prog="deepspeed.launcher.launch")
    p.add_argument("--node_rank", type=int, default=0)
    p.add_argument("--master_addr", default="127.0.0.1")
    p.add_argument("--master_port", type=int, default=29500)
    p.add_argument("--world_info", default="None")
    p.add_argument("--module", action="store_true")
    p.add_argument("--no_python", action="store_true")
    p.add_argument("--no_local_rank", action="store_true")
    p.add_argument("training_script")
    p.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return p.parse_args(args)


def native_words(args: argparse.Namespace) -> tuple[list[str], list[int]]:
    """(the words after `trilithon launch`, the slots of this machine). Raises ConfigError for a wrong world_info."""
    if args.world_info in ("None", ""):
        raise ConfigError("--world_info is missing: it says which slots each machine has.")
    world: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(args.world_info))
    if not 0 <= args.node_rank < len(world):
        raise ConfigError(f"--node_rank {args.node_rank} does not fit {len(world)} machines.")
    slots = list(world.values())[args.node_rank]
    words = ["--deepspeed", "--nproc", str(len(slots)), "--num-nodes", str(len(world))]
    words += ["--node-rank", str(args.node_rank), "--master-addr", args.master_addr]
    words += ["--master-port", str(args.master_port)]
    words += ["--module"] * args.module + ["--no-python"] * args.no_python + ["--local-rank"] * (not args.no_local_rank)
    return [*words, args.training_script, *args.training_script_args], slots


def main(args: Sequence[str] | None = None) -> None:
    """Never returns: the process becomes `trilithon launch`."""
    try:
        words, slots = native_words(parse_args(args))
    except ConfigError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(2)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}
    run = [sys.executable, "-m", "trilithon.cli.launch", *words]
    os.execve(sys.executable, run, {**os.environ, **environment(), **visible})


if __name__ == "__main__":
    main()
