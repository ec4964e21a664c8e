"""`deepspeed.ops`: optimizers by name. They are torch optimizers; an engine runs their rule over slices."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver

__compatible_ops__: dict[str, bool] = {
    "cpu_adam": True,
    "cpu_adagrad": True,
    "cpu_lion": True,
    "fused_adam": True,
    "fused_lamb": True,
    "fused_lion": True,
    "async_io": True,
    "sparse_attn": False,
    "transformer": False,
    "transformer_inference": False,
    "quantizer": False,
    "gds": False,
}
__installed_ops__ = dict.fromkeys(__compatible_ops__, False)  # nothing has to be built beforehand

_INSTEAD = {
    "aio": "offload.path in the configuration names where state rests on disk; trilithon.tiers has the files.",
    "transformer": "Models keep their own layers; torch.compile makes them fast.",
    "sparse_attention": "torch.nn.attention.flex_attention has block-sparse attention.",
    "quantizer": "Quantisation is not in this version.",
    "fp_quantizer": "Quantisation is not in this version.",
}

__getattr__ = resolver(__name__, {}, ("adagrad", "adam", "lamb", "lion", "muon", "op_builder"), _INSTEAD)
