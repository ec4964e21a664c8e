"""Where bytes live: memory for state that stays for the whole run, and the stores that keep it between uses."""

from __future__ import annotations

from trilithon.tiers.resident import filled, resident, settle
from trilithon.tiers.store import ResidentStore, bytes_by_tier

__all__ = ["ResidentStore", "bytes_by_tier", "filled", "resident", "settle"]
