"""What compression has not yet sent, as part of a checkpoint.

With the same number of ranks each rank takes back its own residuals, and the run goes on bit for bit. With another
number they are folded: R = mean over ranks of the residuals + the servers' residuals, all that is conserved, becomes
the servers' residuals of the new run, cut anew, and the ranks' own begin at zero. With a single rank nothing is
compressed any more and R is added to what it would have sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trilithon.comm.compressed import CompressedAllReduce
from trilithon.config.compressed import padded_numel
from trilithon.errors import CheckpointError

RESIDUAL, SERVER = "residual", "server_residual"


class SavedResiduals:
    """Takes residuals from a checkpoint before the exchange that they belong to exists, and hands them over once."""

    def __init__(self) -> None:
        self._own: dict[str, Tensor] = {}
        self._folded: Tensor | None = None

    def take(self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None, numel: int) -> None:
        """As `contracts.Update.load_rank_state`; with other ranks, may be called for one name after the other."""
        if saved_ranks is None:
            self._own = {name: state[name].clone() for name in (RESIDUAL, SERVER) if name in state}
            return
        for name in (RESIDUAL, SERVER):
            found = [rank[name].float().cpu() for rank in saved_ranks if name in rank]
            if found and self._folded is None:
                self._folded = torch.zeros(numel)
            if found and self._folded is not None:
                total = torch.cat(found) if name == SERVER else torch.stack(found).mean(0)
                if total.numel() < numel:
                    raise CheckpointError(
                        f"the residuals of compression in the checkpoint cover {total.numel()} elements, and the model "
                        f"has {numel} trainable ones. Load with the parameters frozen as they were when it was saved, "
                        "or load the weights only."
                    )
                self._folded.add_(total[:numel])

    def hand_over(self, reduce: CompressedAllReduce, rank: int) -> Tensor | None:
        """Fill the residuals of a fresh `reduce`. Returns [numel] that a single rank adds to what it sends itself."""
        state = self.pending(reduce.numel, rank, reduce.padded // max(reduce.chunk, 1))
        self._own, self._folded = {}, None
        if not state:
            return None
        if not reduce.residual.numel():
            return state[RESIDUAL].to(reduce.residual.device)
        for name, target in ((RESIDUAL, reduce.residual), (SERVER, reduce.server_residual)):
            if state[name].numel() != target.numel():
                raise CheckpointError(
                    f"{name} in the checkpoint has {state[name].numel()} elements, and here it has {target.numel()}: "
                    "the trainable parameters changed. Load with the parameters frozen as they were when it was "
                    "saved, or load the weights only."
                )
            target.copy_(state[name])
        return None

    def pending(self, numel: int, rank: int, world_size: int) -> dict[str, Tensor]:
        """What was taken and not yet handed over, as this rank's state; what a single rank has is all in one piece."""
        if self._folded is None:
            return self._own
        if world_size == 1:
            return {RESIDUAL: self._folded}
        padded = padded_numel(numel, world_size)
        whole, chunk = torch.zeros(padded), padded // world_size
        whole[:numel] = self._folded
        return {RESIDUAL: torch.zeros(padded), SERVER: whole[rank * chunk : (rank + 1) * chunk].clone()}


def rank_state(reduce: CompressedAllReduce) -> dict[str, Tensor]:
    """This rank's residuals; nothing for a group of one."""
    if not reduce.residual.numel():
        return {}
    return {RESIDUAL: reduce.residual, SERVER: reduce.server_residual}
