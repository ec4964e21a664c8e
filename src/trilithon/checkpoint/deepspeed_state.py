"""What is not a tensor in DeepSpeed's files, in the words of this library: counters, groups, schedule, loss scale.

The result has the form of a checkpoint's own `extra`, so that whoever restores a run need not know where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trilithon.checkpoint.deepspeed_pickle import LossScaler, plain
from trilithon.checkpoint.deepspeed_tensors import Found

RESERVED = frozenset(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size
    mp_world_size checkpoint_parallel_dimensions num_experts ds_autoep_layers ds_config ds_version
    universal_checkpoint_info
    """.split()  # noqa: SIM905 (a list of 20 short words)
)
"""What DeepSpeed writes at the top level of a model file; the user's client_state lies beside it."""
_NOT_SETTINGS = ("params", "step", "name", "moe")  # the last two tell DeepSpeed which groups hold experts
_RULES = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb", "lion": "lion", "adagrad": "adagrad", "sgd": "sgd"}


def extra_of(found: Found) -> dict[str, Any]:
    """As `CheckpointReader.extra`; random states are not in it, for DeepSpeed does not save them."""
    model = found.model
    skipped = int(model.get("skipped_steps") or 0)
    boundaries = int(model.get("global_steps") or 0)
    steps = max(boundaries - skipped, 0)
    client = {key: plain(value) for key, value in model.items() if key not in RESERVED}
    shared = {
        "counters": {
            "steps": steps,
            "skipped_steps": skipped,
            "micro_steps": boundaries * accumulation_of(found.config),
            "global_samples": int(model.get("global_samples") or 0),
            "idle": [],
        },
        "accumulation": accumulation_of(found.config),
        "groups": groups_of(found),
        "schedule": _schedule(found, steps),
        "scaler": _scaler(found, steps, skipped),
        "seed": 0,
    }
    own: dict[str, Any] = {"client_state": client, "stateful": {}}
    rule = rule_of(found)
    if rule is not None and found.updates is not None:
        own["update"] = {"rule": rule, "updates": found.updates, "missed": {}}
    return {**own, **shared, "ranks": [own] * found.ranks}


def accumulation_of(config: Mapping[str, Any]) -> int:
    """Micro-batches of one step."""
    value = config.get("gradient_accumulation_steps")
    return value if isinstance(value, int) else 1


def precision_of(found: Found) -> str:
    """ "fp16", "bf16" or "fp32", as the configuration in the files says, else by the type of the weights."""
    for kind in ("fp16", "bf16"):
        if (found.config.get(kind) or {}).get("enabled") is True:
            return kind
    kinds = {str(tensor.dtype) for (part, _), tensor in found.tensors.items() if part == "param"}
    return "bf16" if "torch.bfloat16" in kinds else "fp16" if "torch.float16" in kinds else "fp32"


def rule_of(found: Found) -> str | None:
    """The update rule that wrote the state: by the configuration, else by what it keeps; None if it is neither."""
    section = found.config.get("optimizer") or {}
    named = str(section.get("type") or "").lower()
    if named == "adam" and (section.get("params") or {}).get("adam_w_mode", True) is False:
        return "adam"
    if named in _RULES:
        return _RULES[named]
    fields = {part for part, _ in found.tensors} - {"param", "master", "frozen", "buffer"}
    by_fields = {
        ("exp_avg", "exp_avg_sq"): _adam_of(found),
        ("momentum_buffer",): "sgd",
        ("sum",): "adagrad",
        ("exp_avg",): "lion",
    }
    return by_fields.get(tuple(sorted(fields)))


def _adam_of(found: Found) -> str:
    """Adam or AdamW, of an optimizer that was passed to DeepSpeed: as its groups say (those of torch do, since 2.7).
    Groups of DeepSpeed's own Adam do not; it is AdamW unless told otherwise."""
    told = {bool(group.get("decoupled_weight_decay", True)) for group in _param_groups(found.optimizer)}
    return "adam" if told == {False} else "adamw"


def groups_of(found: Found) -> list[dict[str, Any]]:
    """Names and settings of each parameter group. (Stage 3 lists names by sub-group, which groups refer to.)"""
    saved = _param_groups(found.optimizer)
    result = []
    for group in saved:
        members = [index for index in group.get("params") or () if index < len(found.groups)]
        names = [name for index in members for name in found.groups[index]]
        settings = {key: plain(value) for key, value in group.items() if key not in _NOT_SETTINGS}
        if isinstance(settings.get("betas"), list):
            settings["betas"] = tuple(settings["betas"])
        result.append({"names": names, "settings": settings})
    return result


def _param_groups(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for holder in ("base_optimizer_state", "optimizer_state_dict"):
        inner = optimizer.get(holder)
        if isinstance(inner, Mapping) and "param_groups" in inner:
            return list(inner["param_groups"])
    return list(optimizer.get("param_groups") or ())


def _schedule(found: Found, steps: int) -> dict[str, Any]:
    """DeepSpeed's schedulers count from -1: after k updates their index is k - 1. Others have a state of their own."""
    saved = found.model.get("lr_scheduler")
    rates = [float(group["settings"]["lr"]) for group in groups_of(found) if "lr" in group["settings"]]
    if isinstance(saved, Mapping) and set(saved) == {"last_batch_iteration"}:
        return {"updates": int(saved["last_batch_iteration"]) + 1, "scheduler": None, "lr": rates}
    return {"updates": steps, "scheduler": plain(saved) if saved else None, "lr": rates}


def _scaler(found: Found, steps: int, skipped: int) -> dict[str, Any]:
    """The loss scale and its counters, in the form that `optim.loss_scale` reads."""
    scaler = found.optimizer.get("loss_scaler")
    known: Mapping[str, Any] = vars(scaler) if isinstance(scaler, LossScaler) else {}
    if precision_of(found) != "fp16":
        return {"kind": "none", "steps": steps + skipped, "non_finite": skipped}
    if not known.get("dynamic", found.optimizer.get("dynamic_loss_scale")):
        return {"kind": "static", "scale": float(known.get("cur_scale", 1.0)), "non_finite": skipped, "in_a_row": 0}
    return {
        "kind": "dynamic",
        "scale": float(known.get("cur_scale", 1.0)),
        "iteration": int(known.get("cur_iter", steps + skipped)),
        "last_overflow": int(known.get("last_overflow_iter", -1)),
        "hysteresis_left": int(known.get("cur_hysteresis", 1)),
        "in_a_row_at_min": 0,
        "non_finite": skipped,
    }
