"""`deepspeed.module_inject`: modules are cut over tensor ranks by the engine, by plan or by the model's own."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

_WAY = "Set mesh.tensor and `tensor` in the configuration: matrices are cut by a plan, or by the model's own tp_plan."

LinearAllreduce = refused("module_inject.LinearAllreduce", _WAY)
LinearLayer = refused("module_inject.LinearLayer", _WAY)
replace_transformer_layer = refused("module_inject.replace_transformer_layer", _WAY)
revert_transformer_layer = refused("module_inject.revert_transformer_layer", _WAY)
set_autotp_mode = refused("module_inject.set_autotp_mode", _WAY)
