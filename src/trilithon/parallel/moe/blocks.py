"""The feed-forward block that experts usually are."""

from __future__ import annotations

from torch import Tensor, nn

from trilithon.errors import ConfigError
from trilithon.parallel.moe.forms import ACTIVATIONS


class FeedForward(nn.Module):
    """down(act(up(x))), or with `gated` down(act(gate(x)) * up(x)). [..., M] -> [..., M].

    activation: a name of `forms.ACTIVATIONS`. (Gated: Shazeer 2020, arXiv:2002.05202.)
    """

    def __init__(
        self, hidden_size: int, inner_size: int, *, activation: str = "gelu", gated: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation={activation!r} is none of {', '.join(ACTIVATIONS)}.")
        self.activation = activation
        self.gate = nn.Linear(hidden_size, inner_size, bias) if gated else None
        self.up = nn.Linear(hidden_size, inner_size, bias)
        self.down = nn.Linear(inner_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        inner = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out
