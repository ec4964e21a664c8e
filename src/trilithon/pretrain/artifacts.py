"""The files of a finished run: weights, shape and tokenizer, enough to use the model without the run.

model, tokenizer = load_model(Path("runs/first"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from trilithon.data import Tokenizer, load_tokenizer
from trilithon.errors import CheckpointError
from trilithon.models import GPT, GPTConfig
from trilithon.pretrain.start import SHAPE, TOKENIZER, WEIGHTS


def save_model(folder: Path, weights: Mapping[str, Tensor], shape: GPTConfig, tokenizer: Tokenizer) -> None:
    """Write the three files, each under its name only when complete; the weights last.

    Raises CheckpointError when they cannot be written; what was there before is then untouched.
    """
    write_whole(folder / SHAPE, lambda stream: stream.write(shape.model_dump_json(indent=1).encode()))
    write_whole(folder / TOKENIZER, lambda stream: stream.write(tokenizer.to_json().encode()))
    write_whole(folder / WEIGHTS, lambda stream: torch.save(dict(weights), stream))


def with_tied_names(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """weights: by the first name of each parameter -> by every name, as `load_state_dict` wants them."""
    first = {id(param): name for name, param in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: weights[first[id(param)]] for name, param in named}


def load_model(folder: Path) -> tuple[GPT, Tokenizer]:
    """The trained model on the CPU and its tokenizer. Raises CheckpointError or DataError when a file does not fit."""
    try:
        shape = GPTConfig.model_validate_json((folder / SHAPE).read_text(encoding="utf-8"))
        model = GPT(shape)
        model.load_state_dict(torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True))
    except (OSError, ValidationError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} holds no model that can be loaded: {error}. Give the folder of a finished run."
        ) from error
    return model, load_tokenizer(folder / TOKENIZER)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name and rename it. Raises CheckpointError, leaving nothing half-written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(
            f"{path} cannot be written ({error}). Free some space or give another folder with --out."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
