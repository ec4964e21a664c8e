"""Tools for tests of distributed training: bodies on several ranks, small models, and a one-process reference.

    from trilithon.testing import ranks

    @ranks(2, 4)
    def test_a_sum_over_ranks(world_size): ...

`trilithon.testing.models` holds the models and `trilithon.testing.parity` the reference.
"""

from __future__ import annotations

from trilithon.testing.fork_server import Ending
from trilithon.testing.rank_results import RankResult, RanksError
from trilithon.testing.ranks import ranks, run_ranks, run_ranks_raw

__all__ = ["Ending", "RankResult", "RanksError", "ranks", "run_ranks", "run_ranks_raw"]
