"""`python -m deepspeed.launcher.launch`: one machine's processes, for programs that call DeepSpeed's launcher there."""

from __future__ import annotations

from collections.abc import Sequence

from trilithon.compat.deepspeed.launcher.runner import become
from trilithon.launch.deepspeed import node_arguments, parse_node_args


def main(args: Sequence[str] | None = None) -> None:
    """Never returns: the process becomes `trilithon launch`."""
    become(lambda: node_arguments(parse_node_args(args)))


if __name__ == "__main__":
    main()
