"""A checkpoint as an export to DeepSpeed's layout sees it: parameter groups, their order, and ranges of their values.

The order of parameters is that of their groups, which a DeepSpeed engine built from the same model and groups shares.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint.manifest import Entry
from trilithon.checkpoint.reader import CheckpointReader
from trilithon.config import Config
from trilithon.config.precision import Fp16
from trilithon.errors import CheckpointError, ConfigError

_WEIGHTS = ("param", "master", "frozen", "buffer")
_RULES = {"adam": "Adam", "adamw": "AdamW", "lamb": "Lamb", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD"}
_TORCH_ADAM = {  # what the groups of torch's Adam hold, which DeepSpeed restores whole
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """One parameter group: names and shapes in order, and the settings of its update."""

    shapes: OrderedDict[str, torch.Size]
    settings: dict[str, Any]

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


class Source:
    """What is exported of a checkpoint; raises CheckpointError for what has no place in DeepSpeed's files."""

    def __init__(self, reader: CheckpointReader, *, weights_only: bool = False) -> None:
        self.reader = reader
        extra = reader.extra
        self.own: Mapping[str, Any] = extra["ranks"][0]
        self.counters: Mapping[str, Any] = extra["counters"]
        self.schedule: Mapping[str, Any] | None = extra.get("schedule")
        self.scaler: dict[str, Any] = dict(extra.get("scaler") or {})
        self.update: Mapping[str, Any] | None = None if weights_only else self._checked_update()
        self.groups = self._groups()
        fields = [part for part in reader.parts if part not in _WEIGHTS and "/" not in part and part != "rank_state"]
        self.fields = [] if weights_only else [part for part in fields if part != "window"]

    @property
    def updates(self) -> int:
        """Updates of the optimizer."""
        return int((self.update or {}).get("updates", self.counters["steps"]))

    def _checked_update(self) -> Mapping[str, Any]:
        update = self.own.get("update") or {}
        rule = update.get("rule")
        if rule not in _RULES:
            raise CheckpointError(
                f"{self.reader.manifest.tag} holds optimizer state of {rule or 'no rule'}, which has no place in "
                f"DeepSpeed's files ({', '.join(_RULES)} have). Export the weights alone: zero_stage=0."
            )
        missed = {name: count for name, count in (update.get("missed") or {}).items() if count}
        if missed:
            name = next(iter(missed))
            raise CheckpointError(
                f"'{name}' has made {missed[name]} updates fewer than others, and DeepSpeed's files hold one number "
                "for all parameters of a group. Export the weights alone: zero_stage=0."
            )
        if any("window" in rank for rank in self.reader.extra["ranks"]):
            raise CheckpointError(
                f"{self.reader.manifest.tag} was saved inside of an accumulation window, which DeepSpeed's files do "
                "not hold. Export one that was saved after engine.step(), or the weights alone: zero_stage=0."
            )
        return dict(update)

    def _groups(self) -> list[Group]:
        rates = (self.schedule or {}).get("lr") or []
        found = []
        for index, group in enumerate(self.reader.extra.get("groups") or ()):
            settings = {**group["settings"]}
            if index < len(rates):
                settings["lr"] = rates[index]
            shapes = OrderedDict((name, torch.Size(self.reader.entry("master", name).shape)) for name in group["names"])
            found.append(Group(shapes, settings))
        if not found:
            shapes = OrderedDict((one.name, torch.Size(one.shape)) for one in self.reader.entries("master"))
            found.append(Group(shapes, {}))
        return found

    def settings(self, group: Group) -> dict[str, Any]:
        """As both torch's optimizers and DeepSpeed's own keep them in their groups."""
        rule = str((self.update or {}).get("rule"))
        kept = {**group.settings}
        if rule in ("adam", "adamw"):
            kept = {**_TORCH_ADAM, "bias_correction": True, **kept, "decoupled_weight_decay": rule == "adamw"}
        return {**kept, "step": self.updates}

    def values(self, part: str, shapes: Mapping[str, torch.Size], start: int, stop: int) -> Tensor:
        """Elements [start, stop) of parameters standing one after the other, in fp32; zeros beyond the last."""
        flat, at = torch.zeros(max(0, stop - start)), 0
        for name, shape in shapes.items():
            low, high = max(start, at), min(stop, at + math.prod(shape))
            if low < high:
                flat[low - start : high - start] = self.reader.read(part, name, low - at, high - low)
            at += math.prod(shape)
        return flat

    def weights(self) -> list[tuple[str, Entry]]:
        """(name, entry) of every weight as forward read it, and of every buffer."""
        found = [(one.name, one) for one in self.reader.entries("param")]
        known = {name for name, _ in found}
        found += [(one.name, one) for one in self.reader.entries("master") if one.name not in known]
        return found + [(one.name, one) for part in ("frozen", "buffer") for one in self.reader.entries(part)]

    def read(self, entry: Entry) -> Tensor:
        """A whole tensor in its shape."""
        return self.reader.read(entry.part, entry.name).reshape(entry.shape)

    @property
    def aliases(self) -> dict[str, str]:
        return dict(self.reader.manifest.aliases)

    @property
    def scale_rule(self) -> dict[str, Any]:
        """Window, hysteresis and floor of the run's loss scale."""
        try:
            precision = Config.load(dict(self.reader.manifest.config)).precision
        except ConfigError:
            return {}
        return precision.model_dump() if isinstance(precision, Fp16) else {}

    def ds_config(self, stage: int) -> dict[str, Any]:
        """What stands in the files as the run's configuration: enough to tell stage, number format and rule."""
        kind = self.reader.manifest.precision
        found: dict[str, Any] = {"zero_optimization": {"stage": stage}}
        if kind in ("fp16", "bf16"):
            found[kind] = {"enabled": True}
        if self.update is not None:
            rule = str(self.update["rule"])
            found["optimizer"] = {"type": _RULES[rule], "params": _params(rule, self.groups)}
        return found


def _params(rule: str, groups: Sequence[Group]) -> dict[str, Any]:
    known = ("lr", "betas", "eps", "weight_decay", "momentum")
    settings = groups[0].settings
    found = {key: settings[key] for key in known if key in settings}
    if "betas" in found:
        found["betas"] = list(found["betas"])
    return {**found, "adam_w_mode": False} if rule == "adam" else found
