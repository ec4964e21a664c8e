"""The release of DeepSpeed whose names and behaviour these modules have, as its own modules tell it."""

from __future__ import annotations

import os

# Without trilithon.config, which takes a while to import: a package that is only looked at has to be cheap.
version = "0.16.5" if os.environ.get("TRILITHON_DEEPSPEED_RELEASE") == "0.16" else "0.19.8"
git_hash = git_branch = "unknown"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info: dict[str, str] = {}
