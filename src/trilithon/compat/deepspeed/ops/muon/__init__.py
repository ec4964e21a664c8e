"""`deepspeed.ops.muon`."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

_WAY = "Pass torch.optim.Muon to initialize at zero stage 0, where every rank holds whole matrices."
MuonWithAuxAdam = refused("ops.muon.MuonWithAuxAdam", _WAY)
Muon = refused("ops.muon.Muon", _WAY)
