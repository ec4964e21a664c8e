"""One server of ranks and one set of published models for all tests of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launching import RankServer
from published import Published, publish


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    server = RankServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()
