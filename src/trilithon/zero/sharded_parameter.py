"""A parameter that keeps its shape, dtype and identity while only a slice of its values is here, and never lies.

While sharded, `param.data` is one NaN expanded to the true shape, and the object's class is `ShardedParameter`, whose
`__torch_function__` lets metadata through and hands every other use to the parameter's owner, which gathers the values
or raises. While whole, the class is the original one and `data` a view of the owner's flat buffer.

The autograd version counter moves by one when a parameter is sharded and back when it is whole again: an operator that
saved the weight (or a view of it) and runs its backward in between gets autograd's version error, not freed memory.
Identity and stage 3 are those of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trilithon.errors import ShardedParameterError


class Owner(Protocol):
    """Whoever holds the slices of a sharded parameter."""

    def make_whole(self, params: Sequence[nn.Parameter], use: str) -> None:
        """Give `params` their values, or raise ShardedParameterError saying how to ask for them."""
        ...

    def hold(self, params: Sequence[nn.Parameter], modify: int | None) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Whole inside the context; with `modify`, that rank's values are everybody's afterwards."""
        ...


_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Parameter -> function that gives its Owner, None when it is gone
_CLASSES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Parameter -> its class while whole

_SHAPES_ONLY: list[None] = []  # one entry for each open context

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "ndim", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_xpu", "is_mps", "itemsize", "nbytes",
    "_version", "output_nr", "names", "name", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "numel", "nelement", "size", "dim", "ndimension", "element_size", "is_floating_point", "is_complex", "is_signed",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "get_device", "__hash__", "__len__",
    "is_inference", "_is_view",
)  # fmt: skip


def _metadata() -> frozenset[Any]:
    allowed: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference}
    for name in _PROPERTIES:
        descriptor = getattr(torch.Tensor, name, None)
        if descriptor is not None and hasattr(descriptor, "__get__"):
            allowed.add(descriptor.__get__)
    for name in ("requires_grad", "grad"):
        allowed.add(getattr(torch.Tensor, name).__set__)
    allowed.update(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name))
    return frozenset(allowed)


_METADATA = _metadata()


def _sharded_in(values: Any) -> Iterator[ShardedParameter]:
    if isinstance(values, ShardedParameter):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _sharded_in(value)
    elif isinstance(values, dict):
        yield from _sharded_in(tuple(values.values()))


class ShardedParameter(nn.Parameter):
    """The class that a parameter wears while this rank holds only a slice of it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.stride or func is torch.Tensor.is_contiguous:
            like = torch.empty(args[0].shape, device="meta")  # the placeholder's strides are not the parameter's
            return func(like, *args[1:], **kwargs)
        if _SHAPES_ONLY and func is torch.Tensor.detach:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        waiting = list(_sharded_in((args, kwargs)))
        while waiting:
            owner = owner_of(waiting[0])
            owner.make_whole([param for param in waiting if owner_of(param) is owner], getattr(func, "__name__", "?"))
            waiting = [param for param in waiting if isinstance(param, ShardedParameter)]
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _refusal("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal("pickled")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(sharded over ranks, shape={tuple(self.shape)}, dtype={self.dtype})"


@contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, `detach` of a sharded parameter gives its shape and type without values ("meta"); nothing is gathered.

    For programs that ask `module.state_dict()` for names and shapes only.
    """
    _SHAPES_ONLY.append(None)
    try:
        yield
    finally:
        _SHAPES_ONLY.pop()


def _refusal(how: str) -> ShardedParameterError:
    return ShardedParameterError(
        f"a sharded parameter cannot be {how}: only a slice of its values is on this rank. Inside "
        "`with trilithon.zero.gathered(params):` it is whole; `engine.state_dict()` gives whole copies."
    )


def set_owner(param: nn.Parameter, owner: Owner, *, keep: bool) -> None:
    """From now on `owner` answers for the values of `param`.

    keep: as long as the parameter lives. An owner that holds the parameter itself must not be kept: neither would go.
    """
    _OWNERS[param] = (lambda: owner) if keep else weakref.ref(owner)
    if not isinstance(param, ShardedParameter):
        _CLASSES[param] = type(param)


def forget_owner(param: nn.Parameter) -> None:
    _OWNERS.pop(param, None)
    _CLASSES.pop(param, None)


def owner_of(param: nn.Parameter) -> Owner:
    owner = find_owner(param)
    if owner is None:
        raise ShardedParameterError(
            f"the engine that held the slices of this parameter of shape {tuple(param.shape)} is gone, and with it the "
            "values. Keep the engine, and call engine.close() to get an ordinary model back."
        )
    return owner


def find_owner(param: Tensor) -> Owner | None:
    """The owner of `param`, or None for an ordinary tensor."""
    found = _OWNERS.get(param)
    owner: Owner | None = found() if found is not None else None
    return owner


_NAN: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _placeholder(param: Tensor, shape: torch.Size) -> Tensor:
    key = (param.dtype, param.device)
    if key not in _NAN:
        value = float("nan") if param.dtype.is_floating_point or param.dtype.is_complex else 0
        _NAN[key] = torch.full((), value, dtype=param.dtype, device=param.device)
    return _NAN[key].expand(shape)


def put_away(params: Sequence[nn.Parameter]) -> None:
    """Whole -> sharded. The caller may free the memory behind the values afterwards."""
    for param in params:
        param.data = _placeholder(param, param.shape)
    _move_versions(params, 1)
    for param in params:
        param.__class__ = ShardedParameter


def bring_back(params: Sequence[nn.Parameter], values: Sequence[Tensor], *, rewind: bool = True) -> None:
    """Sharded -> whole, with `values` as data. rewind: the values are those that saved graphs remember."""
    for param, value in zip(params, values, strict=True):
        param.__class__ = _CLASSES.get(param, nn.Parameter)
        param.data = value
    if rewind:
        _move_versions(params, -1)


def _move_versions(params: Sequence[nn.Parameter], by: int) -> None:
    if params:
        versions = tuple(param._version + by for param in params)
        torch._C._autograd._unsafe_set_version_counter(tuple(params), versions)
