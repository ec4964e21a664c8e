"""ZeRO: each rank holds 1/N of the optimizer state (stage 1), of the gradients (2) and of the parameters (3).

Two contexts, `one_unit` and `tile` are for users, the rest is for the engine.

    with trilithon.zero.init():                 # optional: build a model larger than one rank's memory
        model = GPT(config)
    with trilithon.zero.gathered(model.head.weight, modify=0):
        ...                                     # whole values, on every rank
    trilithon.zero.tile(model, above_numel=2**24)   # optional: linear layers larger than the memory for one layer
"""

from __future__ import annotations

from trilithon.zero.composite import RankPlacement, Replicas
from trilithon.zero.gather import gathered
from trilithon.zero.init import init
from trilithon.zero.one_unit import is_one_unit, one_unit
from trilithon.zero.own_slice import OwnSlice, is_cut, is_held, own_slice
from trilithon.zero.sharded_parameter import shapes_only
from trilithon.zero.sharding import Communicators, Precisions, ZeroSharding
from trilithon.zero.tiling import TiledLinear, tile, untile
from trilithon.zero.unaware import allow_unaware

__all__ = [
    "Communicators",
    "OwnSlice",
    "Precisions",
    "RankPlacement",
    "Replicas",
    "TiledLinear",
    "ZeroSharding",
    "allow_unaware",
    "gathered",
    "init",
    "is_cut",
    "is_held",
    "is_one_unit",
    "one_unit",
    "own_slice",
    "shapes_only",
    "tile",
    "untile",
]
