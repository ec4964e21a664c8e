"""One server of ranks and one set of published models for all tests of clients, and a table of how the clients did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import OTHER_PYTHON, RankServer
from published import Published, publish


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    server = RankServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With another `deepspeed` under test, our own commands are not asked."""
    ours = [item for item in items if OTHER_PYTHON and item.path.name == "test_clients_commands.py"]
    if ours:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line per client: how many tests passed and failed, and the seconds they took together."""
    counted: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            client = Path(report.nodeid.split("::")[0]).stem.removeprefix("test_clients_")
            counted[client][outcome] += 1
            counted[client]["seconds"] += report.duration
    if not counted:
        return
    terminalreporter.section("clients")
    terminalreporter.write_line(f"{'client':<14}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for client, row in sorted(counted.items()):
        failed = row["failed"] + row["error"]
        terminalreporter.write_line(f"{client:<14}{row['passed']:>8.0f}{failed:>8.0f}{row['seconds']:>9.0f}")
