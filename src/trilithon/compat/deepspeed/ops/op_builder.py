"""`deepspeed.ops.op_builder`: nothing has to be built, so every builder says that it is ready and loads nothing."""

from __future__ import annotations

from typing import Any

from trilithon.compat.deepspeed.names import ROOT

_OPS = {
    **dict.fromkeys(("CPUAdamBuilder", "FusedAdamBuilder"), "ops.adam"),
    **dict.fromkeys(("CPULionBuilder", "FusedLionBuilder"), "ops.lion"),
    "CPUAdagradBuilder": "ops.adagrad",
    "FusedLambBuilder": "ops.lamb",
}


class OpBuilder:
    """A kernel that would have to be compiled. Ours compile themselves on first use."""

    NAME = "op"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def builder_available(self) -> bool:
        return True

    def absolute_name(self) -> str:
        return f"{ROOT}.{_OPS.get(self.NAME, 'ops')}"

    def load(self, verbose: bool = True) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__}.load(): there is no compiled module to call. The optimizer is "
            f"{_OPS.get(self.NAME, 'ops')}, and trilithon.kernels has what it runs."
        )


ALL_OPS: dict[str, type[OpBuilder]] = {name: type(name, (OpBuilder,), {"NAME": name}) for name in _OPS}
globals().update(ALL_OPS)
