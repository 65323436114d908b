"""A database server in a container, with fault injection.

Invariant: the host port is chosen once and does not change with `kill` and `start`, so URLs stay valid.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from typing import Self

import pytest
from sqlalchemy import create_engine, make_url, text

from reliable_mq.testing.containers import ContainedServer

KINDS = ("redis", "postgresql", "mariadb", "mysql")
_PORTS = {"redis": 6379, "postgresql": 5432, "mariadb": 3306, "mysql": 3306}
_IMAGES = {"mysql": "reliable-mq/databases:mysql"}  # the other kinds share one image
# Without this option, PyMySQL reads the certificates of all authorities for each connection: 60 ms of CPU time.
_PLAIN = "?ssl_disabled=true"
_URLS = {
    "redis": "redis://{at}/0",
    "postgresql": "postgresql+psycopg://postgres@{at}/postgres",
    "mariadb": "mysql+pymysql://root@{at}/mysql" + _PLAIN,
    "mysql": "mysql+pymysql://root@{at}/mysql" + _PLAIN,
}
#: The asyncio drivers, the default one first.
ASYNC_DRIVERS = {
    "redis": ("asyncio",),
    "postgresql": ("psycopg_async", "asyncpg"),
    "mariadb": ("asyncmy",),
    "mysql": ("asyncmy",),
}
#: Database, API and driver (the default one if empty), for slow tests.
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
    """One server, from `launch` to `remove`. It needs no password.

    Args:
        kind: One of `KINDS`.
        durable: Whether a commit waits for the disk. Committed data always survives a SIGKILL of the server.
    """

    def __init__(self, kind: str, *, durable: bool = False) -> None:
        self.kind = kind
        self._durable = durable
        super().__init__([_PORTS[kind]])

    def launch(self) -> Self:
        """Create and start the container; return when the server answers.

        Raises:
            TimeoutError: If it does not answer within 90 s. The message has the container's log.
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
        """The URL of the server, for SQLAlchemy, or for redis-py if it is Redis."""
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """Return the URL with another local port, such as the port of a proxy."""
        return _URLS[self.kind].format(at=f"127.0.0.1:{port}")

    def fresh(self, port: int | None = None) -> str:
        """Create an empty database for one test, and return its URL.

        Redis has only one database, which is emptied.

        Args:
            port: The port in the URL, such as the port of a proxy. None for the port of the server.
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
        return make_url(self.url_at(at)).set(database=name).render_as_string()

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.settimeout(5)
            if self.kind == "redis":
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"  # Redis answers with an error while it loads its data
            if self.kind == "postgresql":
                connection.sendall((len(_STARTUP) + 4).to_bytes(4) + _STARTUP)
                answer = connection.recv(1)
                return answer == b"R"  # authentication; an error, also during the start, is "E"
            return bool(connection.recv(1))
        return False


def with_driver(url: str, driver: str) -> str:
    """Return the URL with another SQLAlchemy driver, or as it is if none is named."""
    scheme, _, rest = url.removesuffix(_PLAIN).partition("://")
    return f"{scheme.partition('+')[0]}+{driver}://{rest}" if driver else url
