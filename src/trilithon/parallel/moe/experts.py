"""The experts of one layer: the parameters of all of them stacked along a first dimension, and how they are run.

A parameter that one expert calls `up.weight` is one parameter `up.weight` of shape [experts, ...] here. On one rank the
first dimension holds all experts; on several each rank holds a contiguous part of it, so that a rank's block is a range
of the whole parameter and checkpoints know experts by their global number.

Feed-forward blocks run as batched products, or as one product per expert where that is faster (`products`); any other
module runs once per expert on its rows, with its slice of the stack. An expert without tokens takes part with zero
rows, so that every parameter has a gradient on every rank.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trilithon.errors import ConfigError
from trilithon.parallel.moe import products
from trilithon.parallel.moe.forms import recognise

logger = logging.getLogger(__name__)

_FEW_ROWS, _NARROW = 64, 256  # beyond either, products one by one are faster on a CPU than batched ones (measured)

Init = Literal["independent", "copy"]
Expert = nn.Module | Callable[[], nn.Module]


class Stacked(nn.Module):
    """Holds the stacked parameters of one submodule of the expert, under their names. It has no forward of its own."""

    def __init__(self, experts: Experts, path: str) -> None:
        super().__init__()
        self._experts, self._path = [experts], path  # in a list: the parent is no submodule

    def reset_parameters(self) -> None:
        """Initial values for what is here, each expert by itself; the same ones on however many ranks."""
        self._experts[0].fill(self._path, self)


class Experts(nn.Module):
    """`num_experts` experts like `expert`.

    expert: a module, whose structure all share, or a function that makes one. init: "independent" draws the values of
    each expert anew (by `reset_parameters` of the parts of the module, or by calling the function), "copy" starts all
    from the module's own. The parameters of a part without `reset_parameters` are copied in any case.
    Raises ConfigError for experts with buffers, without parameters, or of different shapes.
    """

    def __init__(self, expert: Expert, num_experts: int, init: Init = "independent") -> None:
        super().__init__()
        self.num_experts, self.first, self.here = num_experts, 0, num_experts
        self._base = int(torch.randint(2**62, (), device="cpu"))  # of each expert's own random states
        self._factory = None if isinstance(expert, nn.Module) else expert
        made = [expert] if isinstance(expert, nn.Module) else [self._make(g) for g in range(num_experts)]
        _refuse_unfit(made[0])
        self._init: Init = init if self._factory is None else "copy"
        self._hidden = [_without_values(made[0])]  # in a list: no submodule of ours
        self.form = recognise(self._hidden[0])
        self._grow(self, "", made)
        self.names = [name for name, _ in self.named_parameters()]

    # ---------------------------------------------------------------------------------------------- construction
    def _make(self, expert: int) -> nn.Module:
        assert self._factory is not None
        with _seeded(self._base, expert, ""):
            made = self._factory()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"the function that makes experts returned a {type(made).__name__}, not a Module.")
        return made

    def _grow(self, node: nn.Module, path: str, made: Sequence[nn.Module]) -> None:
        """Parameters of `node`, stacked from those of the part at `path`, and children for the parts inside it."""
        part = self._hidden[0].get_submodule(path)
        stacks = {}
        for name, like in part.named_parameters(recurse=False):
            values = [one.get_submodule(path).get_parameter(name).detach() for one in made]
            if any(value.shape != like.shape for value in values):
                shapes = sorted({tuple(value.shape) for value in values})
                raise ConfigError(f"experts differ in the shape of '{path}.{name}': {shapes}; make them alike.")
            stacks[name] = torch.stack([values[g % len(values)] for g in range(self.num_experts)])
        if self._init == "independent" and not any(stack.is_meta for stack in stacks.values()):
            self._draw(path, stacks)
        for name, stack in stacks.items():  # registered when they have their values: under zero.init they are cut then
            node.register_parameter(name, nn.Parameter(stack, part.get_parameter(name).requires_grad))
        for name, child in part.named_children():
            if any(True for _ in child.parameters()):
                below = f"{path}.{name}" if path else name
                branch = Stacked(self, below)
                node.add_module(name, branch)
                self._grow(branch, below, made)

    def reset_parameters(self) -> None:
        """Initial values for parameters that the expert holds itself, not in a part."""
        self.fill("", self)

    def fill(self, path: str, node: nn.Module) -> None:
        """Initial values for the experts here of one part, which `node` holds. Raises ConfigError if nothing tells."""
        if self._factory is not None:
            raise ConfigError(
                "experts made by a function cannot be built on the meta device; pass a module, or build them under "
                "trilithon.zero.init() without the meta device."
            )
        self._draw(path, {name: param.data for name, param in node.named_parameters(recurse=False)})

    def _draw(self, path: str, stacks: Mapping[str, Tensor]) -> None:
        """Values of one part from `reset_parameters` of a copy of it, expert by expert."""
        part = self._hidden[0].get_submodule(path)
        if not stacks or not callable(getattr(part, "reset_parameters", None)):
            varied = [name for name, stack in stacks.items() if stack[0].numel() and stack[0].min() != stack[0].max()]
            if varied:
                logger.warning("parameters %s of '%s': all experts start from the same values.", varied, path)
            return
        trial = copy.deepcopy(part).to_empty(device="cpu")
        for index in range(next(iter(stacks.values())).shape[0]):
            with torch.no_grad(), _seeded(self._base, self.first + index if self._init == "independent" else 0, path):
                trial.reset_parameters()  # type: ignore[operator]
                for name, stack in stacks.items():
                    stack[index].copy_(trial.get_parameter(name))

    # ------------------------------------------------------------------------------------------------ on ranks
    def hold_only(self, first: int, here: int) -> None:
        """From now on this rank holds the experts [first, first + here)."""
        low = first - self.first
        for param in self.parameters():
            param.data = param.data[low : low + here].clone()
        self.first, self.here = first, here

    # ----------------------------------------------------------------------------------------------- running
    def forward(self, rows: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """rows: [experts here, n, M], or [n, M] expert by expert with `counts` rows for each. Keeps the shape."""
        weights: dict[str, Tensor] = dict(zip(self.names, self.parameters(), strict=True))
        if self.form is not None and self._batched(rows, counts):
            return self.form.run(rows, weights)
        if self.form is not None and products.can_run(rows, weights):
            sizes = [rows.shape[1]] * self.here if counts is None else counts
            return products.run(rows.reshape(-1, rows.shape[-1]), sizes, self.form, weights).view(rows.shape)
        if counts is None:
            return torch.stack([self._run_one(x, w) for x, w in zip(rows.unbind(0), self._each(weights), strict=True)])
        parts = zip(rows.split(list(counts)), self._each(weights), strict=True)
        return torch.cat([self._run_one(x, w) for x, w in parts])

    @staticmethod
    def _batched(rows: Tensor, counts: Sequence[int] | None) -> bool:
        """As many rows for each expert, where a batched product is the fastest way."""
        small = rows.shape[-2] < _FEW_ROWS and rows.shape[-1] <= _NARROW
        return counts is None and (rows.device.type != "cpu" or small)

    def _each(self, weights: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The parameters of each expert here, as views; all of them take part in backward."""
        columns = {name: stacked.unbind(0) for name, stacked in weights.items()}
        for index in range(self.here):
            yield {name: column[index] for name, column in columns.items()}

    def _run_one(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        if self.form is not None:
            return self.form.run(x, weights)
        template = self._hidden[0]
        template.train(self.training)
        out: Any = functional_call(template, weights, (x,))
        out = with_bias(out)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ConfigError(f"an expert made {what} of rows {tuple(x.shape)}; it must keep their shape.")
        return out

    def extra_repr(self) -> str:
        how = f"{self.form.activation}, batched" if self.form is not None else "one at a time"
        return f"{self.first}..{self.first + self.here - 1} of {self.num_experts}, {how}"


def _without_values(module: nn.Module) -> nn.Module:
    """The same structure with parameters that have no memory."""
    empty: dict[int, Any] = {}
    for param in module.parameters():
        values = torch.empty(param.shape, dtype=param.dtype, device="meta")
        empty[id(param)] = nn.Parameter(values, param.requires_grad)
    return copy.deepcopy(module, empty)


def with_bias(out: Any) -> Any:
    """What a module returned; of a tuple, as in Megatron, (output, bias that the caller adds) or (output, None)."""
    if not isinstance(out, tuple):
        return out
    bias = next((extra for extra in out[1:] if isinstance(extra, Tensor)), None)
    return out[0] if bias is None else out[0] + bias


def dense_twin(expert: Expert) -> nn.Module:
    """A module like one expert, with values of its own."""
    if not isinstance(expert, nn.Module):
        return expert()
    if any(param.is_meta for param in expert.parameters()):
        return _without_values(expert)
    twin = _without_values(expert).to_empty(device=next(iter(expert.parameters())).device)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), expert.parameters(), strict=True):
            mine.copy_(theirs)
    for part in twin.modules():
        reset: Any = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
    return twin


def _refuse_unfit(sample: nn.Module) -> None:
    buffers = [name for name, _ in sample.named_buffers()]
    if buffers:
        raise ConfigError(
            f"the expert has buffers ({', '.join(buffers[:3])}), which cannot be stacked. Make them parameters with "
            "requires_grad=False, or compute them in forward."
        )
    if not any(True for _ in sample.parameters()):
        raise ConfigError(f"the expert {type(sample).__name__} has no parameters; routing to it would do nothing.")
    names = [name for name, _ in sample.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(sample.parameters())):
        raise ConfigError(f"the expert {type(sample).__name__} uses one parameter under two names; give it two.")


class _seeded:  # noqa: N801 (reads as a word where it is used)
    """Inside, the CPU's generator has a state that depends on these values only; afterwards the one it had."""

    def __init__(self, base: int, expert: int, path: str) -> None:
        digest = hashlib.blake2b(f"{base}|{expert}|{path}".encode(), digest_size=8).digest()
        self._seed = int.from_bytes(digest, "little") >> 1
        self._fork = torch.random.fork_rng(devices=[])

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        self._fork.__exit__(None, None, None)


__all__ = ["Expert", "Experts", "Init", "Stacked"]
