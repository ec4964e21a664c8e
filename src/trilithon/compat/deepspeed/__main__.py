"""`python -m trilithon.compat.deepspeed script.py arguments...`: a program written for DeepSpeed, run by trilithon.

`-m module` runs a module. The program and whatever it starts find the module `deepspeed` and its metadata; nothing is
installed. The process becomes Python running the program, as if it had been started so.
"""

from __future__ import annotations

import os
import sys

from trilithon.compat.deepspeed.stand_in import environment

USAGE = "usage: python -m trilithon.compat.deepspeed [-m MODULE | SCRIPT] ARGUMENTS..."


def main(arguments: list[str]) -> None:
    """Never returns: the process is replaced."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr if not arguments else sys.stdout)
        sys.exit(0 if arguments else 2)
    if not arguments[0].startswith("-") and not os.path.exists(arguments[0]):
        print(f"script {arguments[0]} does not exist.", file=sys.stderr)
        sys.exit(2)
    own = sys.orig_argv
    flags = own[1 : own.index("-m")] if "-m" in own else []
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *flags, *arguments], {**os.environ, **environment()})


if __name__ == "__main__":
    main(sys.argv[1:])
