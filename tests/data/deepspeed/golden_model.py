"""The model, groups and batches of the golden checkpoints: used by `generate.py` and by the tests that read them.

Small and awkward on purpose: a tied head, frozen parameters, buffers, sizes that two ranks do not divide, a parameter
with fewer elements than there are ranks, and two parameter groups whose members alternate in the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS_SAVED = 3  # updates before the checkpoint was written
STEPS_AFTER = 2  # updates that DeepSpeed made after it, recorded in `continued.*`
ROWS = 4  # of one rank and step
VOCABULARY = 11


class GoldenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.hidden = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for param in self.frozen.parameters():
            param.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [rows] -> mean cross entropy."""
        normal = self.norm(self.embed(tokens))
        if self.training:
            self.seen += len(tokens)
            self.mean.copy_(0.9 * self.mean + 0.1 * normal.detach().mean(0))
        hidden = self.hidden(normal).tanh() * self.gain
        logits = self.head(self.frozen(hidden))
        return nn.functional.cross_entropy(logits.float(), targets)


def build_model() -> GoldenModel:
    torch.manual_seed(1234)
    model = GoldenModel()
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(0.5, 1.5, 5))
    return model


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, vectors do not; each group has its own rate."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trainable if len(param.shape) > 1], "lr": 0.02, "weight_decay": 0.1},
        {"params": [param for param in trainable if len(param.shape) == 1], "lr": 0.01, "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank at one step (counted from 0)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randint(0, VOCABULARY, (2, ROWS), generator=generator)
    return drawn[0], drawn[1]
