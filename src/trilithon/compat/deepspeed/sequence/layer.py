"""`deepspeed.sequence.layer`: attention over cut sequences is a matter of the configuration here."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

_WAY = "Set mesh.sequence in the configuration: attention layers are found and their heads are exchanged."

DistributedAttention = refused("sequence.layer.DistributedAttention", _WAY)
single_all_to_all = refused("sequence.layer.single_all_to_all", _WAY)
