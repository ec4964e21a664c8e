"""`convert`: the feed-forward blocks of a model become layers of experts, in place.

    trilithon.moe.convert(model, num_experts=8, k=2, ep_size=4, where="*.mlp")      # a dense model
    trilithon.moe.convert(model, ep_size=4)                                         # Mixtral, Qwen-MoE and their like

The model around the blocks stays as it is: a converted block takes and returns what the block did. Its balance loss
reaches the router as a gradient that joins backward at the block's output, so that neither the model's code nor the
training loop knows of it; `load_report` tells what it was. Blocks that have experts already
keep their weights and give the same outputs, which is tried out on random tokens before the block is replaced.
(Experts that start as copies of a trained block: Komatsuzaki et al. 2022, arXiv:2212.05055.)
"""

# S tokens, E experts, M width, F inner width

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from trilithon.errors import ConfigError
from trilithon.parallel.moe.experts import with_bias
from trilithon.parallel.moe.foreign import Found, read_block
from trilithon.parallel.moe.forms import recognise
from trilithon.parallel.moe.layer import MoE

Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


class ConvertedBlock(nn.Module):
    """A layer of experts that takes and returns what the block in its place did: [..., M] -> [..., M].

    balance_coeff: of the balance loss in the gradient. shared, shared_gate: a dense block beside the experts, weighted
    by the sigmoid of a linear function of the token. with_logits: return (output, None), as blocks that also returned
    the router's scores did.
    """

    def __init__(
        self, moe: MoE, balance_coeff: float, *, shared: nn.Module | None = None, shared_gate: nn.Linear | None = None,
        with_logits: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.moe, self.shared, self.shared_gate = moe, shared, shared_gate
        self.balance_coeff, self.with_logits = balance_coeff, with_logits

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        y, balance, _counts = self.moe(hidden_states)
        if self.shared is not None:
            dense = with_bias(self.shared(hidden_states))
            y = y + (dense if self.shared_gate is None else torch.sigmoid(self.shared_gate(hidden_states)) * dense)
        if self.training and self.balance_coeff and balance.requires_grad:
            y = _WithLoss.apply(y, balance, self)
        return (y, None) if self.with_logits else y


class _WithLoss(Function):
    """y as it is; in backward `balance` gets the gradient that adding it to the loss would have given it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, balance: Tensor, block: ConvertedBlock) -> Tensor:
        ctx.block, ctx.like = block, balance.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        factor = ctx.block.balance_coeff * ctx.block.moe.loss_factor
        return grad, torch.tensor(factor, dtype=ctx.like, device=grad.device), None


def convert(
    model: nn.Module, num_experts: int | Sequence[int] | None = None, *, ep_size: int | None = 1, k: int | None = None,
    where: Where = None, every: int = 1, balance_coeff: float = 0.01, init: str = "copy", **options: Any,
) -> list[str]:  # fmt: skip
    """Replace feed-forward blocks of `model` by layers of experts; returns the names of the replaced blocks.

    num_experts: for dense blocks, or one number per replaced block in order (a pyramid). where: which blocks, as
    patterns of module names or a predicate on (name, module); None for every block with experts, or, if there is none,
    every plain feed-forward block. every: of those, each second one (2), and so on, ending with the last. init: "copy"
    starts all experts from the block's weights, "independent" draws new ones. Other arguments are those of `MoE`.
    Call it before the optimizer is made, since parameters are replaced.
    Raises ConfigError when nothing matches, or for a block with experts whose router works in a way of its own.
    """
    found = list(_blocks(model, where))
    if not found:
        raise ConfigError(f"no block of {type(model).__name__} matches where={where!r}; name modules, such as '*.mlp'.")
    chosen = found[::-1][::every][::-1]
    sparse = [name for name, _, experts in chosen if experts is not None]
    if not sparse and num_experts is None:
        raise ConfigError(f"{len(chosen)} dense blocks were found ({chosen[0][0]}, ...): num_experts is missing.")
    numbers = [num_experts] * len(chosen) if num_experts is None or isinstance(num_experts, int) else list(num_experts)
    if len(numbers) != len(chosen):
        raise ConfigError(f"num_experts names {len(numbers)} numbers for {len(chosen)} blocks: one for each, or one.")
    made = []
    for (name, block, experts), number in zip(chosen, numbers, strict=True):
        if experts is not None:
            new = _from_experts(name, block, experts, ep_size, k, balance_coeff, options)
        else:
            assert number is not None
            new = _from_dense(name, block, number, ep_size, k or 1, balance_coeff, init, options)
        made.append((name, new.train(block.training)))
    for name, new in made:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, new)
    return [name for name, _ in made]


def layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """(name, layer) of every layer of experts."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, MoE))


def load_report(model: nn.Module) -> dict[str, float]:
    """Of the last forward on this rank: "balance", the mean balance loss over layers; "drops", the share of choices
    that found no room; "busiest", the largest share of tokens on one expert over the uniform share, mean over layers.
    Empty before a forward."""
    last = [(layer, layer.last) for _, layer in layers(model) if layer.last is not None]
    if not last:
        return {}
    routed = sum(float(one.routed.sum()) for _, one in last)
    kept = sum(float(one.kept.sum()) for _, one in last)
    busiest = [float(one.routed.max()) / max(float(one.routed.sum()), 1) * layer.num_experts for layer, one in last]
    return {
        "balance": sum(float(one.balance) for _, one in last) / len(last),
        "drops": 1 - kept / routed if routed else 0.0,
        "busiest": sum(busiest) / len(busiest),
    }


def _blocks(model: nn.Module, where: Where) -> Iterator[tuple[str, nn.Module, Found | None]]:
    """(name, block, its experts if it has some), outermost first, none inside another."""
    patterns = [where] if isinstance(where, str) else where
    candidates = [(name, module, read_block(module)) for name, module in model.named_modules() if name]
    any_sparse = any(experts is not None for _, _, experts in candidates)
    inside: list[str] = [name for name, _ in layers(model)]
    for name, module, experts in candidates:
        if any(name == outer or name.startswith(f"{outer}.") for outer in inside):
            continue
        if callable(patterns):
            wanted = patterns(name, module)
        elif patterns is not None:
            wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        else:
            wanted = experts is not None if any_sparse else _is_plain(module)
        if wanted:
            inside.append(name)
            yield name, module, experts


def _is_plain(module: nn.Module) -> bool:
    few = sum(isinstance(part, nn.Linear) for part in module.modules()) in (2, 3)
    return few and recognise(module) is not None


def _from_dense(  # noqa: PLR0917 (called once)
    name: str, block: nn.Module, num_experts: int, ep_size: int | None, k: int, coeff: float, init: str,
    options: dict[str, Any],
) -> ConvertedBlock:  # fmt: skip
    width = _width(name, block)
    moe = MoE(width, block, num_experts, ep_size, k, expert_init=init, **options)  # type: ignore[arg-type]
    weight = next(block.parameters())
    moe.to(device=weight.device)
    return ConvertedBlock(moe, coeff)


def _width(name: str, block: nn.Module) -> int:
    form = recognise(block)
    if form is not None:
        return block.get_submodule(form.up).in_features  # type: ignore[return-value]
    for part in block.modules():
        if isinstance(part, nn.Linear):
            return part.in_features
        if isinstance(part, nn.LayerNorm):
            return int(part.normalized_shape[-1])
    first = next((param for param in block.parameters() if param.dim() == 2), None)
    if first is None:
        raise ConfigError(f"the width of block '{name}' ({type(block).__name__}) cannot be told: it has no matrix.")
    return int(first.shape[0])  # a matrix that is applied from the right


def _from_experts(  # noqa: PLR0917 (called once)
    name: str, block: nn.Module, found: Found, ep_size: int | None, k: int | None, coeff: float,
    options: dict[str, Any],
) -> ConvertedBlock:  # fmt: skip
    num_experts, width = found.router.shape
    settings = {
        "drop_tokens": False, "top2_2nd_expert_sampling": False,
        "norm_topk_prob": "post_drop" if found.normalised else "none", **options,
    }  # fmt: skip
    with torch.device("meta"):
        moe = MoE(width, found.template(), num_experts, ep_size, k or found.k, **settings)
    _put(moe.gate, "weight", found.router)
    for own, stack in found.stacks.items():
        holder, _, leaf = own.rpartition(".")
        _put(moe.experts.get_submodule(holder), leaf, stack)
    new = ConvertedBlock(
        moe, coeff, shared=found.shared, shared_gate=found.shared_gate, with_logits=found.returns_logits
    )
    if k in (None, found.k):
        _require_equal(name, block, new, found)
    return new


def _put(holder: nn.Module, name: str, values: Tensor) -> None:
    like = holder.get_parameter(name)
    setattr(holder, name, nn.Parameter(values.detach().clone(), like.requires_grad))


@torch.no_grad()
def _require_equal(name: str, block: nn.Module, new: ConvertedBlock, found: Found) -> None:
    """Both give the same outputs on a few random tokens, or the conversion is refused."""
    if found.router.is_meta:
        return
    training = block.training
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, found.router.shape[1], generator=generator)
    x = x.to(next(iter(found.stacks.values())).device, next(iter(found.stacks.values())).dtype)
    try:
        theirs, ours = block.eval()(x.clone()), new.eval()(x)
    finally:
        block.train(training)
    theirs, ours = (out[0] if isinstance(out, tuple) else out for out in (theirs, ours))
    limit = 64 * torch.finfo(x.dtype).eps * float(theirs.abs().max())
    if not float((theirs - ours).abs().max()) <= limit:
        raise ConfigError(
            f"block '{name}' ({type(block).__name__}) routes in a way of its own: converted, it would give other "
            f"outputs (by {float((theirs - ours).abs().max()):.1e} where {limit:.1e} is rounding). Leave it out with "
            "where=."
        )
