"""Lookups of host names that may hang: their threads are few, and their answers are shared."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.connection import lookups as lookups_module
from reliable_mq.connection.lookups import MOST, PATIENCE, Lookup, Lookups
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Resolver:
    """A resolver that answers a name when it is told to."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.daemons: list[bool] = []
        self._may_answer: dict[str, threading.Event] = {}

    def __call__(self, host: str, port: int, *rest: int) -> list[Any]:
        if rest[-1] == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self.daemons.append(threading.current_thread().daemon)
        self.asked[host] += 1
        assert self._event(host).wait(30)
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    def answer(self, *hosts: str) -> None:
        for host in hosts:
            self._event(host).set()

    def _event(self, host: str) -> threading.Event:
        return self._may_answer.setdefault(host, threading.Event())


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.answer(*resolver.asked)


class Caller:
    """A caller with a loop that runs its calls in `turn`."""

    def __init__(self, lookups: Lookups, host: str, port: int = 5672) -> None:
        self.answers: list[Any] = []
        self.calls: list[Callable[[], None]] = []
        self.lookup: Lookup = lookups.find(host, port, self.answers.append, self.calls.append)

    def turn(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    @property
    def answer(self) -> Any:
        wait_until(lambda: self.calls, timeout=30, what="an answer")
        self.turn()
        (answer,) = self.answers
        return answer


def test_all_who_ask_for_a_host_wait_for_the_same_answer(resolver: Resolver) -> None:
    lookups = Lookups()
    callers = [Caller(lookups, "rabbit") for _ in range(50)]
    other = Caller(lookups, "rabbit", 5671)
    wait_until(lambda: resolver.asked["rabbit"] == 2, timeout=30, what="one lookup for each port")
    resolver.answer("rabbit")
    assert [caller.answer[0][-1] for caller in callers] == [("rabbit", 5672)] * 50
    assert other.answer[0][-1] == ("rabbit", 5671)
    assert Caller(lookups, "rabbit").answer
    assert resolver.asked["rabbit"] == 3, "an answer is not kept"
    assert all(resolver.daemons)


def test_an_answer_comes_once_and_not_after_a_cancel(resolver: Resolver) -> None:
    lookups = Lookups()
    early, late, waiting = (Caller(lookups, "rabbit") for _ in range(3))
    assert early.lookup.cancel() is True
    assert early.lookup.cancel() is False
    resolver.answer("rabbit")
    wait_until(lambda: late.calls, timeout=30, what="an answer")
    assert late.lookup.cancel() is True
    assert waiting.answer
    assert waiting.lookup.cancel() is False
    late.turn()
    early.turn()
    assert (early.answers, late.answers) == ([], [])


def test_the_error_of_a_lookup_is_its_answer(resolver: Resolver) -> None:
    resolver.answer("unknown")
    assert isinstance(Caller(Lookups(), "unknown").answer, socket.gaierror)


def test_few_lookups_run_and_the_others_wait_for_their_turn(resolver: Resolver) -> None:
    lookups = Lookups()
    hosts = [f"host{number}" for number in range(MOST + 3)]
    callers = [Caller(lookups, host) for host in hosts]
    callers[MOST].lookup.cancel()
    wait_until(lambda: resolver.asked.total() == MOST, timeout=30, what="lookups")
    resolver.answer(*hosts)
    for caller in (*callers[:MOST], *callers[MOST + 1 :]):
        assert caller.answer
    assert hosts[MOST] not in resolver.asked, "nobody waits for it"


def test_a_lookup_that_hangs_is_begun_again_ever_more_rarely(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(lookups_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lookups = Lookups()
    caller = Caller(lookups, "rabbit")
    for begun in range(1, 4):
        wait_until(lambda begun=begun: resolver.asked["rabbit"] == begun, timeout=30, what="another lookup")
        wait = PATIENCE * 2 ** (begun - 1)
        for part in (0.9, 0.2):
            now[0] += part * wait
            caller.lookup.cancel()
            caller = Caller(lookups, "rabbit")
            assert resolver.asked["rabbit"] == begun or part == 0.2
    wait_until(lambda: resolver.asked["rabbit"] == 4, timeout=30, what="the fourth lookup")
    resolver.answer("rabbit")
    assert caller.answer
    wait_until(lambda: not lookups._hosts, timeout=30, what="the end of all lookups")


def test_an_address_is_not_looked_up() -> None:
    """No thread is used, and the answer comes after the call."""
    threads = set(threading.enumerate())
    callers = [Caller(Lookups(), address) for address in ("127.0.0.1", "::1")]
    assert set(threading.enumerate()) <= threads
    assert [caller.answer[0][-1][:2] for caller in callers] == [("127.0.0.1", 5672), ("::1", 5672)]


def test_a_forked_child_looks_up_what_its_parent_waits_for(resolver: Resolver) -> None:
    lookups = Lookups()
    parents = Caller(lookups, "rabbit")
    wait_until(lambda: resolver.asked["rabbit"] == 1, timeout=30, what="a lookup")

    child = os.fork()
    if not child:
        try:
            resolver.__init__()  # type: ignore[misc]  # a thread of the parent may hold a lock
            resolver.answer("rabbit")
            os._exit(0 if Caller(lookups, "rabbit").answer else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parents.answers == []
