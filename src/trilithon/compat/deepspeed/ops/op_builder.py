"""`deepspeed.ops.op_builder`: nothing has to be built, so every builder says that it is ready and loads nothing."""

from __future__ import annotations

from typing import Any

from trilithon.compat.deepspeed.names import ROOT

_OPS = {"Adam": ("CPU", "Fused"), "Lion": ("CPU", "Fused"), "Adagrad": ("CPU",), "Lamb": ("Fused",)}


class OpBuilder:
    """A kernel that would have to be compiled. Ours compile themselves on first use."""

    HOME = "ops"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    builder_available = is_compatible

    def absolute_name(self) -> str:
        return f"{ROOT}.{self.HOME}"

    def load(self, verbose: bool = True) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__}.load(): there is no compiled module to call. The optimizer is in {self.HOME}, and "
            "trilithon.kernels has what it runs."
        )


_HOMES = {f"{where}{op}Builder": f"ops.{op.lower()}" for op, kinds in _OPS.items() for where in kinds}
ALL_OPS = {name: type(name, (OpBuilder,), {"NAME": name, "HOME": home}) for name, home in _HOMES.items()}
globals().update(ALL_OPS)
