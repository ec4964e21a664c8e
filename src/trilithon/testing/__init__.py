"""Tools for tests of distributed training: bodies on several ranks, small models, and a one-process reference.

    from trilithon.testing import ranks

    @ranks(2, 4)
    def test_a_sum_over_ranks(world_size): ...

The names resolve lazily, so that importing one module of this package does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "Ending": "trilithon.testing.fork_server",
    "RankResult": "trilithon.testing.rank_results",
    "RanksError": "trilithon.testing.rank_results",
    "ranks": "trilithon.testing.ranks",
    "run_ranks": "trilithon.testing.ranks",
    "run_ranks_raw": "trilithon.testing.ranks",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from trilithon.testing.fork_server import Ending as Ending
    from trilithon.testing.rank_results import RankResult as RankResult
    from trilithon.testing.rank_results import RanksError as RanksError
    from trilithon.testing.ranks import ranks as ranks
    from trilithon.testing.ranks import run_ranks as run_ranks
    from trilithon.testing.ranks import run_ranks_raw as run_ranks_raw


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
