"""Results of some operators that stay, so that recomputation does not repeat them: products, but not what lies between.

Matrix products are most of a block's arithmetic and little of its memory, softmax, dropout and activation functions the
reverse: keeping the results of the former and computing the latter again costs little time for most of the memory
(Korthikanti et al. 2022, arXiv:2205.05198, section 5). Which results stay is said as for torch's selective checkpoint:
by a policy that is asked about each operator, here usually made from patterns of operator names.

torch's own replay matches operators by their count, and stops at every one that it did not see in forward. Under ZeRO,
parameters are gathered at other times in backward than in forward, inside blocks too. So the replay here counts kept
operators only, and lets the others run. It also keeps results until the block's graph is gone, so that backward can run
twice.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from trilithon.errors import ProtocolError

_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
Policy = Callable[..., CheckpointPolicy | bool]
"""(SelectiveCheckpointContext, operator, *args, **kwargs) -> whether its result stays."""


def keep_named(patterns: Sequence[str]) -> Policy:
    """A policy that keeps the results of operators with such names, as in "aten::mm" or "aten::*attention*"."""
    decided: dict[Any, CheckpointPolicy] = {}

    def policy(_context: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        found = decided.get(operator)
        if found is None:
            name = operator._schema.name
            wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
            found = decided[operator] = CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE
        return found

    return policy


class KeptResults:
    """What one call of a block keeps: `record` around its forward, `replay` around each recomputation."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._calls: dict[Any, list[_Result | None]] = defaultdict(list)  # None: to be computed again
        self._kept: set[Any] = set()  # operators of which at least one result stays

    def record(self) -> AbstractContextManager[Any]:
        return _Record(self)

    def replay(self) -> AbstractContextManager[Any]:
        return _Replay(self)

    @property
    def bytes(self) -> int:
        return sum(result.bytes for calls in self._calls.values() for result in calls if result is not None)

    def _wants(self, operator: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> bool:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=output)
        answer = self._policy(context, operator, *args, **kwargs)
        return answer if isinstance(answer, bool) else answer in _SAVED


class _Result:
    """The tensors of one operator's output, and a notice when something writes over them."""

    def __init__(self, operator: Any, output: Any) -> None:
        self._operator = operator
        leaves, self._spec = pytree.tree_flatten(output)
        self._leaves = [_alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]

    @property
    def bytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in self._leaves if isinstance(leaf, Tensor))

    def again(self) -> Any:
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if isinstance(leaf, Tensor) and leaf._version != version:
                raise ProtocolError(
                    f"a result of {self._operator} of shape {tuple(leaf.shape)} was kept for backward "
                    "(recompute.keep_ops), and the block has written over it since. Write to a copy, or leave the "
                    "operator out of recompute.keep_ops."
                )
        fresh = [_alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(fresh, self._spec)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, whose changes are noticed; an ordinary detach, inside a dispatch mode, counts them apart."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Record(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._results = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output, results = func(*args, **kwargs), self._results
        wanted = results._wants(func, args, kwargs, output)
        if wanted:
            results._kept.add(func)
        results._calls[func].append(_Result(func, output) if wanted else None)
        return output


class _Replay(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._results = kept
        self._counts: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = self._results
        if func not in results._kept:
            return func(*args, **(kwargs or {}))
        place, calls = self._counts[func], results._calls[func]
        self._counts[func] += 1
        if place >= len(calls):
            raise ProtocolError(
                f"a recomputed block calls {func} more often than in its forward ({len(calls)} times), so it is not "
                "known which of its results were kept. The block must do the same both times; or leave the operator "
                "out of recompute.keep_ops."
            )
        result = calls[place]
        return func(*args, **(kwargs or {})) if result is None else result.again()
