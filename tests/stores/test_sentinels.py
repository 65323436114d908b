"""Redis clients that ask Sentinels for the address of the master."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from reliable_mq import ConfigurationError
from reliable_mq.stores import AsyncRedisStore, Claim, ClaimStatus, RedisStore

KINDS: Any = pytest.mark.parametrize(
    ("store", "sentinel", "retry"),
    [
        (RedisStore, redis.sentinel.Sentinel, Retry(NoBackoff(), 0)),
        (AsyncRedisStore, redis.asyncio.sentinel.Sentinel, AsyncRetry(NoBackoff(), 0)),
    ],
    ids=["sync", "asyncio"],
)
NOWHERE = [("127.0.0.1", 1), ("127.0.0.1", 2)]


@KINDS
def test_sentinels_must_not_delay_a_call(store: Any, sentinel: Any, retry: Any) -> None:
    """A client's own settings do not apply to its Sentinels, other than timeouts."""

    def made(timeout: float = 5.0, **settings: Any) -> Any:
        client = sentinel(NOWHERE, sentinel_kwargs=settings or None, socket_timeout=1, retry=retry).master_for("m")
        return store(client, timeout=timeout)

    brief = {"socket_timeout": 1, "socket_connect_timeout": 1}
    for wrong in ({}, brief, {**brief, "socket_timeout": None, "retry": retry}):
        with pytest.raises(ConfigurationError, match=r"Sentinel\(\.\.\., sentinel_kwargs="):
            made(**wrong)
    made(**brief, retry=retry)


def test_on_asyncio_all_sentinels_are_asked_within_the_timeout() -> None:
    """Later calls would begin with the same Sentinels."""

    def make(connect_timeout: float, timeout: float) -> None:
        settings = {
            "socket_timeout": 1,
            "socket_connect_timeout": connect_timeout,
            "retry": AsyncRetry(NoBackoff(), 0),
        }
        sentinel = redis.asyncio.sentinel.Sentinel(NOWHERE, sentinel_kwargs=settings, socket_timeout=1)
        AsyncRedisStore(sentinel.master_for("m"), timeout=timeout)

    with pytest.raises(ConfigurationError, match="below the timeout"):
        make(1, 2.0)
    with pytest.raises(ConfigurationError, match="below the timeout"):
        make(2, 3.0)
    make(1, 2.1)


@KINDS
def test_a_claim_gets_past_a_sentinel_that_is_silent(store: Any, sentinel: Any, retry: Any) -> None:
    settings = {"protocol": 2, "socket_timeout": 1, "socket_connect_timeout": 1, "retry": retry}
    with socket.create_server(("127.0.0.1", 0)) as silent, server() as address:
        asked = sentinel([silent.getsockname(), address], sentinel_kwargs=settings, **settings)
        began = time.monotonic()
        claims = claimed(store, asked)
        assert time.monotonic() - began < 5
        assert claims == [Claim("key", ClaimStatus.NEW, 7, 0)]


@KINDS
def test_a_claim_leaves_a_master_without_replicas(store: Any, sentinel: Any, retry: Any) -> None:
    """A master that is cut off stays up, and refuses writes. The Sentinels name another one."""
    settings = {"protocol": 2, "socket_timeout": 2, "socket_connect_timeout": 2, "retry": retry}
    with server() as new, server(b"-NOREPLICAS Not enough good replicas to write.\r\n", then=new) as cut_off:
        asked = sentinel([cut_off], sentinel_kwargs=settings, **settings)
        assert claimed(store, asked) == [Claim("key", ClaimStatus.NEW, 7, 0)]


def claimed(store: Any, asked: Any) -> list[Claim]:
    """Claim a key at the master that the Sentinels name, and close all connections."""
    client = asked.master_for("m")
    made = store(client, timeout=5.0)
    if store is RedisStore:
        claims: list[Claim] = made.claim_many(["key"], 60.0)
        for each in (client, *asked.sentinels):
            each.close()
        return claims

    async def claim() -> list[Claim]:
        found: list[Claim] = await made.claim_many(["key"], 60.0)
        for each in (client, *asked.sentinels):
            await each.aclose()
        return found

    return asyncio.run(claim())


@contextlib.contextmanager
def server(
    reply: bytes = b"*3\r\n$1\r\nn\r\n$1\r\n7\r\n$1\r\n0\r\n", *, then: tuple[str, int] | None = None
) -> Iterator[tuple[str, int]]:
    """Return the address of a server that is a Sentinel and the master that it names.

    It answers scripts with ``reply``. After the first of them it names the master ``then``, if there is one.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        named: tuple[str, int] = listening.getsockname()

        def masters() -> bytes:
            state = ["name", "m", "ip", named[0], "port", str(named[1]), "flags", "master", "num-other-sentinels", "1"]
            texts = "".join(f"${len(text)}\r\n{text}\r\n" for text in state)
            return f"*1\r\n*{len(state)}\r\n{texts}".encode()

        def answer(connection: socket.socket) -> None:
            nonlocal named
            with connection, contextlib.suppress(OSError), connection.makefile("rb") as stream:
                while head := stream.readline():
                    command = [stream.read(int(stream.readline()[1:]) + 2).strip() for _ in range(int(head[1:]))]
                    if command[0] == b"SENTINEL":
                        connection.sendall(masters())
                    elif command[0] == b"EVALSHA":
                        named = then or named
                        connection.sendall(reply)
                    else:
                        connection.sendall(b"+OK\r\n")

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listening.getsockname()
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join(10)
