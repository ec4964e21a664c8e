"""What an exception that left a backward half done is told about, beside what it says itself."""

from __future__ import annotations


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
