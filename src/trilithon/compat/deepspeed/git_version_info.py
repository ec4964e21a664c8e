"""The release of DeepSpeed whose names and behaviour these modules have, as its own modules tell it."""

from __future__ import annotations

from trilithon.config.deepspeed_release import deepspeed_release

_VERSIONS = {"0.19": "0.19.8", "0.16": "0.16.5"}

version = _VERSIONS[deepspeed_release()]
git_hash = git_branch = "unknown"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info: dict[str, str] = {}
