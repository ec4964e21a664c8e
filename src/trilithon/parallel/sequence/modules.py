"""What a model needs so that its tokens can be cut over ranks: where they are cut, and attention that sees all of them.

    self.cut = CutTokens()                                      # at the entrance: tokens, targets, positions
    self.attend = HeadExchange(core)                            # around core(query, key, value), each [B, H, T, E]

On one rank both do nothing. The engine joins them to the sequence axis of the mesh; a model without them is refused.
"""

# B batch, H heads, T tokens, E channels of one head, q sequence ranks

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trilithon.contracts import Collectives, Tag
from trilithon.errors import ConfigError
from trilithon.parallel import regions
from trilithon.parallel.loss import TokenLoss
from trilithon.parallel.sequence.exchange import heads_for_tokens, tokens_for_heads


class CutTokens(nn.Module):
    """This rank's T/q tokens of [B, T, ...]: rank i has the i-th run of neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Collectives | None = None
        self.multiple = 1  # what T has to be a multiple of: sequence ranks, times tensor ranks that cut norms

    def forward(self, x_BT: Tensor) -> Tensor:
        """Raises ConfigError, on every rank, when T is not a multiple of `multiple`."""
        regions.require_parts(x_BT.shape[1], self.multiple, "tokens")
        return x_BT if self.group is None else regions.part(x_BT, 1, self.group)


class HeadExchange(nn.Module):
    """core(query, key, value, ...) on all tokens of 1/q of the heads."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.group: Collectives | None = None
        self._tag = Tag("attention")

    def join(self, group: Collectives, name: str) -> None:
        """name: of this module, for the watchdog."""
        self.group, self._tag = group, Tag(name)

    def forward(self, query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, *rest: Any) -> Tensor:
        """[B, H, T/q, E] each -> [B, H, T/q, E]."""
        if self.group is None:
            out: Tensor = self.core(query_BHTE, key_BHTE, value_BHTE, *rest)
            return out
        scattered = heads_for_tokens((query_BHTE, key_BHTE, value_BHTE), self.group, self._tag)
        mixed = self.core(*scattered, *rest)
        return tokens_for_heads((mixed,), self.group, self._tag)[0]


def cut_sequences(model: nn.Module, group: Collectives) -> None:
    """Join the model to the sequence axis. Raises ConfigError for one that would see cut tokens as whole sequences."""
    cuts = [m for m in model.modules() if isinstance(m, CutTokens)]
    exchanges = [(name, m) for name, m in model.named_modules() if isinstance(m, HeadExchange)]
    losses = [m for m in model.modules() if isinstance(m, TokenLoss)]
    missing = [
        kind.__name__
        for kind, found in ((CutTokens, cuts), (HeadExchange, exchanges), (TokenLoss, losses))
        if not found
    ]
    if missing:
        raise ConfigError(
            f"mesh.sequence={group.world_size}, but {type(model).__name__} has no {' and no '.join(missing)}: its "
            "attention and its loss would see cut tokens as whole sequences. Build it with the modules of "
            "trilithon.parallel.sequence, or set mesh.sequence to 1."
        )
    for cut in cuts:
        cut.group, cut.multiple = group, cut.multiple * group.world_size
    for name, exchange in exchanges:
        exchange.join(group, name)
    for loss in losses:
        loss.cut_sequence(group)


def join_sequences(model: nn.Module) -> None:
    """Tokens are whole again: the inverse of `cut_sequences`."""
    for module in model.modules():
        if isinstance(module, CutTokens):
            module.group, module.multiple = None, 1
        elif isinstance(module, HeadExchange):
            module.group = None
        elif isinstance(module, TokenLoss):
            module.undo()
