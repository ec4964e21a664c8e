"""`deepspeed.runtime.pipe.topology`: which rank is where on named axes, as arithmetic. The last axis varies fastest."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from trilithon.config.mesh import Axes
from trilithon.errors import ConfigError


class ProcessTopology:
    """axes: names; dims: their sizes, alike long. Errors are those of `trilithon.config.mesh.Axes`, ValueErrors."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self._mesh = Axes(tuple(axes), tuple(dims))
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]

    def world_size(self) -> int:
        return self._mesh.world_size

    def get_rank(self, **coord_kwargs: int) -> int:
        return self._mesh.rank(coord_kwargs)

    def get_axis_names(self) -> list[str]:
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 for one that is not there."""
        return self._mesh.size(axis) if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        return self.ProcessCoord(**self._mesh.coordinates(rank))

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Such as "model_00", for names of files."""
        here = self._mesh.coordinates(rank)
        return outer_sep.join(f"{axis}{inner_sep}{here[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ along one axis only."""
        return [list(group) for group in self._mesh.groups(axis)] if axis in self.axes else []

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        return self._mesh.ranks_at(filter_kwargs)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        return self._mesh.ranks_at({axis: idx})


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and replicas of each."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, replicas, and slices of matrices."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


_FAMILIES = {"pipe": "pipe", "data": "data", "model": "model", "slice": "model"}  # name of methods -> axis


class PipelineParallelGrid:
    """This rank's place on a topology: get_<family>_parallel_rank() and get_<family>_parallel_world_size() for the
    families pipe, data, model and slice. Raises ConfigError when the topology has another number of ranks."""

    data_parallel_size: int

    def __init__(self, topology: ProcessTopology | None = None, process_group: object = None) -> None:
        world, self.global_rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.topology = self._topo = topology if topology is not None else PipeDataParallelTopology(1, world)
        if self._topo.world_size() != world:
            raise ConfigError(f"the topology has {self._topo.world_size()} ranks, and {world} are running.")
        self._here = here = self._topo.get_coord(self.global_rank)._asdict()
        for family, axis in _FAMILIES.items():
            setattr(self, f"{family}_parallel_size", max(self._topo.get_dim(axis), 1))
            setattr(self, f"get_{family}_parallel_world_size", partial(max, self._topo.get_dim(axis), 1))
            setattr(self, f"get_{family}_parallel_rank", partial(int, here.get(axis, 0)))
        self.stage_id, self.data_parallel_id = here.get("pipe", 0), here.get("data", 0)
        for name in ("global_rank", "stage_id", "data_parallel_id"):
            setattr(self, f"get_{name}", partial(getattr, self, name))
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == max(self._topo.get_dim("pipe"), 1) - 1

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage with this rank's other coordinates."""
        return self._topo.get_rank(**{**self._here, "pipe": stage_id, **kwargs})
