"""A model as a list of layers: what a pipeline cuts, for any class of model.

A model says how it is one with `pipeline_layers()`, and what its loss is with `pipeline_loss(output, labels)`;
`PipelineModule` does so for a list that you write down, and a `torch.nn.Sequential` is taken as it is. Parameters keep
the names that they have in the whole model, whichever stage they are on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

from torch import Tensor, nn

from trilithon.errors import ConfigError, ProtocolError

Run = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """One entry of the list.

    run: takes what the layer before returned (the first one: the inputs of a micro-batch) and returns a tensor, or any
    nesting of tuples, lists and dictionaries of tensors. modules: names of the modules that it uses, at least all with
    parameters; one that several layers name is shared by them. kind: the name of its class. parameters: trainable
    elements.
    """

    run: Run
    modules: tuple[str, ...]
    kind: str
    parameters: int = 0


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut into stages."""

    def pipeline_layers(self) -> Sequence[Layer]: ...

    def pipeline_loss(self, output: Any, labels: Any) -> Tensor:
        """The mean loss [] of one micro-batch."""
        ...


class LayerSpec:
    """A layer that is built only where it is needed: `LayerSpec(nn.Linear, 16, 32, bias=False)`."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                f"LayerSpec takes a class of torch.nn.Module and what its constructor takes; got {typename!r}. Put "
                "functions and modules into the list of layers as they are."
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer whose module is that of every other one with the same key, on whichever stage.

    forward_fn(module, x): what this entry computes with it; None for the module's own forward. tied_weight_attr: name
    of an attribute, or names, that must be there. All of the module's parameters are tied, as they would be in one
    process.
    """

    def __init__(
        self, key: str, typename: type[nn.Module], *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None, tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def build(self) -> nn.Module:
        module = super().build()
        for path in self.tied_weight_attr:
            found: Any = module
            for attribute in path.split("."):
                found = getattr(found, attribute, None)
            if not isinstance(found, nn.Parameter):
                raise ConfigError(
                    f"the layer with key {self.key!r} has no parameter {path!r}: name it in tied_weight_attr. "
                    f"{self.typename.__name__} has {[name for name, _ in module.named_parameters()]}."
                )
        return module


class Elsewhere(nn.Module):
    """In place of a module that another stage has. It may hold parameters that are shared with a layer of this one."""

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        raise ProtocolError(
            "this layer is on another stage of the pipeline. Train with engine.train_step(batches) and evaluate with "
            "engine.eval_step(batches), which run all stages."
        )


def is_part(model: nn.Module) -> bool:
    """Some layers of the model are on other stages."""
    plan = getattr(model, "plan", None)
    return bool(getattr(plan, "stages", 1) > 1) or any(isinstance(module, Elsewhere) for module in model.modules())


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model. Raises ConfigError for one that does not say what they are."""
    if isinstance(model, Layered):
        return list(model.pipeline_layers())
    if type(model) is nn.Sequential:
        return [
            Layer(_of_child(model, name), (name,), type(child).__name__, trainable_numel(child))
            for name, child in model.named_children()
        ]
    raise ConfigError(
        f"a {type(model).__name__} does not say how it is a list of layers, so it cannot be cut into stages. Write it "
        "as trilithon.PipelineModule([...], loss_fn=...) or torch.nn.Sequential, give its class the methods "
        "pipeline_layers() and pipeline_loss(), or set mesh.pipe to 1."
    )


def _of_child(model: nn.Module, name: str) -> Run:
    def run(x: Any) -> Any:  # the module is looked up at each call: it may have been replaced meanwhile
        return model.get_submodule(name)(x)

    return run


def trainable_numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def shared_parameters(model: nn.Module, layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """Parameters that several layers use, by their first name -> those layers. Raises ConfigError for one in none."""
    first = {id(param): name for name, param in model.named_parameters()}
    users: dict[str, list[int]] = {name: [] for name in first.values()}
    for index, layer in enumerate(layers):
        for name in dict.fromkeys(
            first[id(p)] for module in layer.modules for p in model.get_submodule(module).parameters()
        ):
            users[name].append(index)
    lost = [name for name, indices in users.items() if not indices]
    if lost:
        raise ConfigError(f"{lost[:4]} belong to no layer of the list, so no stage would have them: add them to one.")
    return {name: tuple(indices) for name, indices in users.items() if len(indices) > 1}


def drop_layers(model: nn.Module, layers: Sequence[Layer], kept: Collection[int]) -> None:
    """Leave a whole model the modules of some of its layers; a shared parameter keeps its first name."""
    first = {id(param): name for name, param in model.named_parameters()}
    here = {name for index in kept for name in layers[index].modules}
    alive = {id(p): p for name in here for p in model.get_submodule(name).parameters()}
    gone = [name for layer in layers for name in layer.modules if name not in here]
    for name in dict.fromkeys(gone):
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Elsewhere())
    present = {id(param) for _, param in model.named_parameters() if id(param) in alive}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for key in present:
        if first[key] not in names:
            _register(model, first[key], alive[key])


def _register(model: nn.Module, name: str, param: nn.Parameter) -> None:
    """Under its first name, in the place of a module that is gone."""
    *path, attribute = name.split(".")
    owner = model
    for step in path:
        if step not in owner._modules:
            owner.add_module(step, Elsewhere())
        owner = owner.get_submodule(step)
    owner.register_parameter(attribute, param)
