"""Writes one file that DeepSpeed reads, without DeepSpeed: a file of `torch.save` that names three of its classes.

Plain data, tensors, and the stand-ins of deepspeed_pickle.py can be written; each stand-in is written under the name of
the class of DeepSpeed that it stands for. A file is complete on the disk when `write_file` returns.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trilithon.checkpoint import durable
from trilithon.checkpoint.deepspeed_pickle import DynamicLossScaler, FragmentAddress, LossScaler, Stage

LAYOUT_RELEASE = "0.19.8"
"""The release of DeepSpeed whose layout is written, and which the files name as their author's version."""

NAMES: dict[type, tuple[str, str]] = {
    LossScaler: ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    DynamicLossScaler: ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    FragmentAddress: ("deepspeed.utils.tensor_fragment", "fragment_address"),
    Stage: ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
}


class _Pickler(pickle._Pickler):  # the one in Python, whose names can be chosen
    def save_global(self, obj: Any, name: str | None = None) -> None:
        """A class or function by its name, and a stand-in by the name of what it stands for."""
        if not isinstance(obj, type) or obj not in NAMES:
            super().save_global(obj, name)  # type: ignore[misc]  # typeshed leaves it out
            return
        module, qualified = NAMES[obj]
        self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


_NAMING = ModuleType("naming")  # `torch.save` asks for something like the module `pickle`
_NAMING.Pickler = _Pickler  # type: ignore[attr-defined]


def write_file(content: Any, path: Path) -> None:
    """Save to a new file, synced. Raises CheckpointError when the disk refuses."""
    os.close(durable.create(path))
    try:
        torch.save(content, path, pickle_module=_NAMING)
        with path.open("rb+") as file:
            durable.sync(file.fileno(), path)
    except OSError as error:
        raise durable.cannot_write(path, error) from error


def loss_scaler(saved: dict[str, Any], rule: dict[str, Any]) -> LossScaler:
    """DeepSpeed's object for the loss scale, from the state that a checkpoint holds and the settings of its run."""
    if saved.get("kind") != "dynamic":
        scaler = LossScaler()
        scaler.__dict__ |= {"cur_scale": float(saved.get("scale", 1.0)), "dynamic": False}
        return scaler
    scaler = DynamicLossScaler()
    scaler.__dict__ |= {
        "cur_scale": saved["scale"],
        "dynamic": True,
        "cur_iter": saved["iteration"],
        "last_overflow_iter": saved["last_overflow"],
        "scale_factor": 2.0,
        "scale_window": rule.get("window", 1000),
        "min_scale": rule.get("min_scale", 1.0),
        "delayed_shift": rule.get("hysteresis", 2),
        "cur_hysteresis": saved["hysteresis_left"],
        "consecutive_hysteresis": rule.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": torch.float16,
    }
    return scaler
