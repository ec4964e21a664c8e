"""`deepspeed.pipe.PipelineModule` and its specs, on `trilithon.PipelineModule`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

import trilithon
from trilithon.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from trilithon.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from trilithon.errors import ConfigError


class PipelineError(RuntimeError):
    """A call that a pipelined engine does not have: it trains with train_batch and evaluates with eval_batch."""


class NotALayerError(ConfigError, RuntimeError):
    """A layer, or a pipeline, was asked for in a way that cannot be built."""


class LayerSpec(trilithon.LayerSpec):
    """A layer that is built where it is needed. Raises RuntimeError for what is no class of torch.nn.Module."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        _require_class(typename)
        super().__init__(typename, *module_args, **module_kwargs)


class TiedLayerSpec(trilithon.TiedLayerSpec):
    """A layer whose module is that of every other one with the same key. Raises RuntimeError as `LayerSpec`."""

    def __init__(
        self, key: str, typename: type[nn.Module], *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None, tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:  # fmt: skip
        _require_class(typename)
        super().__init__(
            key, typename, *module_args, forward_fn=forward_fn, tied_weight_attr=tied_weight_attr, **module_kwargs
        )


def _require_class(typename: object) -> None:
    if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
        raise NotALayerError(f"LayerSpec takes a class of torch.nn.Module; got {typename!r}.")


class PipelineModule(trilithon.PipelineModule):
    """As `trilithon.PipelineModule`, which has to be told the stages here: num_stages or topology (else RuntimeError).

    partition_method "profile" raises NotImplementedError; give a weight per layer instead.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None, seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None, base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters", activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None, dynamic_shape: bool = False,
    ) -> None:  # fmt: skip
        if num_stages is None and topology is None:
            raise NotALayerError("must provide num_stages or topology")
        if isinstance(partition_method, str) and partition_method.lower() == "profile":
            way = "give a list with a weight for each layer, as trilithon.parallel.pipeline.layer_seconds measures."
            raise NotImplementedError(f'partition_method="profile": {way}')
        super().__init__(
            layers, num_stages, topology, loss_fn, seed_layers, seed_fn, base_seed, partition_method,
            activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers, dynamic_shape,
        )  # fmt: skip
        world = PipelineParallelGrid().data_parallel_size
        stages = self.num_stages
        self._topo = topology if topology is not None else PipeDataParallelTopology(stages, world // stages)

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        return PipelineParallelGrid(self._topo)

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def find_layer_type(self, layername: str) -> list[int]:
        """Places of the layers whose class is called so, as a regular expression without regard to case. Raises
        RuntimeError if there are none."""
        pattern = re.compile(layername, re.IGNORECASE)
        found = [index for index, layer in enumerate(self.pipeline_layers()) if pattern.search(layer.kind)]
        if not found:
            raise NotALayerError(f"no layer is called {layername}.")
        return found


__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
