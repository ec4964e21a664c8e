"""What becomes of an exception that interrupts training: what it is told, and what the engine lets go of."""

from __future__ import annotations

from trilithon.config import OffloadConfig
from trilithon.contracts import Update
from trilithon.engine.applying import Applying
from trilithon.engine.parameter_tier import gradient_tier
from trilithon.errors import TierError
from trilithon.zero.sharding import ZeroSharding


def add_notes(error: BaseException, *, lost: int, stage: int) -> None:
    """lost: earlier micro-batches of the step, whose gradients go as well; stage: of ZeRO."""
    if lost:
        error.add_note(f"trilithon: gradients of {lost} earlier micro-batches of this step are dropped as well.")
    if stage == 3 and "modified by an inplace operation" in str(error):
        error.add_note(
            "trilithon: if nothing was modified in place, backward reached a module from a tensor that its forward "
            "did not return, after its parameters had been dropped. Return that tensor, keep it in an attribute of "
            "the module, or list the module in zero.keep_gathered."
        )


def let_go(sharding: ZeroSharding, update: Update | None, applying: Applying | None, offload: OffloadConfig) -> None:
    """Files, buffers and threads of an engine whose context ended with an error; nothing if it keeps none on disk.

    Not collective, because other ranks may not take part any more; `Engine.close` can still follow. What only memory
    holds goes with the engine.
    """
    if "disk" not in (offload.state, offload.parameters, gradient_tier(offload)):
        return
    if applying is not None:
        applying.abandon(
            TierError(
                "the engine's context ended with an error, and what it kept on disk was removed. Make another engine "
                "and go on from a checkpoint."
            )
        )
    if update is not None:
        update.close()
    sharding._resting.close()
