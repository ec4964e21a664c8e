"""Two ways to train one model, step by step: which tensor differs first, by how much, and is it rounding?

    outcome = compare("plain", "zero3.json", Path("script.py"), steps=3, nproc=2)
    print(as_text(outcome))

A side is a configuration file or the word `plain`: one process of ordinary PyTorch that takes the batches of all ranks.
What rounding alone may do is measured, not guessed: see `difference`.
"""

from __future__ import annotations

from trilithon.compare.difference import Difference, Outcome
from trilithon.compare.report import as_json, as_text
from trilithon.compare.run import compare

__all__ = ["Difference", "Outcome", "as_json", "as_text", "compare"]
