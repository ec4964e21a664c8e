"""`DeepSpeedEngine`: DeepSpeed's way of calling an engine of ours, `engine.native`.

Counting is DeepSpeed's: `step()` is called after every micro-batch (or at boundaries only, with the boundary set by
hand), `micro_steps` decides where an update is due, and a step that is left out still counts as a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trilithon.compat.deepspeed.comm import get_local_rank, get_rank, get_world_size
from trilithon.compat.deepspeed.monitor.monitor import MonitorMaster
from trilithon.compat.deepspeed.resolve import MissingNameError, instead_of
from trilithon.compat.deepspeed.runtime import base_optimizer as views
from trilithon.compat.deepspeed.runtime.config import DeepSpeedConfig
from trilithon.compat.deepspeed.runtime.engine_checkpoints import Checkpoints
from trilithon.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, release
from trilithon.data import EpochLoader
from trilithon.engine.engine import Engine
from trilithon.errors import ProtocolError

_INSTEAD = instead_of("runtime.engine.DeepSpeedEngine")
_BACKWARD = {"0.19": ("retain_graph", "scale_wrt_gas"), "0.16": ("release_loss", "retain_graph", "scale_wrt_gas")}


class DeepSpeedEngine(Checkpoints, nn.Module):
    """Made by `initialize`. Attributes that it does not have are those of the module."""

    def __init__(
        self, native: Engine, config: DeepSpeedConfig, *, basic_optimizer: torch.optim.Optimizer | None = None,
        client_optimizer: Any = None, lr_scheduler: Any = None, training_data: Any = None,
        collate_fn: Callable[[Any], Any] | None = None, mpu: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self.training = native.module, native.module.training
        self.native, self._config, self.config, self.mpu = native, config, config.raw, mpu
        self.device = native.device
        self.basic_optimizer, self.client_optimizer, self.lr_scheduler = basic_optimizer, client_optimizer, lr_scheduler
        self.optimizer: Any = self._wrapped(basic_optimizer)
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.overflowed = self.inside_no_sync_ctxt = self._applied = False
        self._boundary: bool | None = None
        self._accumulation, self._micro_size = config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu
        self.global_rank, self.local_rank, self.world_size = get_rank(), get_local_rank(), get_world_size()
        self.dp_world_size = self.seq_dp_world_size = native.mesh.data_size
        self.mp_world_size = native.mesh.axes.size("tensor")
        self.enable_backward_allreduce, self.is_compiled = True, False
        self.monitor = MonitorMaster(config)
        self.collate_fn, self.training_data = collate_fn, training_data
        self.training_dataloader: Any = self.deepspeed_io(training_data) if training_data is not None else None

    def _wrapped(self, optimizer: torch.optim.Optimizer | None) -> Any:
        """Stage 0 in fp32 shows the torch optimizer itself; stage 3 without one, what its parameters are kept by."""
        stage, native = self._config.zero_optimization_stage, self._config.native
        if optimizer is None:
            return DeepSpeedZeRoOffload(self.module) if stage == 3 else None
        if (stage, native.precision.kind) == (0, "fp32"):
            return optimizer
        if (stage, native.precision.kind, native.zero.accumulate_dtype) == (1, "bf16", "fp32"):
            return views.BF16_Optimizer(self, optimizer)
        return views.OF_STAGE[stage](self, optimizer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if name in _INSTEAD:
                raise MissingNameError(f"DeepSpeedEngine.{name} does not exist here. {_INSTEAD[name]}") from None
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.native(*args, **kwargs)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        self.training = mode
        self.native.train(mode)

    def eval(self) -> None:  # type: ignore[override]
        self.train(False)

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:  # fmt: skip
        if schedule is not None or compiled_autograd_enabled:
            raise ProtocolError("engine.compile() compiles the module: no schedule, no compiled_autograd_enabled.")
        self.module.compile(backend=backend, **dict(compile_kwargs or {}))
        self.is_compiled = True

    def backward(self, loss: Tensor, *flags: Any, **named: Any) -> Tensor:
        """Backward of one micro-batch; returns its loss over the accumulation steps, without gradient.

        Flags in the order of the release in force: 0.19 retain_graph, scale_wrt_gas; 0.16 release_loss before them.
        scale_wrt_gas=False: the loss was divided already.
        """
        order = _BACKWARD[self._config.release]
        options = {"retain_graph": False, "scale_wrt_gas": True, **dict(zip(order, flags)), **named}
        if len(flags) > len(order) or not options.keys() <= set(_BACKWARD["0.16"]):
            raise TypeError(f"backward() takes {', '.join(order)} beside the loss; got {flags} and {named}.")
        assert self.basic_optimizer is not None, "must provide optimizer during init in order to use backward"
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise AssertionError(f"loss must be a scalar tensor; got {got}. Reduce it: loss.mean().")
        share = 1.0 / self._accumulation if options["scale_wrt_gas"] else 1.0
        self.native.boundary = self.is_gradient_accumulation_boundary() and self._config.managed_gradient_accumulation
        self.native.backward(loss, retain_graph=options["retain_graph"], share=share)
        reduces = self.enable_backward_allreduce and not self.inside_no_sync_ctxt
        value = loss.detach()
        if self._config.release == "0.16":
            return value.float() * share if reduces else value
        return value / self._accumulation if options["scale_wrt_gas"] else value

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After every micro-batch: at a boundary parameters, rates and `global_steps` move."""
        assert not self.inside_no_sync_ctxt, "It is illegal to call Engine.step() inside no_sync context manager"
        assert self.basic_optimizer is not None, "must provide optimizer during init in order to use step"
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self.native.boundary = True
            self.count_step(self.native.step(), micro_steps=1, lr_kwargs=lr_kwargs)
        else:
            self.micro_steps += 1

    def count_step(self, applied: bool, micro_steps: int, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After a boundary: the scheduler moves if parameters did, and counters do in any case."""
        self._applied, self.overflowed = applied, not applied
        self.skipped_steps += self.overflowed
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._tell()
        self.micro_steps += micro_steps

    def _tell(self) -> None:
        """The events that DeepSpeed writes at a boundary, beside what our engine records under its own names."""
        if self.monitor.enabled and self.basic_optimizer is not None:
            events = [("Train/Samples/lr", self.get_lr()[0], self.global_samples)]
            if self.fp16_enabled():
                events.append(("Train/Samples/loss_scale", self.native.loss_scale, self.global_samples))
            self.monitor.write_events(events)

    def is_gradient_accumulation_boundary(self) -> bool:
        if self._boundary is not None:
            return self._boundary
        managed = self._config.managed_gradient_accumulation
        return not managed or (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on it is, or is not, whatever has been counted."""
        self._boundary = bool(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not reduced. Raises AssertionError at stages 2 and 3, where our own one works too."""
        stage = self._config.zero_optimization_stage
        assert stage < 2, (
            f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}; "
            "engine.native.no_sync() works at every stage, for the memory of whole gradients"
        )
        assert not self.inside_no_sync_ctxt, "no_sync context manager reentry is unsupported"
        self.inside_no_sync_ctxt = True
        try:
            with self.native.no_sync():
                yield
        finally:
            self.inside_no_sync_ctxt = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients of an open accumulation are dropped; at stage 2 they stay, as in DeepSpeed."""
        if self.basic_optimizer is not None and self._config.zero_optimization_stage != 2:
            self.native.drop_gradients()

    def get_global_grad_norm(self) -> Tensor | None:
        """[] of the last boundary, before clipping; None before there was one."""
        norm, dtype = self.native.grad_norm, torch.float64 if self.zero_optimization_stage() == 3 else torch.float32
        return torch.tensor(norm, dtype=dtype, device=self.device) if norm is not None else None

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
        data_sampler: Any = None, collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> EpochLoader:  # fmt: skip
        """A loader of this data-parallel rank's part of `dataset`, in another order at each pass unless `data_sampler`
        is given. num_local_io_workers: None for two with a GPU, else none."""
        (rank, ranks), gpu = self.native.mesh.part("data"), torch.cuda.is_available()
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=route == "train")
        return EpochLoader(
            dataset, batch_size or self._micro_size, sampler=data_sampler, collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers if num_local_io_workers is not None else 2 if gpu else 0,
            pin_memory=pin_memory and gpu, drop_last=self.dataloader_drop_last(),
        )  # fmt: skip

    @property
    def data_parallel_group(self) -> Any:
        """The process group of all ranks; None on a mesh with further axes, or alone."""
        return dist.group.WORLD if self.world_size == self.dp_world_size and dist.is_initialized() else None

    seq_data_parallel_group = data_parallel_group
    has_moe_layers = property(lambda self: bool(self.native.expert_groups))

    def empty_partition_cache(self) -> None:
        """What was gathered is freed after its use."""

    def destroy(self, *, give_back: bool | None = None) -> None:
        release(self.native)
        self.native.close(give_back=give_back)
