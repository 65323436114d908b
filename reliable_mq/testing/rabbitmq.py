"""A RabbitMQ broker in a container, with the faults of a broker as a whole.

Example::

    with RabbitMQ() as broker:
        publisher = Publisher(broker.url)
        broker.kill()
        broker.start()
"""

from __future__ import annotations

import base64
import re
import socket
from typing import TYPE_CHECKING, Final, Literal, Self
from urllib.parse import quote

from reliable_mq.errors import ConfigurationError, LabError
from reliable_mq.testing.containers import ContainedServer, File, has_image
from reliable_mq.testing.management import Management
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

Alarm = Literal["memory", "disk"]

AMQP, AMQPS, MANAGEMENT, STREAM, PROMETHEUS = 5672, 5671, 15672, 5552, 15692
_OWN_IMAGE: Final = "reliable-mq/rabbitmq:newest"
_OFFICIAL_IMAGE: Final = "rabbitmq:4-management"
_ALARM_TIMEOUT: Final = 30.0
# Clients connect as guest from outside the container. By default, the counts of the management API lag by 5 s.
_CONF: Final = """
loopback_users.guest = false
log.console = true
collect_statistics_interval = 1000
"""
_CONFIGURED: Final = "element(2, application:get_env(rabbit, {}))"  # the next expressions do not change it
_ALARMS: Final[dict[Alarm, tuple[str, str]]] = {  # expressions to set and to clear
    "memory": (
        "vm_memory_monitor:set_vm_memory_high_watermark(0.0)",
        f"vm_memory_monitor:set_vm_memory_high_watermark({_CONFIGURED.format('vm_memory_high_watermark')})",
    ),
    "disk": (
        'rabbit_disk_monitor:set_disk_free_limit("1000000GB")',
        f"rabbit_disk_monitor:set_disk_free_limit({_CONFIGURED.format('disk_free_limit')})",
    ),
}
# erl_call and rabbitmqctl print the value in quotes. They print base64 in the same form, and it is never empty here.
# rabbitmqctl is used if erl_call is missing, or prints nothing, which sometimes happens.
_EVALUATE_ATTEMPTS: Final = 5  # if nothing at all is printed
_EVALUATE: Final = """
if command -v erl_call >/dev/null; then
    cookie=$(cat /var/lib/rabbitmq/.erlang.cookie)
    answer=$(printf '%s\\n' "$1" | erl_call -sname "rabbit@$HOSTNAME" -c "$cookie" -e)
fi
case "$answer" in
    "{ok, "*) printf '%s\\n' "$answer" ;;
    *) rabbitmqctl --quiet eval "$1" ;;
esac
"""
_ENCODED: Final = """
base64:encode_to_string(begin
    Value = begin {expression} end,
    Text = case is_binary(Value) of true -> Value; false -> io_lib:format("~0tp", [Value]) end,
    unicode:characters_to_binary([$=, Text])
end)."""
_SERVER_VERSION: Final = re.compile(rb"\x07versionS\x00\x00\x00.([0-9][-+.~0-9A-Za-z]*)", re.DOTALL)
_QUOTED: Final = re.compile(r'"([A-Za-z0-9+/=]*)"')


class RabbitMQ(ContainedServer):
    """One broker in a container. A context manager that launches and removes it.

    Not thread-safe. Each method that injects a fault blocks until the fault is in effect.

    Args:
        image: The docker image. The default is ``reliable-mq/rabbitmq:newest`` if this project's tests have built it,
            else the official ``rabbitmq:4-management``, which is pulled at the first launch. The lab needs the
            management plugin, which an image without ``-management`` lacks.
        conf: More lines for ``rabbitmq.conf``.
        files: More files in the container, for example certificates, by absolute path. Every user can read them.
        environment: More environment variables for the broker.

    Raises:
        ConfigurationError: If the system is not Linux.
        LabError: If `image` is None and no docker daemon answers.
    """

    def __init__(
        self,
        image: str | None = None,
        *,
        conf: str = "",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__((AMQP, AMQPS, MANAGEMENT, STREAM, PROMETHEUS))
        self.image = image or default_image()
        self._files = {path: File(content) for path, content in (files or {}).items()}
        self._files["/etc/rabbitmq/conf.d/95-testing.conf"] = File((_CONF + conf).encode())
        # Erlang sizes its port table by the descriptor limit, which can be a thousand million in a container.
        self._environment = {"ERL_MAX_PORTS": "65536", **(environment or {})}
        self._alarms: set[Alarm] = set()
        self._certificates: set[str] = set()  # paths of `files` whose content was replaced
        self._version = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.image} at {self.host}:{self.port}>"

    # life

    def launch(self) -> Self:
        """Create and start the container. Blocks until the broker accepts connections.

        A launch takes about 8 s on two idle cores.

        Raises:
            LabError: If docker or the image is not available.
            TimeoutError: If the broker does not answer within 90 s. The message has the end of the log.
        """
        self.create(self.image, files=self._files, environment=self._environment)
        try:
            self.wait_ready()
        except BaseException:
            self.remove()
            raise
        return self

    def __enter__(self) -> Self:
        return self.launch()

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    # where it is

    @property
    def port(self) -> int:
        """The host's port for plain AMQP, 0 before `launch`."""
        return self._ports[AMQP]

    @property
    def tls_port(self) -> int:
        """The host's port for AMQP over TLS (5671), if `conf` enables that listener."""
        return self._ports[AMQPS]

    @property
    def stream_port(self) -> int:
        """The host's port for the stream protocol, if the image has its plugin."""
        return self._ports[STREAM]

    @property
    def url(self) -> str:
        """The AMQP URL of the default virtual host, for user guest."""
        return self.url_of("/")

    def url_of(self, virtual_host: str) -> str:
        """Return the AMQP URL of a virtual host, for user guest."""
        return f"amqp://guest:guest@{self.host}:{self.port}/{quote(virtual_host, safe='')}"

    reachable_url_of = url_of

    def direct_url_of(self, virtual_host: str) -> str:
        """Return an AMQP URL that bypasses docker's port proxy, for `lose_packets`."""
        return f"amqp://guest:guest@{self.address}:{AMQP}/{quote(virtual_host, safe='')}"

    @property
    def management(self) -> Management:
        """The broker's management API, for user guest."""
        return Management(f"http://{self.host}:{self._ports[MANAGEMENT]}")

    @property
    def metrics_url(self) -> str:
        """The URL of the broker's Prometheus metrics, if the image has the plugin."""
        return f"http://{self.host}:{self._ports[PROMETHEUS]}/metrics"

    @property
    def version(self) -> str:
        """The broker's version, such as ``"4.3.6"``. Empty before `launch`."""
        return self._version

    # faults

    def alarm(self, kind: Alarm) -> None:
        """Raise a resource alarm, so that the broker blocks every publishing connection.

        In a cluster, all nodes block them. Blocks until the alarm is in effect.

        Args:
            kind: ``"memory"`` sets the watermark to 0. ``"disk"`` demands more free space than the disk has.

        Raises:
            ConfigurationError: If `kind` is neither ``"memory"`` nor ``"disk"``.
            TimeoutError: If the broker does not raise the alarm within 30 s.
        """
        expression, _ = _expressions(kind)
        self._alarms.add(kind)
        self.evaluate(expression)
        self._wait_for_alarm(kind, raised=True)

    def clear_alarm(self, kind: Alarm) -> None:
        """Clear an alarm, by restoring the configured limit. Blocks until it has ended.

        Raises:
            ConfigurationError: If `kind` is neither ``"memory"`` nor ``"disk"``.
            TimeoutError: If the broker does not clear the alarm within 30 s.
        """
        _, expression = _expressions(kind)
        self.evaluate(expression)
        self._alarms.discard(kind)
        self._wait_for_alarm(kind, raised=False)

    def change_certificate(self, files: Mapping[str, bytes]) -> None:
        """Replace certificates and keys of `files`, for future connections, until `heal`."""
        self._certificates |= files.keys() & self._files.keys()
        self.put_files({path: File(content) for path, content in files.items()})
        self.evaluate("ssl:clear_pem_cache()")

    def heal(self) -> None:
        """Undo every fault. Blocks until the broker answers.

        Ends a pause and the loss of packets, starts a dead broker, clears the alarms and restores the certificates of
        `files`. Changes by `rabbitmqctl`, `evaluate`, `execute` and the management API stay.

        Raises:
            TimeoutError: If the broker does not answer within 90 s, or does not clear an alarm within 30 s.
        """
        super().heal()
        if self._certificates:
            self.change_certificate({path: self._files[path].content for path in self._certificates})
            self._certificates.clear()
        for kind in tuple(self._alarms):
            self.clear_alarm(kind)

    def rabbitmqctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl --quiet`` and return its output. Takes about 1 s of CPU time.

        Raises:
            LabError: If the command fails. The message has its output.
        """
        return self.execute("rabbitmqctl", "--quiet", *arguments)

    def evaluate(self, expression: str) -> str:
        """Evaluate an Erlang expression in the broker and return the value as text.

        A binary is returned as its text, and any other value as an Erlang term. ``rabbitmqctl eval`` takes most of a
        second of CPU time. ``erl_call`` takes a tenth of that, and is used if the image has it. The expression may be
        evaluated several times, because docker sometimes loses the output of a short command.

        Raises:
            LabError: If the evaluation fails. The message has its output.
        """
        output = ""
        for _ in range(_EVALUATE_ATTEMPTS):
            output = self.execute("sh", "-c", _EVALUATE, "sh", _ENCODED.format(expression=expression))
            encoded = _QUOTED.search(output)
            if encoded is not None:
                return base64.b64decode(encoded[1]).decode().removeprefix("=")
            if output.strip():
                break
        raise LabError(f"{expression}: {output or 'no output'}")

    # waiting

    def answers(self) -> bool:
        """Return whether the broker answers the AMQP protocol header within 5 s."""
        try:
            with (
                socket.create_connection((self.host, self.port), timeout=5) as connection,
                connection.makefile("rb") as read,
            ):
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                head = read.read(7)
                properties = read.read(int.from_bytes(head[3:])) if head[:1] == b"\x01" else b""  # connection.start
        except OSError:
            return False
        found = _SERVER_VERSION.search(properties)
        if found is not None:
            self._version = found[1].decode()
        return found is not None

    def _wait_for_alarm(self, kind: Alarm, *, raised: bool) -> None:
        wait_until(
            lambda: (kind in self.management.alarms()) is raised,
            timeout=_ALARM_TIMEOUT,
            what=f"{kind} alarm {'raised' if raised else 'cleared'}",
            interval=0.2,
        )


def _expressions(kind: Alarm) -> tuple[str, str]:
    """Return the expressions that set and clear an alarm."""
    if kind not in _ALARMS:
        raise ConfigurationError(f"an alarm is 'memory' or 'disk', not {kind!r}")
    return _ALARMS[kind]


def default_image() -> str:
    """Return this project's own image if docker has it, else the official image.

    Raises:
        ConfigurationError: If the system is not Linux.
        LabError: If no docker daemon answers.
    """
    return _OWN_IMAGE if has_image(_OWN_IMAGE) else _OFFICIAL_IMAGE
