"""What a checkpoint says about the run that saved it: enough to set up the one that continues, before its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilithon.checkpoint import open_checkpoint
from trilithon.data.token_cache import Manifest
from trilithon.errors import CheckpointError, ConfigError, DataError
from trilithon.pretrain.start import Start

CLIENT_KEY = "pretrain"  # in a checkpoint's client_state


@dataclass(frozen=True, slots=True)
class Past:
    """Plain data; goes into a checkpoint as `client_state` and comes out of it on rank 0.

    data: what tells one corpus from another, wherever its files lie.
    """

    step: int
    global_size: int
    micro_size: int
    world_size: int
    data: Mapping[str, Any]

    def client_state(self) -> dict[str, Any]:
        return {
            CLIENT_KEY: {
                "step": self.step,
                "global_size": self.global_size,
                "micro_size": self.micro_size,
                "world_size": self.world_size,
                "data": dict(self.data),
            }
        }

    def require_data(self, now: Mapping[str, Any]) -> None:
        """Raises DataError if the run that saved read other text: its position would mean other samples here."""
        changed = [f"{name} was {self.data[name]} and is {now[name]}" for name in now if self.data[name] != now[name]]
        if changed:
            raise DataError(
                f"The checkpoint was trained on other data: {'; '.join(changed)}. Give the same --data, --suffix, "
                "--tokenizer, --vocab, --max-tokens and --held-out as that run, or begin a new one."
            )

    def require_steps(self, steps: int) -> None:
        """Raises ConfigError if a run of `steps` steps would have ended before this checkpoint was saved."""
        if steps < self.step:
            raise ConfigError(
                f"the checkpoint is at step {self.step}, behind the last of --steps {steps}, which counts from the "
                f"beginning of the run. Give --steps {self.step + steps} to train {steps} more, or --steps {self.step} "
                "to leave results without training."
            )


def about_data(manifest: Manifest) -> dict[str, Any]:
    """The entropy tells texts of the same length apart; digits that another machine's logarithm may change are left
    out."""
    return {
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "train_tokens": manifest.train_tokens,
        "unigram_entropy": round(manifest.unigram_entropy, 9),
    }


def find_past(start: Start) -> tuple[str, Past] | None:
    """(tag, what it says) of the checkpoint that a run begins with; None for new weights.

    Raises CheckpointError when there is none that is whole, or none of a training run.
    """
    if start.checkpoints is None:
        return None
    with open_checkpoint(start.checkpoints) as saved:
        state = saved.extra["client_state"]
        tag, folder = saved.manifest.tag, Path(saved.folder)
    if CLIENT_KEY not in state:
        raise CheckpointError(
            f"{folder} was not saved by `trilithon train`: it does not say which step and data it belongs to. Load it "
            "in a script, with engine.load()."
        )
    return tag, Past(**state[CLIENT_KEY])
