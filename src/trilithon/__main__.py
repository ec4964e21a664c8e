"""`python -m trilithon`: the command line, also as the module that torchrun starts."""

from __future__ import annotations

from trilithon.cli.main import main

if __name__ == "__main__":
    main()
