"""Who talks, and what it costs: meshes, collectives with handles, the ledger of bytes and the watchdog.

`collectives.Group` is the entry; `mesh` makes its process groups, `ledger.Ledger` counts, `watchdog.Watchdog` names the
rank that is missing. See docs/comm.md.
"""
