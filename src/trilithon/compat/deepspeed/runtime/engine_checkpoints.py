"""Saving and loading through a `DeepSpeedEngine`. Files are ours, under DeepSpeed's names of folders.

What is loaded may be a checkpoint of ours, of any number of ranks and stage, or one that DeepSpeed wrote.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.checkpoint import open_checkpoint
from trilithon.compat.deepspeed.git_version_info import version
from trilithon.compat.deepspeed.runtime.engine_settings import Settings
from trilithon.compat.deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from trilithon.errors import ProtocolError
from trilithon.zero import gathered

logger = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_CARRIED = "deepspeed"  # key of what this adapter adds to a checkpoint
_POINTERS = ("latest", "latest_universal")
_RECOVERY = '''"""Writes the fp32 weights of a checkpoint in this folder to one file. Needs the package trilithon."""

from trilithon.compat.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


class Checkpoints(Settings):
    """Mixed into the engine."""

    module: nn.Module

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Collective; True. tag: `global_step<n>` by default. client_state: plain data."""
        if not isinstance(save_dir, str | os.PathLike) or not os.fspath(save_dir):
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        carried = {
            **{name: getattr(self, name) for name in _COUNTERS},
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "ds_config": self.config,
            "ds_version": version,
        }
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        state, frozen = {**(client_state or {}), _CARRIED: carried}, not exclude_frozen_parameters
        self.native.save(Path(save_dir), name, state, latest=save_latest, frozen=frozen)
        script = Path(save_dir) / "zero_to_fp32.py"
        if self.native.rank == 0 and self._config.zero_enabled and not script.exists():
            script.write_text(_RECOVERY)
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Collective; (path inside the checkpoint's folder, what was handed to `save_checkpoint` and more).

        (None, None) where no tag is given and nothing was saved. Raises CheckpointError, on all ranks, for what does
        not fit; load_module_strict=False restores what fits.
        """
        if custom_load_fn is not None:
            raise ProtocolError(
                "load_checkpoint(custom_load_fn=...): weights are restored slice by slice and never as one state dict. "
                "Use load_module_strict=False, or trilithon.checkpoint.open_checkpoint to read tensors yourself."
            )
        root = Path(load_dir)
        if tag is None and not any((root / name).exists() for name in (*_POINTERS, "MANIFEST.json")):
            logger.warning("there is no 'latest' file at %s, so nothing was loaded; or name a tag", root)
            return None, None
        with open_checkpoint(root, str(tag) if tag is not None else None) as reader:
            extra = reader.extra
        goes_on = not load_module_only and self.basic_optimizer is not None
        parts = ["weights", "counters"] if goes_on else ["weights"]
        if goes_on and load_optimizer_states:
            parts += ["optimizer", "scaler"]
            if extra.get("schedule") and extra["schedule"]["scheduler"] is None:
                parts.append("schedule")  # the rates that the groups had; a scheduler's own state is below
        report = self.native.load(root, str(tag) if tag is not None else "latest", load_module_strict, parts)
        client_state = dict(report.client_state)
        carried = client_state.pop(_CARRIED, {})
        if not load_module_only:
            native = self.native
            own = (native.steps + native.skipped_steps, native.global_samples, native.skipped_steps)
            vars(self).update({name: carried.get(name, count) for name, count in zip(_COUNTERS, own)})
            if load_lr_scheduler_states and self.lr_scheduler is not None:
                self._load_scheduler(carried.get("lr_scheduler"), extra.get("schedule"))
        known = {"ds_config": carried.get("ds_config"), "ds_version": carried.get("ds_version", version)}
        known |= {"global_samples": self.global_samples, "dp_world_size": reader.manifest.world_size}
        return str(report.path / "MANIFEST.json"), {**known, **client_state}

    def _load_scheduler(self, own: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> None:
        if own is None and saved is not None:  # written without this adapter, by our engine or by DeepSpeed
            own = saved["scheduler"]
            if own is None and type(self.lr_scheduler).__name__ in VALID_LR_SCHEDULES:
                own = {"last_batch_iteration": saved["updates"] - 1}
        if own is None:
            logger.warning("the checkpoint holds no state for the %s; it begins anew", type(self.lr_scheduler).__name__)
        else:
            self.lr_scheduler.load_state_dict(dict(own))

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Collective: rank 0 writes the weights in the type that forward reads. True if it did."""
        if self._config.zero_optimization_stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            way = "set zero_optimization.stage3_gather_16bit_weights_on_model_save, or use save_checkpoint"
            logger.info("%s was not saved: %s, which any number of ranks can read", save_filename, way)
            return False
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        self.native.drain()
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        if self._config.zero_optimization_stage != 3:
            raise ValueError("this function requires ZeRO-3 mode")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Collective: whole weights on rank 0, None elsewhere; at any stage and on any mesh."""
        return self.native.state_dict_on(0, frozen=not exclude_frozen_parameters)

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The module's own, with what this rank holds."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, param in self.module.named_parameters() if exclude_frozen_parameters else ():
            if not param.requires_grad:
                state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None, *_: Any, **__: Any
    ) -> None:
        """Whole weights under "module", the same on every rank. Collective."""
        if custom_load_fn is not None:
            raise ProtocolError("load_module_state_dict(custom_load_fn=...): change the dictionary before instead.")
        with gathered(list(self.module.parameters()), modify=0):
            self.module.load_state_dict(checkpoint["module"], strict=strict)
