"""What is measured: each system writes and reads the Adam state of one model, cut over the ranks.

Runs in the rank's own process; a system imports what it needs itself. `payload_bytes` is 12 bytes a parameter over all
ranks (fp32 values and two moments), the same for every system, so that rates compare work done and not file sizes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_WIDTH = 1024
_CHUNK_BYTES = 16 * 2**20
_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

Wait = Callable[[], None]


class System(Protocol):
    """One way to write and read the state of all ranks. Every call is collective and returns when its part is done."""

    def save(self, folder: Path) -> None:
        """Returns when everything is on the disk."""
        ...

    def load(self, folder: Path) -> None: ...

    def save_async(self, folder: Path) -> Wait | None:
        """Returns when training may go on; what it returns blocks until everything is written. None: not offered."""
        ...


def num_layers(num_parameters: int) -> int:
    """Square layers that come nearest to a number of parameters, at least one."""
    return max(round(num_parameters / _WIDTH**2), 1)


def build(layers: int, width: int = _WIDTH) -> nn.Module:
    """Square layers without bias: as few tensors as possible for their bytes, which is what all systems like best."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _loss(model: Callable[..., Tensor]) -> Tensor:
    return model(torch.ones(1, _WIDTH)).square().mean()


class Raw:
    """The machine: as many bytes, written and read in a row by every rank at once, and synced."""

    def __init__(self, rank: int, world_size: int, layers: int) -> None:
        self._path = f"raw-{rank}.bin"
        self._bytes = 12 * layers * _WIDTH**2 // world_size
        self._buffer = torch.randint(256, (_CHUNK_BYTES,), dtype=torch.uint8).numpy()

    def save(self, folder: Path) -> None:
        with open(folder / self._path, "wb", buffering=0) as stream:
            for start in range(0, self._bytes, _CHUNK_BYTES):
                stream.write(self._buffer[: min(_CHUNK_BYTES, self._bytes - start)])
            os.fsync(stream.fileno())

    def load(self, folder: Path) -> None:
        with open(folder / self._path, "rb", buffering=0) as stream:
            while stream.readinto(self._buffer):
                continue

    def save_async(self, folder: Path) -> None:
        return None


class Trilithon:
    """engine.save and engine.load."""

    def __init__(self, rank: int, world_size: int, layers: int, stage: int = 3) -> None:
        from trilithon import initialize

        config = {"zero": {"stage": stage}, "optimizer": {"kind": "adamw", **_ADAMW}}
        self._engine: Any = initialize(build(layers), config)
        self._engine.backward(_loss(self._engine))
        self._engine.step()

    def save(self, folder: Path) -> None:
        self._engine.save(folder, tag="benchmark")

    def load(self, folder: Path) -> None:
        self._engine.load(folder, tag="benchmark")

    def save_async(self, folder: Path) -> Wait:
        self._engine.save(folder, tag="benchmark", blocking=False)
        return self._engine.finish_saving


class Fsdp2:
    """torch.distributed.checkpoint of a model under fully_shard and its optimizer."""

    def __init__(self, rank: int, world_size: int, layers: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size,))
        self._model = build(layers)
        for layer in self._model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **_ADAMW)
        _loss(self._model).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def save_async(self, folder: Path) -> Wait:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(self._state(), checkpoint_id=folder)
        return future.result


class TorchSave:
    """torch.save of every rank's own part to a file of its own, and fsync; no resharding, no manifest."""

    def __init__(self, rank: int, world_size: int, layers: int) -> None:
        self._path = f"part-{rank}.pt"
        own = layers * _WIDTH**2 // world_size
        self._state = {
            "step": torch.tensor(1.0),
            **{name: torch.randn(own) for name in ("param", "exp_avg", "exp_avg_sq")},
        }

    def save(self, folder: Path) -> None:
        with open(folder / self._path, "wb") as stream:
            torch.save(self._state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def load(self, folder: Path) -> None:
        for name, value in torch.load(folder / self._path, weights_only=True).items():
            self._state[name].copy_(value)

    def save_async(self, folder: Path) -> None:
        return None


class DeepSpeed:
    """save_checkpoint and load_checkpoint at the same stage, where DeepSpeed is installed."""

    def __init__(self, rank: int, world_size: int, layers: int, stage: int = 3) -> None:
        ds: Any = importlib.import_module("deepspeed")
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in _ADAMW.items()}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": settings},
        }
        model = build(layers)
        self._engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._engine.backward(_loss(self._engine))
        self._engine.step()

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="benchmark")
        for path in folder.rglob("*"):  # it does not sync by itself
            if path.is_file():
                with open(path, "rb") as stream:
                    os.fsync(stream.fileno())

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag="benchmark")

    def save_async(self, folder: Path) -> None:
        return None


MAKERS: dict[str, Callable[[int, int, int], System]] = {
    "raw": Raw,
    "trilithon": Trilithon,
    "dcp-fsdp2": Fsdp2,
    "torch.save": TorchSave,
    "deepspeed": DeepSpeed,
}
