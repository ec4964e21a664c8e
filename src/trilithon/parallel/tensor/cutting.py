"""A model cut over tensor ranks: layers replaced once, parameters in place, and the way back.

Every parameter keeps its object and its name; its values become this rank's part. ZeRO, optimizers and hooks then see
an ordinary smaller model. What was cut, and how, is the table `slices`, from which whole parameters are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trilithon.contracts import Collectives, Tag
from trilithon.errors import ConfigError
from trilithon.parallel import regions
from trilithon.parallel.dropout import Dropout
from trilithon.parallel.loss import TokenLoss
from trilithon.parallel.sequence.modules import CutTokens
from trilithon.parallel.slicing import ParameterSlice
from trilithon.parallel.tensor.embedding import VocabularyEmbedding
from trilithon.parallel.tensor.linear import ColumnLinear, Fan, RowLinear
from trilithon.parallel.tensor.plan import COUNTS, Plan, Step, is_transposed, make_plan
from trilithon.parallel.tensor.streams import SlicedStream

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class Cutting:
    """What `cut_model` did to one model.

    slices: by name, every parameter that is cut; the others are whole and equal on all ranks of `group`. summed: names
    of those whole ones that compute on cut tensors, so that each rank gets a part of their gradient: whoever reduces
    gradients has to add the parts up.
    """

    def __init__(self, model: nn.Module, group: Collectives, cut_norms: bool) -> None:
        self.model, self.group, self.cut_norms = model, group, cut_norms
        self.slices: dict[str, ParameterSlice] = {}
        self.summed: frozenset[str] = frozenset()
        self.stream: SlicedStream | None = None  # which random numbers are drawn, where the model draws torch's
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._counts: list[tuple[nn.Module, str, int]] = []
        self._handles: list[RemovableHandle] = []

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Collective: the whole of something shaped as this rank's part of parameter `name`, on every rank."""
        cut = self.slices.get(name)
        if cut is None:
            return local
        parts = local.new_empty(self.group.world_size, *local.shape)
        self.group.all_gather(parts.view(-1), local.contiguous().view(-1), Tag("whole parameter", (name,))).wait()
        return cut.assemble(parts.unbind(0))

    @torch.no_grad()
    def undo(self) -> None:
        """Collective: the model has its own layers and whole parameters again. Called when its values are all here."""
        for name, param in self.model.named_parameters():
            if name in self.slices:
                param.data = self.whole(name, param.data)
        for parent, attribute, layer in reversed(self._replaced):
            setattr(parent, attribute, layer)
        for module, attribute, count in self._counts:
            setattr(module, attribute, count)
        for handle in self._handles:
            handle.remove()
        for module in self.model.modules():
            if isinstance(module, TokenLoss):
                module.undo()
            elif isinstance(module, CutTokens) and self.cut_norms:
                module.multiple //= self.group.world_size


@torch.no_grad()
def cut_model(
    model: nn.Module, group: Collectives, *, plan: Mapping[str, str] | None = None, cut_norms: bool = False,
    values_of: Callable[[nn.Parameter], Tensor] = lambda param: param.data, device: torch.device | None = None,
) -> Cutting:  # fmt: skip
    """Cut `model` over the ranks of `group`. Collective; the parts are those of rank 0's values.

    plan: patterns of module names to styles (see `plan`); None for the model's own, or the one that is found.
    cut_norms: between the matrices each rank has T/t of the tokens. values_of: whole values of a parameter.
    Raises ConfigError, before anything is communicated, for what does not divide.
    """
    made = make_plan(model, plan)
    cutting = Cutting(model, group, cut_norms)
    names = {id(param): name for name, param in model.named_parameters()}
    if cut_norms:
        _require_cut_norms(model, made)
    for step in made.steps:
        _declare(cutting, names, step)
    counts = _counts(model, made, group.world_size)
    for name, param in model.named_parameters():
        whole = values_of(param).contiguous()
        group.broadcast(whole, 0, Tag("initial values", (name,))).wait()
        cut = cutting.slices.get(name)
        param.data = whole if cut is None else cut.cut(whole)
    for module, attribute, count in counts:
        cutting._counts.append((module, attribute, count))
        setattr(module, attribute, count // group.world_size)
    _replace_layers(cutting, made, names, device or torch.device("cpu"))
    summed = {id(param) for step in made.steps if step.style == "summed" for param in step.module.parameters()}
    if cut_norms:
        summed |= _cut_norms(cutting, made, names)
    cutting.summed = frozenset(names[key] for key in summed)
    return cutting


def _declare(cutting: Cutting, names: Mapping[int, str], step: Step) -> None:
    """Write down the cut of the step's parameters."""
    if step.style in ("tokens", "summed"):
        return
    group = cutting.group
    weight, bias = step.module.weight, getattr(step.module, "bias", None)
    assert isinstance(weight, nn.Parameter)
    transposed = is_transposed(step.module)
    by_rows = step.style in ("row", "row_split")
    dim = int(by_rows) ^ int(transposed)
    pad = step.style in ("vocabulary", "logits", "gathered")
    wanted = [(weight, dim)] + ([(bias, 0)] if bias is not None and not by_rows and step.style != "vocabulary" else [])
    for param, along in wanted:
        name = names[id(param)]
        cut = ParameterSlice.of(
            name,
            param.shape,
            dim=along,
            degree=group.world_size,
            index=group.rank,
            blocks=step.blocks,
            pad=pad and not transposed,
        )
        if cutting.slices.setdefault(name, cut) != cut:
            raise ConfigError(
                f"parameter '{name}' is shared by layers that are cut in different ways, one of them '{step.name}'. "
                "Give tensor.plan without one of them."
            )


def _counts(model: nn.Module, plan: Plan, degree: int) -> list[tuple[nn.Module, str, int]]:
    """Counts of heads on the modules that hold cut products, which must divide."""
    parents = dict.fromkeys(step.name.rpartition(".")[0] for step in plan.steps if step.style == "column")
    found = []
    for name in parents:
        module = model.get_submodule(name)
        for attribute in COUNTS:
            count = getattr(module, attribute, None)
            if isinstance(count, int) and not isinstance(count, bool):
                if count % degree:
                    raise ConfigError(
                        f"{name}.{attribute}={count} does not split over {degree} tensor ranks. Use a mesh.tensor that "
                        "divides it."
                    )
                found.append((module, attribute, count))
    return found


def _replace_layers(cutting: Cutting, plan: Plan, names: Mapping[int, str], device: torch.device) -> None:
    group, cut_norms = cutting.group, cutting.cut_norms
    stream = SlicedStream(group.rank, device) if _draws_from_torch(cutting.model) else None
    cutting.stream = stream
    losses = [module for module in cutting.model.modules() if isinstance(module, TokenLoss)]
    fans: dict[str, list[ColumnLinear]] = {}
    for step in plan.steps:
        layer: nn.Module
        transposed = is_transposed(step.module)
        if step.style in ("tokens", "summed"):
            continue
        if step.style in ("row", "row_split"):
            split = step.style == "row_split"
            layer = row = RowLinear(
                step.module, group, step.name, cut_tokens=cut_norms, split_input=split, transposed=transposed
            )
            row.stream = stream
        elif step.style == "vocabulary":
            assert isinstance(step.module, nn.Embedding)
            cut = cutting.slices[names[id(step.module.weight)]]
            layer = VocabularyEmbedding(step.module, group, step.name, cut, cut_tokens=cut_norms)
        else:
            left_cut = step.style == "column" or (step.style == "logits" and len(losses) == 1)
            layer = column = ColumnLinear(
                step.module, group, step.name, cut_tokens=cut_norms, gather_output=not left_cut, transposed=transposed
            )
            if step.style == "column":
                fans.setdefault(step.name.rpartition(".")[0], []).append(column)
                column.stream = stream
            else:
                cut = cutting.slices[names[id(step.module.weight)]]
                column.valid = cut.shape[cut.dim]
                if left_cut:
                    losses[0].cut_vocabulary(group, cut)
        _put(cutting, step.name, layer)
    for parent, columns in fans.items():
        if len(columns) > 1:
            fan = Fan(group, len(columns), Tag(f"{parent} input"), cut_tokens=cut_norms)
            for column in columns:
                column.fan = fan


def _put(cutting: Cutting, name: str, layer: nn.Module) -> None:
    """Replace a layer under its name; what hooks it carries go along."""
    parent_name, _, attribute = name.rpartition(".")
    parent = cutting.model.get_submodule(parent_name)
    old = parent.get_submodule(attribute)
    for key in _HOOKS:
        setattr(layer, key, getattr(old, key))
    cutting._replaced.append((parent, attribute, old))
    setattr(parent, attribute, layer)


def _draws_from_torch(model: nn.Module) -> bool:
    """Dropout layers of torch, or a rate that attention passes to torch."""
    for module in model.modules():
        if isinstance(module, Dropout):
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("drop" in key and isinstance(value, float) and value > 0 for key, value in vars(module).items()):
            return True
    return False


# ---------------------------------------------------------------------------------------------------- cut norms
def _require_cut_norms(model: nn.Module, plan: Plan) -> None:
    if not plan.own_words:
        raise ConfigError(
            f"tensor.cut_norms needs a plan written for it: between its matrices {type(model).__name__} may compute "
            "with whole sequences, which nobody has checked. Give tensor.plan with every layer that is cut, or leave "
            "tensor.cut_norms out."
        )
    if not any(step.style == "vocabulary" for step in plan.steps):
        raise ConfigError(
            "tensor.cut_norms cuts tokens where the token embedding leaves its sum, but no layer of the plan is "
            'cut as "vocabulary". Add the embedding to tensor.plan.'
        )


def _cut_norms(cutting: Cutting, plan: Plan, names: Mapping[int, str]) -> set[int]:
    """Ids of the parameters that are used on a part of the tokens from now on: their gradients are to be summed."""
    group = cutting.group
    before_the_cut: set[int] = set()
    for step in plan.steps:
        if step.style == "tokens":
            before_the_cut.update(id(param) for param in step.module.parameters())
            cutting._handles.append(step.module.register_forward_hook(_part_of_tokens(group, Tag(step.name))))
    for module in cutting.model.modules():
        if isinstance(module, CutTokens):
            module.multiple *= group.world_size
    return {key for key, name in names.items() if name not in cutting.slices} - before_the_cut


def _part_of_tokens(group: Collectives, tag: Tag) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda _module, _inputs, output: regions.own_part(output, -2, group, tag)
