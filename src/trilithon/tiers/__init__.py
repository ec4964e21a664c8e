"""Where bytes live: memory for state that stays for the whole run."""

from __future__ import annotations

from trilithon.tiers.resident import filled, resident, settle

__all__ = ["filled", "resident", "settle"]
