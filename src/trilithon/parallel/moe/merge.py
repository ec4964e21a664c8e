"""Two trained mixtures become one with the experts of both; and a mixture loses the experts it can spare.

Aggregation starts a large mixture from two smaller runs; pruning makes a trained one cheaper to serve. Both work on
plain state, names and tensors, and on whole models. (Kim et al. 2021, arXiv:2109.10465, section 4.)
"""

# E experts

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from trilithon.errors import ConfigError
from trilithon.parallel.moe.convert import layers
from trilithon.parallel.moe.layer import MoE

Dense = Literal["mean", "first"]
State = dict[str, Tensor]


def is_expert(name: str, layer_names: Iterable[str]) -> bool:
    """Is this parameter stacked by expert (or the router, one row each)? Decided by layer, never by the word alone."""
    prefixes = [f"{layer}." if layer else "" for layer in layer_names]
    return any(name.startswith((f"{prefix}experts.", f"{prefix}gate.")) for prefix in prefixes)


def layer_names(state: Mapping[str, Tensor]) -> list[str]:
    """The layers of experts in a state: a router `gate.weight` [E, M] beside stacks `experts.*` [E, ...]."""
    found = []
    for name, router in state.items():
        if name.rpartition(".gate.weight")[1:] != (".gate.weight", "") and name != "gate.weight":
            continue
        layer = name.removesuffix("gate.weight").removesuffix(".")
        prefix = f"{layer}.experts." if layer else "experts."
        stacks = [value for other, value in state.items() if other.startswith(prefix)]
        if stacks and router.dim() == 2 and all(value.shape[0] == router.shape[0] for value in stacks):
            found.append(layer)
    return found


def aggregate(first: Mapping[str, Tensor], second: Mapping[str, Tensor], dense: Dense = "mean") -> State:
    """The state of a mixture with the experts of both, those of `first` before those of `second` in every layer.

    dense: everything else is the mean of the two, or that of `first`. Optimizer state has to start anew.
    Raises ConfigError when the two are not of one architecture.
    """
    here = layer_names(first)
    if not here or here != layer_names(second):
        raise ConfigError(f"the two models have different layers of experts: {here} and {layer_names(second)}.")
    if set(first) != set(second):
        raise ConfigError(f"the two models differ in parameters: {sorted(set(first) ^ set(second))[:4]}, ...")
    found: State = {}
    for name, value in first.items():
        other = second[name]
        if is_expert(name, here):
            if value.shape[1:] != other.shape[1:]:
                raise ConfigError(f"'{name}' has experts of shapes {tuple(value.shape[1:])}, {tuple(other.shape[1:])}.")
            found[name] = torch.cat((value, other))
        elif value.shape != other.shape:
            raise ConfigError(
                f"'{name}' has the shapes {tuple(value.shape)} and {tuple(other.shape)}; they must agree."
            )
        elif dense == "first" or not value.is_floating_point():
            found[name] = value.clone()
        else:
            found[name] = ((value.double() + other.double()) / 2).to(value.dtype)
    return found


def keep_experts(state: Mapping[str, Tensor], keep: Mapping[str, Sequence[int]]) -> State:
    """The state with only the experts keep[layer] of each layer, in that order; the router loses the other rows.

    A token whose choice was kept is then weighted by its probability among those that are left.
    Raises ConfigError for a layer or an expert that does not exist.
    """
    unknown = set(keep) - set(layer_names(state))
    if unknown:
        raise ConfigError(f"{sorted(unknown)} are no layers of experts; those are {layer_names(state)}.")
    found: State = {}
    for name, value in state.items():
        layer = next((one for one in keep if is_expert(name, [one])), None)
        if layer is None:
            found[name] = value
            continue
        chosen = list(keep[layer])
        if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= g < value.shape[0] for g in chosen):
            raise ConfigError(
                f"{layer}: experts {chosen} of {value.shape[0]}: distinct numbers below that, at least one."
            )
        found[name] = value[torch.tensor(chosen, device=value.device)]
    return found


def choose_experts(
    counts: Mapping[str, Tensor], number: int, by: Literal["random", "utilization"], seed: int = 0
) -> dict[str, list[int]]:
    """Which `number` experts of each layer to keep, in order. counts: [E] tokens by expert, of each layer.

    "utilization" keeps those that most tokens chose (the lower number first among equals), "random" draws them.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[int]] = {}
    for layer, routed in counts.items():
        if not 1 <= number <= routed.numel():
            raise ConfigError(f"{layer}: {number} experts cannot be kept of {routed.numel()}.")
        if by == "random":
            kept = torch.randperm(routed.numel(), generator=generator)[:number]
        else:
            kept = torch.sort(routed, descending=True, stable=True).indices[:number]
        found[layer] = sorted(kept.tolist())
    return found


class Utilization:
    """Adds up, per layer, how many tokens chose each expert. Open it around forwards over a calibration set.

    counts: [E] i64 by name of layer, of this rank; sum them over ranks before `choose_experts`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = dict(layers(model))
        self.counts = {name: torch.zeros(layer.num_experts, dtype=torch.int64) for name, layer in self._layers.items()}

    def __enter__(self) -> Utilization:
        def added(name: str) -> None:
            last = self._layers[name].last
            if last is not None:
                self.counts[name] += last.routed.cpu()

        self._handles = [
            layer.register_forward_hook(lambda *_, name=name: added(name)) for name, layer in self._layers.items()
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def prune(model: nn.Module, keep: Mapping[str, Sequence[int]]) -> None:
    """Leave only the experts keep[layer] in each layer of `model`, in place; make its optimizer afterwards.

    Raises ConfigError for layers that an engine has spread over ranks.
    """
    for name, layer in layers(model):
        if name in keep:
            _prune(name, layer, list(keep[name]))


def _prune(name: str, layer: MoE, kept: list[int]) -> None:
    if layer.experts.here != layer.num_experts:
        raise ConfigError(f"{name}: its experts are spread over ranks; close the engine before pruning.")
    if layer.k > len(kept):
        raise ConfigError(f"{name}: k={layer.k} experts per token of {len(kept)} that are kept.")
    if len(kept) % (layer.ep_size or 1):
        raise ConfigError(f"{name}: {len(kept)} experts do not split over ep_size={layer.ep_size} ranks.")
    state = keep_experts({f"layer.{own}": value for own, value in layer.state_dict().items()}, {"layer": kept})
    for own, param in [
        ("gate.weight", layer.gate.weight),
        *((f"experts.{n}", p) for n, p in layer.experts.named_parameters()),
    ]:
        param.data = state[f"layer.{own}"].clone()
    layer.num_experts = layer.experts.num_experts = layer.experts.here = len(kept)
