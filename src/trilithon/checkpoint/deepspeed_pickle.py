"""Reads one file that DeepSpeed wrote with `torch.save`, and runs nothing that is in it.

Such a file is a pickle, which can name any function and call it. Here only torch's own list of harmless names is
allowed, and four classes of DeepSpeed, for which classes of this file stand that hold values and do nothing. Any other
name is refused, with the name and the file, before one instruction of the pickle is carried out.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from trilithon.errors import CheckpointError


class LossScaler:
    """Holds the attributes of DeepSpeed's loss scalers, as they were: cur_scale, cur_iter, ..."""


class DynamicLossScaler(LossScaler):
    """The one that moves."""


class FragmentAddress:
    """Where a parameter's part lies in a rank's flat tensor."""

    numel: int
    start: int


class Stage(int):
    """The number of a ZeRO stage; an enumeration in DeepSpeed."""

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return Stage, (int(self),)


STAND_INS: dict[str, type] = {
    "LossScaler": LossScaler,
    "DynamicLossScaler": DynamicLossScaler,
    "fragment_address": FragmentAddress,
    "ZeroStageEnum": Stage,
}
"""By the last part of the name: releases of DeepSpeed keep these classes in different modules."""
PLAIN = {"argparse.Namespace": argparse.Namespace}
"""Of the standard library: what programs keep beside their weights, and what holds values only."""


def load_file(path: Path) -> Any:
    """What the file holds, with stand-ins in it. Tensors stay on the disk until their values are read.

    Raises CheckpointError when the file is missing, cut short, or names anything that is not on the list.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing. Copy the whole folder that DeepSpeed wrote, files of all ranks included."
        )
    try:
        allowed = _stand_ins(path)
        with safe_globals(allowed):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, str(error))) from error
    except (RuntimeError, ValueError, EOFError, OSError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save ({str(error).splitlines()[0] if str(error) else error!r}): "
            "it was cut short, damaged, or is another kind of file. Copy it again, or use another checkpoint."
        ) from error


def _stand_ins(path: Path) -> list[tuple[type, str]]:
    """What stands for the classes of DeepSpeed that the file names. Raises CheckpointError for every other name."""
    found, refused = [], []
    for name in sorted(get_unsafe_globals_in_checkpoint(path)):
        stand_in = STAND_INS.get(name.rpartition(".")[2]) if name.startswith("deepspeed.") else PLAIN.get(name)
        if stand_in is None:
            refused.append(name)
        else:
            found.append((stand_in, name))
    if refused:
        raise CheckpointError(_refusal(path, ", ".join(refused)))
    return found


def _refusal(path: Path, what: str) -> str:
    named = re.search(r"GLOBAL ([\w.]+)", what)
    return (
        f"{path} asks for {named[1] if named else what.splitlines()[0]}, which is not plain data: loading it could run "
        "any program, so nothing of the file was loaded. If it comes from a client_state of your own, save that as "
        "numbers, text, lists, dictionaries and tensors; if you do not know where it comes from, do not open the file."
    )


def plain(value: Any) -> Any:
    """The same with ordinary data in place of stand-ins; tensors as they are."""
    if isinstance(value, LossScaler | FragmentAddress):
        return plain(vars(value))
    if isinstance(value, Stage):
        return int(value)
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value
