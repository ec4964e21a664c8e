"""DeepSpeed's `activation_checkpointing` block -> `recompute`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trilithon.config.base import kind_of, show
from trilithon.config.deepspeed_types import Reader

# DeepSpeed's flags -> our key and its value; the first ones say that inputs rest elsewhere, the others how
_FLAGS: dict[str, tuple[str, Any]] = {
    "cpu_checkpointing": ("tier", "host"),
    "partition_activations": ("partition", True),
    "contiguous_memory_optimization": ("contiguous", True),
    "contiguous_checkpointing": ("contiguous", True),
    "synchronize_checkpoint_boundary": ("synchronize", True),
    "profile": ("profile", True),
}
_MOVES = tuple(_FLAGS)[:4]


def read_recompute(reader: Reader, block: Any) -> None:
    """In DeepSpeed the model says what is recomputed; the file says where the inputs rest meanwhile."""
    if not isinstance(block, Mapping):
        return
    flags = {name: block[name] for name in _FLAGS if name in block}
    for name, value in flags.items():
        key = f"activation_checkpointing.{name}"
        if value is not None and not isinstance(value, bool):
            reader.draft.problem(key, f"{key}={show(value)} ({kind_of(value)}): must be true or false")
        elif not value:
            reader.draft.note(key, "no effect: it is off")
    moved = [name for name in _MOVES if flags.get(name) is True]
    number, number_key = block.get("number_checkpoints"), "activation_checkpointing.number_checkpoints"
    if not moved:
        rest = [f"activation_checkpointing.{name}" for name, value in flags.items() if value is True]
        for key in [*rest, *([number_key] if number is not None else [])]:
            reader.draft.note(key, "no effect: nothing says where the inputs of recomputed blocks are to rest")
        return
    for name in [name for name, value in flags.items() if value is True]:
        native, value = _FLAGS[name]
        reader.put(f"recompute.{native}", value, f"activation_checkpointing.{name}")
    reader.draft.note(
        f"activation_checkpointing.{moved[0]}", "blocks that stand several times in a list of modules are recomputed"
    )
    if number is not None:
        reader.put("recompute.number", number, number_key)
