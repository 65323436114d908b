"""What every store must do, for those that need no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reliable_mq.stores import Claim, ClaimStatus
from tests.stores import subjects
from tests.stores.contract import StoreContract
from tests.stores.linearizability import Event, explain
from tests.stores.subjects import Subject


@pytest.fixture(params=["memory", "sqlite", "sqlalchemy", "sqlalchemy_async"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    makers = {
        "memory": subjects.memory,
        "sqlite": lambda: subjects.sqlite(tmp_path),
        "sqlalchemy": lambda: subjects.sqlalchemy_sqlite(tmp_path),
        "sqlalchemy_async": lambda: subjects.sqlalchemy_async_sqlite(tmp_path),
    }
    with makers[request.param]() as made:
        yield made


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> int:
    return {"memory": 80, "sqlite": 25}.get(request.node.callspec.params["subject"], 10)


class TestStores(StoreContract):
    pass


def test_a_history_in_which_two_hold_a_key_is_refuted() -> None:
    """The checker of histories finds what is wrong, and only that."""

    def claimed(token: int, begun: float, status: ClaimStatus = ClaimStatus.NEW) -> Event:
        return Event("a", "claim", 0, Claim("a", status, token), begun, begun + 1)

    done = Event("a", "complete", 1, True, 2.0, 3.0)
    assert explain([claimed(1, 0.0), done, claimed(0, 4.0, ClaimStatus.DONE)])
    assert explain([claimed(1, 0.0), claimed(0, 0.5, ClaimStatus.IN_PROGRESS), done])
    assert explain([claimed(1, 0.5), claimed(0, 0.0, ClaimStatus.IN_PROGRESS), done])
    assert not explain([claimed(1, 0.0), claimed(2, 1.5)])
    assert not explain([claimed(1, 0.0), done, claimed(2, 4.0)])
    assert not explain([claimed(0, 0.0, ClaimStatus.IN_PROGRESS), claimed(1, 2.0)])
    assert not explain([claimed(1, 0.0), done, Event("a", "release", 1, True, 4.0, 5.0)])
    assert explain([claimed(1, 0.0)._replace(what="brief"), claimed(2, 1.5), done._replace(answer=False)])
    assert not explain([claimed(1, 0.0)._replace(what="brief"), claimed(2, 1.5), done._replace(begun=4, ended=5)])
