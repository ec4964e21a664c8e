"""`deepspeed.pipe.PipelineModule` and its specs, on `trilithon.PipelineModule`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except ConfigError as error:
            raise NotALayerError(str(error)) from None


class TiedLayerSpec(LayerSpec, trilithon.TiedLayerSpec):
    """A layer whose module is that of every other one with the same key. Raises RuntimeError as `LayerSpec`."""


class PipelineModule(trilithon.PipelineModule):
    """As `trilithon.PipelineModule`, which has to be told the stages here: num_stages or topology (else RuntimeError).

    partition_method "profile" raises NotImplementedError; give a weight per layer instead.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: ProcessTopology | None = None,
        *args: Any, **settings: Any,
    ) -> None:  # fmt: skip
        if num_stages is None and topology is None:
            raise NotALayerError("must provide num_stages or topology")
        if str(settings.get("partition_method")).lower() == "profile":
            way = "give a list with a weight for each layer, as trilithon.parallel.pipeline.layer_seconds measures."
            raise NotImplementedError(f'partition_method="profile": {way}')
        super().__init__(layers, num_stages, topology, *args, **settings)
        self.activation_checkpoint_func = self.activation_checkpoint_func or checkpointing.checkpoint
        replicas = PipelineParallelGrid().data_parallel_size // self.num_stages
        self._topo = topology if topology is not None else PipeDataParallelTopology(self.num_stages, replicas)

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        return PipelineParallelGrid(self._topo)

    def num_pipeline_stages(self) -> int:
        return self.num_stages
