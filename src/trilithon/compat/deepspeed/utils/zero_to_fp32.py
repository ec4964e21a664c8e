"""Plain fp32 weights out of a checkpoint of ours or of DeepSpeed's: `zero_to_fp32`'s functions and command line.

python -m trilithon.compat.deepspeed.utils.zero_to_fp32 CHECKPOINT_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trilithon.checkpoint import CheckpointReader, export, open_checkpoint
from trilithon.checkpoint.export import Planned, plan_export
from trilithon.errors import CheckpointError

WEIGHTS = "pytorch_model.bin"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> OrderedDict[str, Tensor]:
    """Name -> whole tensor on the CPU: masters, frozen parameters in fp32, buffers as they are, tied names too.

    tag: of the checkpoint, None for the latest. lazy_mode changes nothing: tensors are whole. Raises CheckpointError.
    """
    with open_checkpoint(checkpoint_dir, tag or "latest") as reader:
        planned = _planned(reader, exclude_frozen_parameters)
        read: dict[tuple[str, str], Tensor] = {}
        found: OrderedDict[str, Tensor] = OrderedDict()
        for one in planned:
            key = (one.entry.part, one.entry.name)
            if key not in read:
                read[key] = _value(reader, one)
            found[one.name] = read[key]
        return found


def _planned(reader: CheckpointReader, exclude_frozen: bool) -> list[Planned]:
    frozen = [entry.name for entry in reader.entries("frozen")] if exclude_frozen else []
    return [one for one in plan_export(reader, torch.float32)[0] if one.entry.name not in frozen]


def _value(reader: CheckpointReader, one: Planned) -> Tensor:
    return reader.read(one.entry.part, one.entry.name).to(one.dtype)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str, output_dir: str, max_shard_size: str | int | None = "5GB", safe_serialization: bool = False,
    tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the fp32 weights under `output_dir`: safetensors, or `pytorch_model.bin`, with an index when there are
    several files. max_shard_size: such as "5GB" or bytes, None for one file. Raises CheckpointError.
    """
    limit = _bytes(max_shard_size) if max_shard_size is not None else 2**62
    with open_checkpoint(checkpoint_dir, tag or "latest") as reader:
        planned = _planned(reader, exclude_frozen_parameters)
        if not safe_serialization:
            _write_bins(reader, planned, Path(output_dir), limit)
            return
        frozen = [entry.name for entry in reader.entries("frozen")] if exclude_frozen_parameters else []
    export(checkpoint_dir, output_dir, tag=tag or "latest", shard_bytes=limit, exclude=frozen, overwrite=True)


def _write_bins(reader: CheckpointReader, planned: Sequence[Planned], out: Path, limit: int) -> None:
    shards: list[list[Planned]] = [[]]
    for one in planned:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + one.bytes > limit:
            shards.append([])
        shards[-1].append(one)
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"pytorch_model-{n:05d}-of-{count:05d}.bin" for n in range(1, count + 1)]
    out.mkdir(parents=True, exist_ok=True)
    for name, shard in zip(names, shards):
        torch.save({one.name: _value(reader, one) for one in shard}, out / name)
    if count > 1:
        where = {one.name: name for name, shard in zip(names, shards) for one in shard}
        index = {"metadata": {"total_size": sum(one.bytes for one in planned)}, "weight_map": where}
        (out / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _bytes(size: str | int) -> int:
    matched = _SIZE.fullmatch(str(size))
    if matched is None:
        raise CheckpointError(f"max_shard_size={size!r} is no size. Write one such as 5GB or 200MB.")
    base = 1024 if matched[3] else 1000
    return int(float(matched[1]) * base ** " KMGT".index(matched[2].upper() or " "))


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """The model on the CPU with the weights of the checkpoint; a model that an engine trains is closed first."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """DeepSpeed's file of rank 0. Raises FileNotFoundError in a checkpoint that DeepSpeed did not write."""
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    return _files(checkpoint_dir, name)[0]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """DeepSpeed's files of optimizer state, in rank order. Raises FileNotFoundError as `get_model_state_file`."""
    return _files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """DeepSpeed's files of weights, likewise."""
    return _files(checkpoint_dir, "*_model_states.pt")


def _files(folder: str, pattern: str) -> list[str]:
    found = [str(path) for path in Path(folder).glob(pattern)]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no {pattern}: DeepSpeed did not write it. For a checkpoint of trilithon use "
            "get_fp32_state_dict_from_zero_checkpoint, or `trilithon checkpoint export`."
        )
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    p = argparse.ArgumentParser(prog="zero_to_fp32", description="Plain fp32 weights out of a checkpoint.")
    p.add_argument("checkpoint_dir", help="the folder that holds the checkpoints")
    p.add_argument("output_dir", help="where the weights go")
    p.add_argument("--max_shard_size", default="5GB", help="largest file, such as 5GB")
    p.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pytorch_model.bin")
    p.add_argument("-t", "--tag", default=None, help="of the checkpoint; the latest by default")
    p.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    p.add_argument("-d", "--debug", action="store_true", help="accepted, without effect")
    chosen = p.parse_args(args)
    convert_zero_checkpoint_to_fp32_state_dict(
        chosen.checkpoint_dir,
        chosen.output_dir,
        chosen.max_shard_size,
        chosen.safe_serialization,
        chosen.tag,
        chosen.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
