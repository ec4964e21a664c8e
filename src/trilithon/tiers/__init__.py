"""Where bytes live: memory for state that stays for the whole run, and the stores that keep it between uses."""

from __future__ import annotations

from trilithon.tiers.disk import RunFolder, free_bytes
from trilithon.tiers.disk_store import DiskStore
from trilithon.tiers.files import PAGE, File, FileIO, Ticket, page_up
from trilithon.tiers.link import HostLink, home_of
from trilithon.tiers.resident import filled, off_device, resident, settle
from trilithon.tiers.slice_file import SliceFile
from trilithon.tiers.staging import Lease, Staging
from trilithon.tiers.store import ResidentStore, SplitStore, bytes_by_tier

__all__ = [
    "PAGE",
    "DiskStore",
    "File",
    "FileIO",
    "HostLink",
    "Lease",
    "ResidentStore",
    "RunFolder",
    "SliceFile",
    "SplitStore",
    "Staging",
    "Ticket",
    "bytes_by_tier",
    "filled",
    "free_bytes",
    "home_of",
    "off_device",
    "page_up",
    "resident",
    "settle",
]
