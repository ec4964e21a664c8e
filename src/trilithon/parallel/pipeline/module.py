"""`PipelineModule`: a model written down as a list of layers, of which each stage builds its own.

    layers = [LayerSpec(nn.Linear, 8, 32), torch.relu, LayerSpec(nn.Linear, 32, 4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.cross_entropy)

Layer i is called str(i), so its parameters have the names that they would have in `torch.nn.Sequential`; layers that
are one (TiedLayerSpec, or a module that stands in the list twice) are called by the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trilithon.errors import ConfigError, ProtocolError
from trilithon.parallel.pipeline.layers import Layer, LayerSpec, Run, TiedLayerSpec, trainable_numel
from trilithon.parallel.pipeline.plan import StagePlan, plan_stages
from trilithon.parallel.pipeline.seeds import layer_seed


class PipelineModule(nn.Module):
    """layers: modules, functions of one value, LayerSpecs and TiedLayerSpecs, in the order in which they run.

    num_stages, or topology (anything with get_dim("pipe")): of the pipeline. With it only this rank's layers are built;
    without it all of them, and `initialize` keeps those of the rank's stage. loss_fn(output, labels): the mean loss of
    a micro-batch; None if the last layer returns it. partition_method: "parameters", "uniform", "type:<regex>", or a
    weight per layer (see `layer_seconds`). seed_layers: layer i is built after seed_fn(base_seed + i), by default
    torch.manual_seed; otherwise its seed follows from one draw and i. Either way values do not depend on the stages.
    activation_checkpoint_interval: so many layers together are computed again in backward, by
    activation_checkpoint_func(function, x) if given; 0 for none. checkpointable_layers: names of the classes that may
    be; None for all. dynamic_shape: shapes between stages depend on values, so each message is preceded by its shape.
    """

    def __init__(  # noqa: PLR0917 (the names and their order are those of DeepSpeed's class)
        self, layers: Iterable[Any], num_stages: int | None = None, topology: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None, seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None, base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters", activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None, dynamic_shape: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._entries = list(layers)
        self.loss_fn, self.partition_method, self.dynamic_shape = loss_fn, partition_method, dynamic_shape
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = None if checkpointable_layers is None else tuple(checkpointable_layers)
        self._seed_layers, self._seed_fn, self._base_seed = seed_layers, seed_fn, base_seed
        self._draw = int(torch.randint(2**62, ()))
        self._holders = self._find_holders()
        self.num_stages = _stages_asked(num_stages, topology)
        self._plan: StagePlan | None = None
        if self.num_stages == 1:
            self.keep(range(len(self._entries)))
        else:
            self.cut(self.num_stages, _stage_here(self.num_stages))

    def _find_holders(self) -> list[int]:
        """For each entry the first one with the same module."""
        if not self._entries:
            raise ConfigError("PipelineModule got an empty list of layers.")
        first: dict[object, int] = {}
        found = []
        for index, entry in enumerate(self._entries):
            if not callable(entry) and not isinstance(entry, LayerSpec):
                raise ConfigError(
                    f"layer {index} is a {type(entry).__name__}; the list takes modules, functions, LayerSpec and "
                    "TiedLayerSpec."
                )
            key: object = index
            if isinstance(entry, TiedLayerSpec):
                key = ("tied", entry.key)
                made = self._entries[first.setdefault(key, index)]
                if made.typename is not entry.typename:
                    raise ConfigError(
                        f"layers {first[key]} and {index} have the key {entry.key!r} and different classes "
                        f"({made.typename.__name__}, {entry.typename.__name__}); tied layers are one module."
                    )
            elif isinstance(entry, nn.Module):
                key = id(entry)
            found.append(first.setdefault(key, index))
        return found

    # ---------------------------------------------------------------------------------------------------- the cut
    @property
    def plan(self) -> StagePlan | None:
        """How the model was cut when it was made; None if it is whole."""
        return self._plan

    def cut(self, stages: int, stage: int, chunks: int = 1) -> StagePlan:
        """Leave this rank the layers of one stage. Pure on every rank alike; a second cut must be the same."""
        if self._plan is not None:
            if (self._plan.stages, self._plan.chunks, self._plan.stage) != (stages, chunks, stage):
                raise ConfigError(
                    f"this model was made for stage {self._plan.stage} of {self._plan.stages} with one chunk of layers "
                    f"each, and is to become stage {stage} of {stages} with {chunks}. Leave num_stages out of "
                    "PipelineModule, and initialize() cuts the model as the mesh says."
                )
            return self._plan
        self._plan = plan_stages(self.pipeline_layers(), self.partition_method, stages, stage, chunks, self.shared())
        self.keep(self._plan.kept)
        return self._plan

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Modules that several layers use: name -> those layers."""
        users: dict[int, list[int]] = {}
        for index, holder in enumerate(self._holders):
            users.setdefault(holder, []).append(index)
        return {str(holder): tuple(found) for holder, found in users.items() if len(found) > 1}

    def keep(self, kept: Collection[int]) -> None:
        """Build what these layers need, and let go of the other modules."""
        wanted = {self._holders[index] for index in kept}
        for holder in dict.fromkeys(self._holders):
            if holder not in wanted:
                self._modules.pop(str(holder), None)
            elif str(holder) not in self._modules:
                entry = self._entries[holder]
                if isinstance(entry, LayerSpec):
                    self.add_module(str(holder), self._built(holder, entry))
                elif isinstance(entry, nn.Module):
                    self.add_module(str(holder), entry)

    def _built(self, index: int, spec: LayerSpec) -> nn.Module:
        with torch.random.fork_rng(enabled=not self._seed_layers):
            if self._seed_layers:
                (self._seed_fn or torch.manual_seed)(self._base_seed + index)
            else:
                torch.manual_seed(layer_seed(self._draw, 0, index))
            return spec.build()

    # ----------------------------------------------------------------------------------------------- as a model
    def pipeline_layers(self) -> list[Layer]:
        return [self._layer(index, entry) for index, entry in enumerate(self._entries)]

    def _layer(self, index: int, entry: Any) -> Layer:
        holder = self._holders[index]
        if not isinstance(entry, LayerSpec | nn.Module):
            return Layer(entry, (), getattr(entry, "__name__", type(entry).__name__))
        kind = entry.typename.__name__ if isinstance(entry, LayerSpec) else type(entry).__name__
        return Layer(self._run(holder, entry), (str(holder),), kind, self._numel(holder))

    def _run(self, holder: int, entry: Any) -> Run:
        forward_fn = entry.forward_fn if isinstance(entry, TiedLayerSpec) else None

        def run(x: Any) -> Any:  # the module is looked up at each call: it may be on another stage
            module = self._module(holder)
            return module(x) if forward_fn is None else forward_fn(module, x)

        return run

    def _module(self, holder: int) -> nn.Module:
        module = self._modules.get(str(holder))
        if module is None:
            raise ProtocolError(
                f"layer {holder} is on another stage of the pipeline. Train with engine.train_step(batches) and "
                "evaluate with engine.eval_step(batches), which run all stages."
            )
        return module

    def _numel(self, holder: int) -> int:
        """Trainable elements of a layer, which need not be built for that."""
        here, entry = self._modules.get(str(holder)), self._entries[holder]
        if here is not None or not isinstance(entry, LayerSpec):
            return trainable_numel(here if here is not None else entry)
        with torch.random.fork_rng():
            try:
                with torch.device("meta"):
                    return trainable_numel(entry.build())
            except NotImplementedError:  # a constructor that looks at values
                return trainable_numel(entry.build())

    def pipeline_loss(self, output: Any, labels: Any) -> Tensor:
        loss = output if self.loss_fn is None else self.loss_fn(output, labels)
        if not isinstance(loss, Tensor):
            raise ProtocolError(f"the loss of a pipeline is a tensor of one element; got a {type(loss).__name__}.")
        return loss

    def forward(self, x: Any) -> Any:
        """All layers one after the other, in a process that has them all."""
        for layer in self.pipeline_layers():
            x = layer.run(x)
        return x


def _stages_asked(num_stages: int | None, topology: Any) -> int:
    if topology is not None:
        of_topology = int(topology.get_dim("pipe"))
        if num_stages is not None and num_stages != of_topology:
            raise ConfigError(f"num_stages={num_stages}, and the topology has {of_topology} stages; give one of them.")
        return max(of_topology, 1)
    if num_stages is not None and num_stages < 1:
        raise ConfigError(f"num_stages={num_stages}: a pipeline has at least one stage.")
    return num_stages or 1


def _stage_here(stages: int) -> int:
    """The stages of a pipeline are the outermost axis of the mesh, so the rank and the world say which is here."""
    rank, world_size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % stages:
        raise ConfigError(
            f"num_stages={stages} does not divide {world_size} ranks. Start a multiple of {stages} ranks, or leave "
            "num_stages out."
        )
    return rank // (world_size // stages)
