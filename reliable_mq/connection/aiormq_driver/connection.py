"""aiormq's connection, with our transport, credentials and tasks."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, cast

import aiormq
from aiormq.connection import TransportFactory

from reliable_mq._util.version import client_properties
from reliable_mq.connection.aiormq_driver.errors import MechanismNotOffered

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiormq.abc import AbstractConnection

    from reliable_mq.connection.interfaces import ConnectAttempt

_DRIVER: Final = f"aiormq {version('aiormq')}"


class _Sasl:
    """An authentication mechanism with the interface that aiormq uses."""

    def __init__(self, name: str, response: str) -> None:
        self.name = name
        self._response = response

    def value(self, _connection: AbstractConnection) -> _Sasl:
        return self

    def marshal(self) -> str:
        return self._response


class Transports(TransportFactory):
    """A factory that makes our transport for aiormq."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect

    async def create(self, url: Any, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect. The URL is ignored, because the address is known already."""
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] = await self._connect()
        return streams


class Connection(aiormq.Connection):
    """aiormq's connection, with our credentials, and tasks that end with it."""

    HEARTBEAT_GRACE_MULTIPLIER = 2  # as in the protocol: two missed heartbeats; `silence_noticed_within` relies on it

    def __init__(self, attempt: ConnectAttempt, transports: TransportFactory) -> None:
        endpoint, settings = attempt.endpoint, attempt.settings
        self._endpoint = endpoint
        self._credentials = attempt.secrets.credentials
        self.was_open = False
        own_name = settings.connection_name or attempt.name
        super().__init__(
            f"amqp://broker:{endpoint.port}/?heartbeat={settings.heartbeat}",
            transport_factory=transports,
            client_properties=cast("Any", client_properties(own_name, _DRIVER)),
        )
        self.vhost = settings.virtual_host

    async def connect(self, client_properties: Any = None) -> bool:
        """Connect as aiormq does, and forget the credentials."""
        opened = bool(await super().connect(client_properties))
        self.was_open = True
        self._credentials = None
        return opened

    async def end(self) -> None:
        """Close, in any state, and wait for the connection's tasks."""
        await self.close(None)
        own = [getattr(self, name) for name in ("_reader_task", "_writer_task") if hasattr(self, name)]
        await asyncio.gather(*(task.task for task in own), return_exceptions=True)

    def _credentials_class(self, start_frame: Any) -> Any:
        credentials = self._credentials
        name, response = "EXTERNAL", ""
        if credentials is not None:
            name, response = "PLAIN", f"\0{credentials.username}\0{credentials.password}"
        if name not in str(start_frame.mechanisms).split():
            raise MechanismNotOffered(f"the broker does not offer SASL mechanism {name}")
        return _Sasl(name, response)

    def __str__(self) -> str:
        return f"amqp://{self._endpoint}"
