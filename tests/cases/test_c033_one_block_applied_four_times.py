"""One block called 4 times in a loop, recomputed in half of the calls, equals plain PyTorch at every stage."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from against_plain import STAGES, assert_trains_like_plain
from trilithon.testing import ranks
from trilithon.testing.models import Block


class Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.block, self.out = Block(16, 2), nn.Linear(16, 4)
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(-1, 3, -1)
        x = x if self.reentrant is None else x.clone().requires_grad_()
        for turn in range(4):
            again = self.reentrant is not None and turn % 2 == 0
            x = checkpoint(self.block, x, use_reentrant=self.reentrant) if again else self.block(x)
        return F.mse_loss(self.out(x.mean(1)), target)


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_block_with_recomputation(reentrant):
    def recompute(model: Universal) -> None:
        model.reentrant = reentrant

    for stage in STAGES:
        assert_trains_like_plain(Universal, stage, change=recompute)
