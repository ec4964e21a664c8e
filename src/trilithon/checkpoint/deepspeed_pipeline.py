"""The files of DeepSpeed's pipelines: one for each layer, and for each stage one model file and its optimizer files.

    layer_03-model_states.pt (layer_03-model_00-model_states.pt)   weights and buffers of layer 3
    mp_rank_S_model_states.pt                                      what else stage S has; no weights
    zero_pp_rank_D_mp_rank_S_optim_states.pt                       of stage S and its data-parallel rank D

Parameters are called `3.linear.weight`, after the place of their layer. A tied layer is `tied_modules.KEY.weight` in
DeepSpeed, on each stage that uses it; here it has the name of the first of its places, `0.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint.deepspeed_pickle import load_file
from trilithon.errors import CheckpointError

LAYER = re.compile(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")
_TIED = re.compile(r"^tied_modules\.([^.]+)\.(.+)$")

Layers = dict[int, Mapping[str, Tensor]]


def load_layers(files: Sequence[Path]) -> Layers:
    """The weights and buffers of each layer, under names inside of the layer."""
    found: Layers = {}
    for path in files:
        match = LAYER.match(path.name)
        assert match is not None, "the inventory holds files of layers"
        content = load_file(path)
        found[int(match[1])] = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    return found


def tied_places(layers: Layers, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
    """For each key of a tied layer, the place of the layer file that holds it: the first one whose tensors have the
    names and shapes of the key's parameters, and no parameters of their own.

    Raises CheckpointError when a key has no such file.
    """
    keys: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        if match := _TIED.match(name):
            keys.setdefault(match[1], {})[match[2]] = torch.Size(shape)
    found: dict[str, int] = {}
    for key, wanted in keys.items():
        for place in sorted(set(layers) - set(found.values())):
            tensors = layers[place]
            own = any(f"{place}.{name}" in shapes for name in tensors)
            if not own and all(name in tensors and tensors[name].shape == shape for name, shape in wanted.items()):
                found[key] = place
                break
        else:
            raise CheckpointError(
                f"no file layer_*-model_states.pt holds the tied layer {key!r} ({', '.join(wanted)}). Copy the whole "
                "folder that DeepSpeed wrote."
            )
    return found


def renamed(name: str, places: Mapping[str, int]) -> str:
    """`tied_modules.KEY.weight` -> `PLACE.weight`; other names as they are."""
    match = _TIED.match(name)
    return f"{places[match[1]]}.{match[2]}" if match and match[1] in places else name


def module_of(layers: Layers) -> dict[str, Tensor]:
    """All layers' tensors under the names of the whole model, in its order."""
    return {f"{place}.{name}": tensor for place in sorted(layers) for name, tensor in layers[place].items()}


def buffers_of(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all stages' buffers."""
    return [name for model in models for name in model.get("buffer_names") or ()]
