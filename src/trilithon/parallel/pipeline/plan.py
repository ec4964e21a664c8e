"""Which layers are on which stage, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trilithon.errors import ConfigError
from trilithon.parallel.pipeline.layers import Layer
from trilithon.parallel.pipeline.partition import cut_by_weight, weights_by_method


@dataclass(frozen=True, slots=True)
class StagePlan:
    """bounds: of the parts into which the list of layers is cut; part p is chunk p // stages of stage p % stages.

    shared: names of modules or parameters that layers of several stages use -> those stages, in order.
    """

    stages: int
    chunks: int
    stage: int
    bounds: tuple[int, ...]
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def part(self, chunk: int, stage: int | None = None) -> range:
        """The layers of one chunk."""
        index = chunk * self.stages + (self.stage if stage is None else stage)
        return range(self.bounds[index], self.bounds[index + 1])

    @property
    def kept(self) -> list[int]:
        """All layers of this stage."""
        return [index for chunk in range(self.chunks) for index in self.part(chunk)]

    def stages_of(self, parameter: str) -> tuple[int, ...]:
        """The stages that hold a parameter of this one."""
        for name, stages in self.shared.items():
            if parameter == name or parameter.startswith(f"{name}."):
                return stages
        return (self.stage,)

    @property
    def ties(self) -> list[tuple[int, ...]]:
        """The sets of stages that share something."""
        return sorted({stages for stages in self.shared.values() if len(stages) > 1})

    def table(self, layers: Sequence[Layer]) -> str:
        """One line per part: stage, chunk, layers, trainable elements."""
        lines = ["stage  chunk  layers     parameters"]
        for index in range(self.stages * self.chunks):
            chunk, stage = divmod(index, self.stages)
            part = self.part(chunk, stage)
            numel = sum(layers[i].parameters for i in part)
            lines.append(f"{stage:5}  {chunk:5}  {f'{part.start}-{part.stop - 1}':>6}  {numel:13,}")
        return "\n".join(lines)


def plan_stages(  # noqa: PLR0917 (the numbers of a plan)
    layers: Sequence[Layer], method: str | Sequence[float], stages: int, stage: int, chunks: int,
    shared: Mapping[str, Sequence[int]],
) -> StagePlan:  # fmt: skip
    """method: as PipelineModule's partition_method. shared: names -> the layers that use them.

    Raises ConfigError when there are fewer layers than parts, and for a method that does not exist.
    """
    if isinstance(method, str):
        weights = weights_by_method(method, [x.parameters for x in layers], [x.kind for x in layers])
    else:
        weights = [float(weight) for weight in method]
        if len(weights) != len(layers):
            raise ConfigError(f"partition_method has {len(weights)} weights, and there are {len(layers)} layers.")
    bounds = cut_by_weight(weights, stages * chunks)
    home = [0] * len(layers)
    for part in range(stages * chunks):
        home[bounds[part] : bounds[part + 1]] = [part % stages] * (bounds[part + 1] - bounds[part])
    found = {name: tuple(sorted({home[index] for index in users})) for name, users in shared.items()}
    return StagePlan(stages, chunks, stage, tuple(bounds), found)
