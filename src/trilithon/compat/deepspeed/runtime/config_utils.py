"""`deepspeed.runtime.config_utils`: how programs look things up in a configuration block."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class DeepSpeedConfigModel(BaseModel):
    """Base of configuration blocks of a program's own: unknown keys are refused, assignments checked."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid", populate_by_name=True)


get_scalar_param = get_list_param = get_dict_param = dict.get
