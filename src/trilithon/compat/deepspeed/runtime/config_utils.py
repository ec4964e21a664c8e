"""`deepspeed.runtime.config_utils`: how programs look things up in a configuration block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class DeepSpeedConfigModel(BaseModel):
    """Base of configuration blocks of a program's own: unknown keys are refused, assignments checked."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid", populate_by_name=True)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.load(object_pairs_hook=...)`. Raises ValueError for a key that is there twice."""
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ValueError(f"these keys are in the file twice: {twice}. Keep one of each.")
    return dict(ordered_pairs)
