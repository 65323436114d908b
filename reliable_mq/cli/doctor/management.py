"""A client of the management API, and a virtual host as it shows it. Read only.

Only ``doctor`` uses it, if it is there.
"""

from __future__ import annotations

import base64
import http
import http.client
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import quote, unquote, urlsplit

from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from reliable_mq.topology.arguments import ARGUMENTS

__all__ = ["ManagementAPI", "ManagementError", "QueueView", "Route", "Snapshot"]

_PORTS: Final = {"http": 15672, "https": 15671}
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]+")
_SHOWN: Final = 200  # characters of an error's body


class ManagementError(Exception):
    """The API did not respond, or with an error.

    Attributes:
        status: of HTTP; 0 without a response.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class ManagementAPI:
    """One node's management API; reads only.

    Args:
        scheme: ``"http"`` or ``"https"``, which is verified.
        host, port: where it listens.
        credentials: whom to be; None to send none.
        context: for ``https``.
        prefix: of its paths, where it is configured to have one.
        timeout: seconds for each response.
    """

    def __init__(
        self,
        scheme: str,
        host: str,
        port: int,
        credentials: Credentials | None,
        *,
        context: ssl.SSLContext | None = None,
        prefix: str = "",
        timeout: float = 10.0,
    ) -> None:
        self._scheme = scheme
        self._host = host
        self._port = port
        self._context = context
        self._prefix = prefix
        self._timeout = timeout
        self._headers = {"Accept": "application/json"}
        if credentials is not None:
            token = base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {token}"

    @classmethod
    def at(cls, url: str, settings: ConnectionSettings) -> Self:
        """Return the API at ``http[s]://[user:password@]host[:port][/prefix]``.

        Without a user it takes that of `settings`.

        Raises:
            ConfigurationError: the URL is none, or there is no user.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if not host or not _HOST.fullmatch(host) or parts.scheme not in _PORTS:
            raise ConfigurationError("the management URL must be http[s]://[user:password@]host[:port]")
        credentials = settings.resolve_credentials()
        if parts.username is not None:
            credentials = Credentials(unquote(parts.username), unquote(parts.password or ""))
        if credentials is None:
            raise ConfigurationError("the management URL needs a user: http[s]://user:password@host[:port]")
        return cls(
            parts.scheme,
            host,
            port or _PORTS[parts.scheme],
            credentials,
            context=_context(settings) if parts.scheme == "https" else None,
            prefix=parts.path.rstrip("/"),
        )

    @classmethod
    def beside(cls, settings: ConnectionSettings) -> list[Self]:
        """Return the API at its default address: on each host, with TLS if AMQP has it.

        That is a guess, and something else may listen there. So the password goes only to this machine, or to a host
        whose certificate verifies (`sends_password`).
        """
        credentials = settings.resolve_credentials()
        scheme = "http" if settings.tls is None else "https"
        context = _context(settings) if settings.tls is not None else None
        verified = context is not None and context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
        return [
            cls(
                scheme,
                each.host,
                _PORTS[scheme],
                credentials if verified or each.is_loopback else None,
                context=context,
                timeout=settings.connect_timeout,
            )
            for each in settings.endpoints
        ]

    @property
    def sends_password(self) -> bool:
        """Whether requests carry a password."""
        return "Authorization" in self._headers

    @property
    def is_readable_on_the_way(self) -> bool:
        """Whether a password goes to another machine in plaintext."""
        return self._scheme == "http" and not Endpoint(self._host, self._port).is_loopback

    @property
    def is_there(self) -> bool:
        """Whether something there requires a login for ``/api``. Sends no password."""
        connection = self._connection()
        try:
            connection.request("GET", f"{self._prefix}/api/whoami", headers={"Accept": "application/json"})
            return connection.getresponse().status == http.HTTPStatus.UNAUTHORIZED
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def __str__(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self._port}{self._prefix}"

    def get(self, *segments: str) -> Any:
        """Return the decoded response to ``GET /api/<segments>``, percent-encoded here.

        Raises:
            ManagementError: no response, or one with an error.
        """
        path = f"{self._prefix}/api/" + "/".join(quote(segment, safe="") for segment in segments)
        connection = self._connection()
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            content = response.read()
        except ssl.SSLCertVerificationError as error:
            raise ManagementError(f"{self}: the certificate does not verify: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
            raise ManagementError(f"{self}: {why}") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise ManagementError(f"{self}: {response.status} {_reason(content)}", response.status)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ManagementError(f"{self}: the answer is not JSON; is this RabbitMQ's management API?") from error

    def _connection(self) -> http.client.HTTPConnection:
        if self._scheme == "https":
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)


def _context(settings: ConnectionSettings) -> ssl.SSLContext:
    return ssl.create_default_context() if settings.tls is None else settings.tls.build_context()


def _reason(content: bytes) -> str:
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text[:_SHOWN]
    return str(answer.get("reason") or answer.get("error") if isinstance(answer, dict) else answer)[:_SHOWN]


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue with the arguments in effect: its own, and those of its policies."""

    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.raw["name"])

    @property
    def type(self) -> str:
        return str(self.raw.get("type", "classic"))

    @property
    def node(self) -> str:
        """The node of the queue, or of its leader; empty if there is none."""
        return str(self.raw.get("leader") or self.raw.get("node") or "")

    @property
    def members(self) -> frozenset[str]:
        """The nodes that have a copy of a quorum queue or a stream."""
        return frozenset(map(str, self.raw.get("members") or ()))

    @property
    def online(self) -> frozenset[str]:
        """Those of its members that run."""
        return frozenset(map(str, self.raw.get("online") or ()))

    @property
    def messages(self) -> int:
        return int(self.raw.get("messages") or 0)

    @property
    def growth(self) -> float:
        """Messages per second by which it grows, by the broker's statistics."""
        return float((self.raw.get("messages_details") or {}).get("rate") or 0.0)

    def argument(self, name: str) -> Any:
        """Return the value in effect of an argument, without its ``x-``; None if unset."""
        return (self.raw.get("arguments") or {}).get(f"x-{name}", self._policy.get(name))

    def delivery_limit(self, version: tuple[int, ...]) -> int | None:
        """The returns after which a message is dead-lettered or dropped; None for never."""
        own, policy = (self.raw.get("arguments") or {}).get("x-delivery-limit"), self._policy.get("delivery-limit")
        given = [limit for limit in (own, policy) if isinstance(limit, int)]
        if not given:
            default: int | None = ARGUMENTS["x-delivery-limit"].default_on(version)
            return default
        # RabbitMQ takes the stricter of two limits, and any limit before none.
        limit = min(given) if min(given) >= 0 else max(given)
        return limit if limit >= 0 else None

    @property
    def _policy(self) -> Mapping[str, Any]:
        return self.raw.get("effective_policy_definition") or {}


@dataclass(frozen=True, slots=True)
class Route:
    """The route of dead letters.

    Attributes:
        targets: the queues, as far as they are known.
        flaw: why they may be dropped; empty if they are not.
        certain: whether they are certainly dropped.
    """

    targets: frozenset[str] = frozenset()
    flaw: str = ""
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a virtual host, for the checks.

    Attributes:
        queues: by name.
        exchanges: by name.
        bindings: all of them.
        consumers: all of them.
        nodes: of the cluster; None if this user may not read them.
    """

    queues: Mapping[str, QueueView]
    exchanges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bindings: Sequence[Mapping[str, Any]] = ()
    consumers: Sequence[Mapping[str, Any]] = ()
    nodes: tuple[Mapping[str, Any], ...] | None = ()

    @classmethod
    def take(cls, api: ManagementAPI, virtual_host: str) -> Self:
        """Read a virtual host.

        Raises:
            ManagementError: the API does not respond, or refuses this user.
        """
        return cls(
            queues={queue["name"]: QueueView(queue) for queue in api.get("queues", virtual_host)},
            exchanges={exchange["name"]: exchange for exchange in api.get("exchanges", virtual_host)},
            bindings=api.get("bindings", virtual_host),
            consumers=api.get("consumers", virtual_host),
            nodes=_nodes(api),
        )

    def consumers_of(self, queue: QueueView) -> list[Mapping[str, Any]]:
        """Return the consumers of a queue."""
        return [each for each in self.consumers if (each.get("queue") or {}).get("name") == queue.name]

    def dead_letter_route(self, queue: QueueView) -> Route | None:
        """Return the route of a queue's dead letters; None without a dead-letter exchange."""
        exchange, key = queue.argument("dead-letter-exchange"), queue.argument("dead-letter-routing-key")
        if exchange is None:
            return None
        if exchange == "":
            return self._by_default_exchange(key)
        found = self.exchanges.get(exchange)
        if found is None:
            return Route(flaw=f"the dead-letter exchange {exchange!r} does not exist", certain=True)
        if (found.get("arguments") or {}).get("alternate-exchange") or found.get("policy"):
            return Route()  # messages that match no binding are routed on from there
        bound = [each for each in self.bindings if each.get("source") == exchange]
        if not bound:
            return Route(flaw=f"nothing is bound to the dead-letter exchange {exchange!r}", certain=True)
        matching = bound if key is None else [each for each in bound if _matches(str(found.get("type")), each, key)]
        if not matching:
            flaw = f"no binding of the dead-letter exchange {exchange!r} matches the dead-letter routing key {key!r}"
            return Route(flaw=flaw, certain=True)
        return Route(frozenset(each["destination"] for each in matching if each["destination_type"] == "queue"))

    def _by_default_exchange(self, key: str | None) -> Route:
        if key is None:
            flaw = (
                "dead letters keep their routing keys, and the default exchange takes them to queues of that name: "
                "often this queue itself, where such a cycle ends in dropping them"
            )
            return Route(flaw=flaw)
        if key not in self.queues:
            return Route(flaw=f"the dead-letter queue {key!r} does not exist", certain=True)
        return Route(frozenset({key}))


def _nodes(api: ManagementAPI) -> tuple[Mapping[str, Any], ...] | None:
    try:
        return tuple(api.get("nodes"))
    except ManagementError as error:
        if error.status not in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}:
            raise
        return None


def _matches(exchange_type: str, binding: Mapping[str, Any], key: str) -> bool:
    pattern = str(binding.get("routing_key", ""))
    match exchange_type:
        case "direct":
            return pattern == key
        case "topic":
            return _topic_matches(pattern.split("."), key.split("."))
        case _:
            return True


def _topic_matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, *rest = pattern
    if head == "#":
        return any(_topic_matches(rest, words[start:]) for start in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _topic_matches(rest, words[1:])
