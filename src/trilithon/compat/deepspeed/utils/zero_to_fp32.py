"""Plain fp32 weights out of a checkpoint of ours or of DeepSpeed's: `zero_to_fp32`'s functions and command line.

python -m trilithon.compat.deepspeed.utils.zero_to_fp32 CHECKPOINT_FOLDER OUTPUT_FOLDER

tag: of the checkpoint, None for the latest. All raise CheckpointError for what cannot be read.
"""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from trilithon.checkpoint import export, read_weights
from trilithon.checkpoint.asked import bytes_asked

WEIGHTS = "pytorch_model.bin"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> OrderedDict[str, Tensor]:
    """`trilithon.checkpoint.read_weights`. lazy_mode changes nothing: tensors are whole."""
    return OrderedDict(read_weights(checkpoint_dir, tag=tag, frozen=not exclude_frozen_parameters))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str, output_dir: str, max_shard_size: str | int | None = "5GB", safe_serialization: bool = False,
    tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """`trilithon.checkpoint.export`, without safe_serialization as `pytorch_model.bin`. max_shard_size: such as "5GB"
    or bytes, None for one file."""
    limit = bytes_asked(max_shard_size) if max_shard_size is not None else 2**62
    export(
        checkpoint_dir, output_dir, tag=tag, shard_bytes=limit, frozen=not exclude_frozen_parameters, overwrite=True,
        form="safetensors" if safe_serialization else "bin",
    )  # fmt: skip


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """The model on the CPU with the weights of the checkpoint; a model that an engine trains is closed first."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _files(checkpoint_dir: str, pattern: str) -> list[str]:
    """In rank order. Raises FileNotFoundError in a checkpoint that DeepSpeed did not write."""
    found = [str(path) for path in Path(checkpoint_dir).glob(pattern)]
    if not found:
        way = "a checkpoint of trilithon is read by get_fp32_state_dict_from_zero_checkpoint"
        raise FileNotFoundError(f"{checkpoint_dir} holds no {pattern}: DeepSpeed did not write it; {way}.")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


get_optim_files = partial(_files, pattern="*_optim_states.pt")
get_model_state_files = partial(_files, pattern="*_model_states.pt")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    return _files(checkpoint_dir, f"{'' if zero_stage <= 2 else 'zero_pp_rank_0_'}mp_rank_00_model_states.pt")[0]


def main(args: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="zero_to_fp32", description="Plain fp32 weights out of a checkpoint.")
    p.add_argument("checkpoint_dir", help="the folder that holds the checkpoints")
    p.add_argument("output_dir", help="where the weights go")
    p.add_argument("--max_shard_size", default="5GB", help="largest file, such as 5GB")
    p.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pytorch_model.bin")
    p.add_argument("-t", "--tag", help="of the checkpoint; the latest by default")
    p.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    p.add_argument("-d", "--debug", action="store_true", help="accepted, without effect")
    chosen = vars(p.parse_args(args))
    convert_zero_checkpoint_to_fp32_state_dict(**{name: chosen[name] for name in chosen.keys() - {"debug"}})


if __name__ == "__main__":
    main()
