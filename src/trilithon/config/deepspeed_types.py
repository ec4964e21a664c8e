"""The `optimizer` and `scheduler` blocks of a DeepSpeed file: a type by name and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trilithon.config.base import Section, kind_of, show
from trilithon.config.deepspeed_release import Release
from trilithon.config.deepspeed_rules import Entry, Idle, Only, To
from trilithon.config.naming import nearest
from trilithon.config.origin import Draft
from trilithon.config.schedule import LrRangeTest, OneCycle, WarmupCosineLr, WarmupDecayLr, WarmupLr


class Reader(Protocol):
    """The pass over the file that these functions add to."""

    draft: Draft
    release: Release

    def put(self, native: str, value: Any, key: str) -> None: ...

    def derive(self, native: str, value: Any, why: str) -> None: ...

    def walk(self, block: Mapping[Any, Any], table: Mapping[str, Entry], prefix: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Rule:
    """One optimizer type: its kind here, its parameters, and DeepSpeed's defaults where ours differ."""

    kind: str
    keys: Mapping[str, Entry]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _straight(*names: str) -> dict[str, Entry]:
    return {name: To(f"optimizer.{name}") for name in names}


_FORM = "one implementation serves all devices"
_COMMON: dict[str, Entry] = {
    **_straight("lr", "weight_decay"),
    "max_grad_norm": Only((), "clipping is not a parameter of the optimizer; write gradient_clipping at the top level"),
    "amsgrad": Only((False, None), "AMSGrad is not in this version; set it to false"),
    "maximize": Only((False, None), "minimise the negative loss instead, and set it to false"),
    "foreach": Idle(_FORM),
    "fused": Idle(_FORM),
    "set_grad_none": Idle("gradients are always dropped after a step", "flag"),
    "fp32_optimizer_states": Only((True, None), "optimizer state is always fp32; set it to true"),
}
_ADAM: dict[str, Entry] = {
    **_COMMON,
    **_straight("betas", "eps", "bias_correction"),
    "torch_adam": Idle(_FORM, "flag"),
    "adam_w_mode": Idle("it has chosen between Adam and AdamW", "flag"),
}
_COMPRESSED: dict[str, Entry] = {
    **_COMMON,
    **_straight("betas", "eps", "bias_correction"),
    "max_grad_norm": Only((0, None), "write gradient_clipping at the top level, and set it to 0"),
    "eps_inside_sqrt": Only((False, None), "eps is added outside the root; set it to false"),
    "cuda_aware": Idle("there is no MPI underneath", "flag"),
    "comm_backend_name": Idle("messages go through torch.distributed, whatever its backend", "text"),
}
_LAMB_BOUNDS: dict[str, Entry] = {"max_coeff": To("optimizer.max_ratio"), "min_coeff": To("optimizer.min_ratio")}
# DeepSpeed takes bias_correction and does not use it in these three; only its 1-bit LAMB scales tensors.
_NEVER_CORRECTED = {"freeze_step": 100_000, "bias_correction": False}
_UNSCALED = {"per_tensor_scaling": False}
_OPTIMIZERS: dict[str, _Rule] = {
    "adam": _Rule("adamw", _ADAM, {"weight_decay": 0.0}),
    "adamw": _Rule("adamw", _ADAM, {"weight_decay": 0.0}),
    "sgd": _Rule("sgd", {**_COMMON, **_straight("momentum", "dampening", "nesterov")}, {"lr": 1e-3}),
    "lion": _Rule("lion", {**_COMMON, **_straight("betas")}, {"lr": 1e-3, "betas": [0.9, 0.999]}),
    "adagrad": _Rule(
        "adagrad",
        {
            **_COMMON,
            **_straight("eps"),
            "lr_decay": Only((0, None), "use a scheduler instead, and set it to 0"),
            "initial_accumulator_value": Only((0, None), "the sum of squares begins at 0; set it to 0"),
        },
    ),
    "lamb": _Rule(
        "lamb",
        {
            **_COMMON,
            **_straight("betas", "eps", "bias_correction"),
            **_LAMB_BOUNDS,
            "eps_inside_sqrt": Only((False, None), "eps is added outside the root; set it to false"),
        },
    ),
    "onebitadam": _Rule("onebit_adam", {**_COMPRESSED, **_straight("freeze_step")}, {**_NEVER_CORRECTED, **_UNSCALED}),
    "onebitlamb": _Rule(
        "onebit_lamb",
        {
            **_COMPRESSED,
            **_LAMB_BOUNDS,
            **_straight("freeze_step", "coeff_beta", "factor_max", "factor_min", "factor_threshold"),
        },
        _NEVER_CORRECTED,
    ),
    "zerooneadam": _Rule(
        "zero_one_adam",
        {
            **_COMPRESSED,
            **_straight("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
        },
        {"bias_correction": False, **_UNSCALED},
    ),
}
_DEEPSPEEDS = ("muon", "muadam", "muadamw", "musgd")
OWN_OPTIMIZERS = frozenset({*_OPTIMIZERS, *_DEEPSPEEDS})
"""Types, in small letters, that are not looked up in torch.optim."""

_REFUSED = {
    **dict.fromkeys(_DEEPSPEEDS, "this optimizer is"),
    **dict.fromkeys(
        ("rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd", "rprop", "sparseadam", "lbfgs", "adafactor"),
        "by name, this optimizer of torch.optim is",
    ),
}
_OURS = ("kind", "after_total")  # keys of a schedule that are not parameters of DeepSpeed's

SCHEDULERS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLr,
    "WarmupDecayLR": WarmupDecayLr,
    "WarmupCosineLR": WarmupCosineLr,
    "OneCycle": OneCycle,
    "LRRangeTest": LrRangeTest,
}


def read_optimizer(reader: Reader, block: Any) -> None:
    """Map the `optimizer` block; nothing happens when there is none."""
    opened = _open(reader, "optimizer", block, ("type", "params", "legacy_fusion"))
    if opened is None:
        return
    name, params = opened
    rule = _OPTIMIZERS.get(name.lower())
    if rule is None:
        known = "Adam, AdamW, SGD, Lion, Adagrad, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam"
        if name.lower() in _REFUSED:
            own = "; pass it yourself to initialize(optimizer=...)" if "torch.optim" in _REFUSED[name.lower()] else ""
            text = f"{_REFUSED[name.lower()]} not in this version{own}; known are {known}"
        else:
            close = nearest(name, known.split(", "))
            text = f"unknown; {f'did you mean {close}? ' if close else ''}known are {known}"
        reader.draft.problem("optimizer.type", f"optimizer.type={show(name)}: {text}")
        return
    kind = "adam" if name.lower() == "adam" and params.get("adam_w_mode", True) is False else rule.kind
    reader.put("optimizer.kind", kind, "optimizer.type")
    tables = {rule.kind: rule.keys for rule in _OPTIMIZERS.values()}
    reader.walk(_own(reader, "optimizer.params.", name, params, rule.keys, tables), rule.keys, "optimizer.params.")
    for key, value in rule.defaults.items():
        if params.get(key) is None and not (key == "weight_decay" and params.get("torch_adam") is True):
            reader.derive(f"optimizer.{key}", value, f"DeepSpeed's default for {name}")


def read_scheduler(reader: Reader, block: Any) -> None:
    """Map the `scheduler` block; nothing happens when there is none."""
    opened = _open(reader, "scheduler", block, ("type", "params"))
    if opened is None:
        return
    name, params = opened
    cls = SCHEDULERS.get(name)
    if cls is None:
        close = nearest(name, SCHEDULERS)
        reader.draft.problem(
            "scheduler.type",
            f"scheduler.type={show(name)}: unknown; {f'did you mean {close}? ' if close else ''}known are "
            f"{', '.join(SCHEDULERS)}. A scheduler of torch is passed to initialize(lr_schedule=...)",
        )
        return
    reader.put("lr_schedule.kind", cls.model_fields["kind"].default, "scheduler.type")
    table: dict[str, Entry] = {key: To(f"lr_schedule.{key}") for key in cls.model_fields if key not in _OURS}
    reader.draft.names.update({f"lr_schedule.{key}": f"scheduler.params.{key}" for key in table})
    table["last_batch_iteration"] = Only((-1, None), "a schedule begins at its start; a checkpoint moves it on")
    tables = {other: dict.fromkeys(section.model_fields) for other, section in SCHEDULERS.items()}
    reader.walk(_own(reader, "scheduler.params.", name, params, table, tables), table, "scheduler.params.")
    if reader.release == "0.16":
        _as_in_0_16(reader, cls, params)


def _as_in_0_16(reader: Reader, cls: type[Section], params: Mapping[str, Any]) -> None:
    """What the older release makes of parameters, or of their absence."""
    steps = params.get("warmup_num_steps")
    if isinstance(steps, int) and not isinstance(steps, bool) and steps <= 0 and "warmup_num_steps" in cls.model_fields:
        reader.derive("lr_schedule.warmup_num_steps", 2, f"DeepSpeed 0.16 takes {steps} for 2")
    if cls is WarmupLr and params.get("warmup_max_lr") is None:
        reader.derive("lr_schedule.warmup_max_lr", 0.001, "DeepSpeed 0.16's default")
    if cls is WarmupCosineLr:
        reader.derive("lr_schedule.after_total", "swing", "DeepSpeed 0.16 goes on along the cosine")
    for key in ("cycle_first_stair_count", "cycle_second_stair_count"):
        if cls is OneCycle and params.get(key):
            reader.derive(f"lr_schedule.{key}", 0, "DeepSpeed 0.16 takes stair counts and does not use them")


def _own(  # noqa: PLR0917
    reader: Reader,
    prefix: str,
    name: str,
    params: Mapping[str, Any],
    table: Mapping[str, Entry],
    tables: Mapping[str, Mapping[str, object]],
) -> Mapping[str, Any]:
    """The parameters without those that only another type has; each of these is a problem."""
    kept = {}
    for key, value in params.items():
        owners = [] if key in table else [other for other, keys in tables.items() if key in keys]
        if owners and key not in _OURS:
            text = f"not a parameter of {name}; {' and '.join(owners)} take it"
            reader.draft.problem(f"{prefix}{key}", f"{prefix}{key}: {text}")
        else:
            kept[key] = value
    return kept


def _open(reader: Reader, key: str, block: Any, known: tuple[str, ...]) -> tuple[str, Mapping[str, Any]] | None:
    """(type, params) of a block, or None when there is none or a problem was added."""
    if block is None:
        return None
    draft = reader.draft
    if not isinstance(block, Mapping):
        draft.problem(key, f"{key}={show(block)} ({kind_of(block)}): must be a block of keys")
        return None
    table: dict[str, Entry] = {name: Idle("it is read below") for name in known if name != "legacy_fusion"}
    table["legacy_fusion"] = Idle(_FORM, "flag")
    reader.walk({name: value for name, value in block.items() if name not in ("type", "params")}, table, f"{key}.")
    name, params = block.get("type"), block.get("params", {})
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        draft.problem(f"{key}.params", f"{key}.params={show(params)} ({kind_of(params)}): must be a block of keys")
        params = {}
    if not isinstance(name, str):
        given = "missing" if name is None else f"{show(name)} ({kind_of(name)}) must be text"
        draft.problem(f"{key}.type", f"{key}.type: {given}; name the {key}")
        return None
    return name, params
