"""A database server in a container, with the faults that can be done to it.

Invariants: the host port is chosen once and kept by `kill` and `start`, so that a URL stays good.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from typing import Self

import pytest
from sqlalchemy import create_engine, text

from reliable_mq.testing.containers import ContainedServer

KINDS = ("redis", "postgresql", "mariadb", "mysql")
_PORTS = {"redis": 6379, "postgresql": 5432, "mariadb": 3306, "mysql": 3306}
_IMAGES = {"mysql": "reliable-mq/databases:mysql"}  # the others have one image
_URLS = {
    "redis": "redis://{at}/0",
    "postgresql": "postgresql+psycopg://postgres@{at}/postgres",
    "mariadb": "mysql+pymysql://root@{at}/mysql",
    "mysql": "mysql+pymysql://root@{at}/mysql",
}
#: Asyncio's, the usual one first.
ASYNC_DRIVERS = {
    "redis": ("asyncio",),
    "postgresql": ("psycopg_async", "asyncpg"),
    "mariadb": ("asyncmy",),
    "mysql": ("asyncmy",),
}
#: A database, an API and a driver, which is the usual one where none is named; for tests that take long.
APIS = [
    ("postgresql", "sync", ""),
    ("postgresql", "aio", "psycopg_async"),
    pytest.param("mariadb", "sync", "", marks=pytest.mark.soak),
    pytest.param("postgresql", "aio", "asyncpg", marks=pytest.mark.soak),
    pytest.param("mariadb", "aio", "asyncmy", marks=pytest.mark.soak),
    pytest.param("mysql", "sync", "", marks=pytest.mark.soak),
    pytest.param("mysql", "aio", "asyncmy", marks=pytest.mark.soak),
]
_QUICK = {
    "redis": ["--appendfsync", "no"],
    "postgresql": ["-c", "fsync=off"],
    "mariadb": ["--innodb-flush-log-at-trx-commit=2"],
    "mysql": ["--innodb-flush-log-at-trx-commit=2"],
}
_STARTUP = b"\0\3\0\0user\0postgres\0database\0postgres\0\0"


class Database(ContainedServer):
    """One server, from `launch` to `remove`. Nobody needs a password.

    Args:
        kind: one of `KINDS`.
        durable: whether a commit waits for the disk; what it says survives a SIGKILL in any case.
    """

    def __init__(self, kind: str, *, durable: bool = False) -> None:
        self.kind = kind
        self._durable = durable
        super().__init__([_PORTS[kind]])

    def launch(self) -> Self:
        """Create and start the container; return when the server answers.

        Raises:
            TimeoutError: it did not within 90 s; the container's log is in the message.
        """
        image = _IMAGES.get(self.kind, "reliable-mq/databases:latest")
        self.create(image, [self.kind, *([] if self._durable else _QUICK[self.kind])])
        self.wait_ready()
        return self

    def __enter__(self) -> Self:
        return self.launch()

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    @property
    def port(self) -> int:
        return self._ports[_PORTS[self.kind]]

    @property
    def url(self) -> str:
        """Of the server; for SQLAlchemy where it is no Redis."""
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """The same by way of a proxy on this machine."""
        return _URLS[self.kind].format(at=f"127.0.0.1:{port}")

    def fresh(self, port: int | None = None) -> str:
        """Create a database on the server, for one test, and return its URL. Of Redis there is one, emptied here.

        Args:
            port: where the URL is to lead, if not to the server itself: that of a proxy.
        """
        at = self.port if port is None else port
        if self.kind == "redis":
            import redis

            with redis.Redis(port=self.port) as client:
                client.flushall()
            return self.url_at(at)
        name = f"test_{uuid.uuid4().hex[:12]}"
        engine = create_engine(self.url)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self.url_at(at).rpartition("/")[0] + f"/{name}"

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.settimeout(5)
            if self.kind == "redis":
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"  # an error while it reads its data
            if self.kind == "postgresql":
                connection.sendall((len(_STARTUP) + 4).to_bytes(4) + _STARTUP)
                answer = connection.recv(1)
                return answer == b"R"  # authentication: an error is "E", also while it starts
            return bool(connection.recv(1))
        return False


def with_driver(url: str, driver: str) -> str:
    """The same database by another driver of SQLAlchemy's, or by the usual one where none is named."""
    scheme, _, rest = url.partition("://")
    return f"{scheme.partition('+')[0]}+{driver}://{rest}" if driver else url
