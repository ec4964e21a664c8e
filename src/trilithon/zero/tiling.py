"""Memory-centric tiling: a linear layer executed tile by tile, so that only one tile of its weight is whole at a time.

    with trilithon.zero.init():
        model = GPT(config)
    trilithon.zero.tile(model, above_numel=2**24)     # or `zero.tile_above_numel` in the configuration

A weight [out, in] becomes out_splits x in_splits modules of their own; at stage 3 each is a unit that is gathered for
its product and freed after it, so the memory for the layer's parameters and gradients falls by the number of tiles.

    y[o] = sum over i of x[i] W[o, i]^T, the bias of o added in the last i

State dicts keep the names and shapes of the plain layer, and so do views, checkpoints and norms per parameter.
(Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.3.)
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trilithon.errors import ConfigError
from trilithon.zero.gather import gathered
from trilithon.zero.init import builder_of, built_values

logger = logging.getLogger(__name__)


def tile(
    model: nn.Module,
    above_numel: int | None = None,
    *,
    modules: Sequence[str] = ("*",),
    in_splits: int | None = None,
    out_splits: int | None = None,
) -> list[str]:
    """Replace linear layers of `model` by tiled ones, in place; returns their names.

    above_numel: layers whose weight has more elements are cut into the fewest tiles that have not, by rows first.
    in_splits, out_splits: tiles along the input and output width instead, for every layer that `modules` names.
    modules: patterns of module names. Layers that cannot be tiled are skipped when they match by size only, and raise
    ConfigError when `modules` names them: a weight that other modules hold as well, one with hooks or with a
    parametrization, or a `forward` of its own. Collective when the model was built under `zero.init`.
    """
    by_count = in_splits is not None or out_splits is not None
    if (above_numel is None) == (not by_count):
        raise ConfigError("tile() takes either above_numel, or in_splits and out_splits.")
    if above_numel is not None and above_numel < 1:
        raise ConfigError(f"above_numel={above_numel}: a tile has at least one element.")
    named = tuple(modules) != ("*",)
    chosen: dict[str, tuple[nn.Linear, int, int]] = {}
    uses = _uses(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not any(fnmatch.fnmatchcase(name, pattern) for pattern in modules):
            continue
        across, down = _splits(module, above_numel) if above_numel is not None else (in_splits or 1, out_splits or 1)
        if across * down == 1:
            continue
        reason = _refusal(module, uses, across, down)
        if reason is None and name:
            chosen[name] = (module, across, down)
        elif named or by_count:
            raise ConfigError(f"linear layer '{name}' cannot be tiled: {reason or 'it is the whole model'}.")
        else:
            logger.warning("linear layer '%s' is not tiled: %s", name, reason or "it is the whole model")
    if not chosen and named and by_count:
        raise ConfigError(f"no linear layer of the model is called {' or '.join(modules)}.")
    for module, across, down in chosen.values():
        _replace(model, module, TiledLinear.of(module, in_splits=across, out_splits=down))
    return list(chosen)


def untile(model: nn.Module) -> None:
    """Give every layer that `tile` replaced its place back, with the values of its tiles; the inverse of `tile`."""
    for module in [m for m in model.modules() if isinstance(m, TiledLinear) and m.origin is not None]:
        _replace(model, module, module.plain())


def _splits(module: nn.Linear, above_numel: int) -> tuple[int, int]:
    """(in_splits, out_splits) of a weight: rows first, and columns when one row is too long by itself."""
    numel = module.in_features * module.out_features
    if numel <= above_numel:
        return 1, 1
    rows = max(above_numel // module.in_features, 1)
    across = math.ceil(module.in_features / (above_numel // rows)) if module.in_features > above_numel else 1
    return across, math.ceil(module.out_features / rows)


def _uses(model: nn.Module) -> dict[int, int]:
    """Id of a parameter -> how many modules hold it."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                counts[id(param)] = counts.get(id(param), 0) + 1
    return counts


def _refusal(module: nn.Linear, uses: Mapping[int, int], across: int, down: int) -> str | None:
    if across > module.in_features or down > module.out_features:
        return (
            f"{across} x {down} tiles are more than its {module.in_features} inputs and {module.out_features} outputs"
        )
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return f"its class {type(module).__name__} has a forward of its own"
    if set(module._parameters) != {"weight", "bias"} or module.weight is None or module._modules:
        return "its weight is computed from others (a parametrization)"
    if any(uses[id(param)] > 1 for param in module.parameters(recurse=False)):
        return "another module holds the same weight (tied weights)"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it has hooks, which would not run on a tiled layer"
    return None


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def _bounds(size: int, splits: int) -> list[tuple[int, int]]:
    """`size` cut into `splits` ranges whose lengths differ by one at most."""
    cuts = [size * index // splits for index in range(splits + 1)]
    return list(itertools.pairwise(cuts))


class Tile(nn.Module):
    """One tile of a weight. [..., in of the tile] -> [..., out of the tile]"""

    def __init__(self, place: tuple[int, int, int, int], bias: bool, fan_in: int, device: Any, dtype: Any) -> None:
        """place: first and last row and column in the weight, (row, row_stop, column, column_stop)."""
        super().__init__()
        self.place, self._fan_in = place, fan_in
        row, row_stop, column, column_stop = place
        self.weight = nn.Parameter(torch.empty(row_stop - row, column_stop - column, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(row_stop - row, device=device, dtype=dtype)) if bias else None

    def reset_parameters(self) -> None:
        """Values distributed as those of a plain layer."""
        bound = 1.0 / math.sqrt(max(self._fan_in, 1))
        for param in self.parameters(recurse=False):
            nn.init.uniform_(param, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        row, row_stop, column, column_stop = self.place
        return f"rows {row}:{row_stop}, columns {column}:{column_stop}"


class TiledLinear(nn.Module):
    """`nn.Linear` in tiles: the same arguments, state dict and values, in in_splits x out_splits products.

    [..., in_features] -> [..., out_features]. With in_splits 1 every output element is the same product as in the plain
    layer; otherwise it is the sum of in_splits products. Input gradients are the sum over out_splits.
    """

    origin: nn.Linear | None  # the plain layer that this one stands for; not a child of it

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, in_splits: int = 1, out_splits: int = 1,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        if not 1 <= in_splits <= in_features or not 1 <= out_splits <= out_features:
            raise ConfigError(
                f"in_splits={in_splits} and out_splits={out_splits} must be from 1 to in_features={in_features} and "
                f"out_features={out_features}."
            )
        super().__init__()
        self.in_features, self.out_features, self.in_splits, self.out_splits = (
            in_features, out_features, in_splits, out_splits
        )  # fmt: skip
        object.__setattr__(self, "origin", None)
        columns = _bounds(in_features, in_splits)
        self.tiles = nn.ModuleList(
            Tile((*rows, *span), bias and span is columns[-1], in_features, device, dtype)
            for rows in _bounds(out_features, out_splits)
            for span in columns
        )
        self.reset_parameters()
        self.register_state_dict_post_hook(_join_state)
        self.register_load_state_dict_pre_hook(_cut_state)

    def reset_parameters(self) -> None:
        for tile_ in self._tiles():
            if not tile_.weight.is_meta:
                tile_.reset_parameters()

    @staticmethod
    def of(linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """A tiled layer with the values of `linear`, whose own are given up. Collective for one built in slices."""
        new = TiledLinear(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            in_splits=in_splits,
            out_splits=out_splits,
            device="meta",
            dtype=linear.weight.dtype,
        )
        object.__setattr__(new, "origin", linear)
        new.training = linear.training
        for kind, param in list(linear.named_parameters(recurse=False)):
            builder = builder_of(param)
            whole = param.data if builder is None else built_values(param)
            assert whole is not None
            for tile_ in new._tiles():
                if getattr(tile_, kind) is not None:
                    part = nn.Parameter(_cut(whole, kind, tile_).clone(), param.requires_grad)
                    setattr(tile_, kind, part)
                    if builder is not None:
                        builder.cut_now(tile_, kind, part)
            del whole
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        return new

    @torch.no_grad()
    def copy_from(self, linear: nn.Linear) -> None:
        """Take the values of a plain layer of the same size, which keeps its own. Collective if either is cut."""
        with gathered(linear), gathered(self, modify=0):
            self.load_state_dict(dict(linear.named_parameters(recurse=False)))

    def plain(self) -> nn.Linear:
        """The layer that this one stands for, with the values of the tiles."""
        assert self.origin is not None
        for kind, param in self.origin.named_parameters(recurse=False):
            param.data = self._joined(kind, [getattr(tile_, kind) for tile_ in self._tiles()]).detach()
            for tile_ in self._tiles():
                part = getattr(tile_, kind)
                if part is not None:
                    part.data = torch.empty(0, dtype=part.dtype, device=part.device)
        return self.origin

    def _tiles(self) -> list[Tile]:
        return [tile_ for tile_ in self.tiles if isinstance(tile_, Tile)]

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], put together from the tiles; a copy, through which gradients flow."""
        return self._joined("weight", [tile_.weight for tile_ in self._tiles()])

    @property
    def bias(self) -> Tensor | None:
        """[out_features], put together from the tiles."""
        parts = [tile_.bias for tile_ in self._tiles()]
        return self._joined("bias", parts) if parts[-1] is not None else None

    def _joined(self, kind: str, parts: Sequence[Tensor | None]) -> Tensor:
        if kind == "bias":
            return torch.cat([part for part in parts if part is not None])
        across = self.in_splits
        there = [part for part in parts if part is not None]
        return torch.cat([torch.cat(there[at : at + across], 1) for at in range(0, len(there), across)])

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.outputs(x)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def outputs(self, x: Tensor) -> list[Tensor]:
        """[..., in_features] -> the output in its out_splits parts, for callers that do not need them in one tensor."""
        if x.shape[-1] != self.in_features:
            raise ConfigError(f"the input has {x.shape[-1]} features, and in_features is {self.in_features}.")
        spans = _bounds(self.in_features, self.in_splits)
        parts = [x] if self.in_splits == 1 else [x[..., start:stop] for start, stop in spans]
        outputs = []
        for at in range(0, len(self.tiles), self.in_splits):
            total = self.tiles[at](parts[0])
            for offset in range(1, self.in_splits):
                total = total + self.tiles[at + offset](parts[offset])
            outputs.append(total)
        return outputs

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias_there}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    @property
    def bias_there(self) -> bool:
        return self._tiles()[-1].bias is not None


def _cut(whole: Tensor, kind: str, tile_: Tile) -> Tensor:
    row, row_stop, column, column_stop = tile_.place
    return whole[row:row_stop] if kind == "bias" else whole[row:row_stop, column:column_stop]


def _join_state(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """state_dict(): the tiles give way to the weight and bias of a plain layer."""
    assert isinstance(module, TiledLinear)
    count = len(module.tiles)
    for kind in ("weight", "bias"):
        parts = [state.pop(f"{prefix}tiles.{index}.{kind}", None) for index in range(count)]
        if parts[-1] is not None:
            state[prefix + kind] = module._joined(kind, parts)


def _cut_state(
    module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, missing: list[str],
    _unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """load_state_dict(): the weight and bias of a plain layer are handed to the tiles."""
    assert isinstance(module, TiledLinear)
    shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    for kind in ("weight", "bias") if module.bias_there else ("weight",):
        whole = state.pop(prefix + kind, None)
        if whole is None and f"{prefix}tiles.0.weight" in state:
            continue
        if whole is None:
            missing.append(prefix + kind)
        elif tuple(whole.shape) != shapes[kind]:
            errors.append(f"size mismatch for {prefix}{kind}: {tuple(whole.shape)} given, {shapes[kind]} here")
            whole = None
        for index, tile_ in enumerate(module._tiles()):
            own = getattr(tile_, kind)
            if own is not None:
                state[f"{prefix}tiles.{index}.{kind}"] = own if whole is None else _cut(whole, kind, tile_)


def tiles_of(model: nn.Module) -> Iterator[tuple[str, TiledLinear, int, Tile]]:
    """(name of the tiled layer, it, number of the tile, the tile) for every tile of the model."""
    for name, module in model.named_modules():
        if isinstance(module, TiledLinear):
            for index, tile_ in enumerate(module._tiles()):
                yield name, module, index, tile_
