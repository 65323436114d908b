"""A RabbitMQ broker in a container, with the faults that can be done to a broker as a whole.

Invariants: the host ports are chosen once and kept by `kill`, `stop` and `start`, so that a URL stays good.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
import socket
import tarfile
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from docker.errors import APIError, NotFound
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from integration.support.containers import OWNER_LABEL, ContainedServer, free_port, owner
from integration.support.management import Management
from integration.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from docker.models.containers import Container

# The reaper is an image from a registry, which may be out of reach; we remove our containers ourselves.
testcontainers_config.ryuk_disabled = True

LINES = ("newest", "4.0")
START_DEADLINE = 90.0

AMQP, AMQPS, MANAGEMENT, STREAM, PROMETHEUS = 5672, 5671, 15672, 5552, 15692
_PORTS = (AMQP, AMQPS, MANAGEMENT, STREAM, PROMETHEUS)
# Both print the value, in quotes; base64 has nothing that either would write differently. Where erl_call is missing, or
# says nothing, as it does now and then, rabbitmqctl is asked.
_ASKED = 5  # times, where nothing at all is answered
_EVALUATE = """
if command -v erl_call >/dev/null; then
    cookie=$(cat /var/lib/rabbitmq/.erlang.cookie)
    answer=$(printf '%s\\n' "$1" | erl_call -sname "rabbit@$HOSTNAME" -c "$cookie" -e)
fi
case "$answer" in
    "{ok, "*) printf '%s\\n' "$answer" ;;
    *) rabbitmqctl --quiet eval "$1" ;;
esac
"""
_ENCODED = """
base64:encode_to_string(begin
    Value = begin {expression} end,
    Text = case is_binary(Value) of true -> Value; false -> io_lib:format("~0tp", [Value]) end,
    unicode:characters_to_binary(Text)
end)."""
_QUOTED = re.compile(r'"([A-Za-z0-9+/=]*)"')


class Broker(ContainedServer):
    """One broker, from `launch` to `remove`.

    Args:
        line: ``"newest"`` or ``"4.0"``: which of the two images.
        conf: more lines for ``rabbitmq.conf``.
        files: more files in the container: absolute path → content (certificates, say), readable by everyone.
        environment: more environment variables for the broker.
    """

    def __init__(
        self,
        line: str = "newest",
        *,
        conf: str = "",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.line = line
        self.host = "127.0.0.1"
        self._ports: dict[int, int] = {}
        self._files = {**(files or {}), "/etc/rabbitmq/conf.d/95-test.conf": conf.encode()}
        # Erlang sizes its port table by the descriptor limit, which in a container can be a thousand million.
        self._environment = {"ERL_MAX_PORTS": "65536", **(environment or {})}
        self._made: DockerContainer | None = None
        self._to_undo: dict[str, Callable[[], None]] = {}

    # -- life ----------------------------------------------------------------------------------------------------------

    def launch(self) -> Self:
        """Create and start the container; return when the broker accepts connections.

        Raises:
            TimeoutError: it did not within 90 s; the container's log is in the message.
        """
        for attempt in range(10):
            self._ports = {inside: free_port() for inside in _PORTS}
            container = DockerContainer(f"reliable-mq/rabbitmq:{self.line}")
            container.with_kwargs(labels={OWNER_LABEL: owner()}).with_envs(**self._environment)
            for path, content in self._files.items():
                container.with_copy_into_container(content, path)
            local = container.get_docker_client().host() in {"localhost", "127.0.0.1"}
            for inside, outside in self._ports.items():
                container.ports[f"{inside}/tcp"] = ("127.0.0.1" if local else "0.0.0.0", outside)
            self._made = container
            try:
                container.start()
            except APIError as error:
                # Between our look and docker's, somebody else took one of the ports.
                container.stop()
                if attempt == 9 or "port" not in str(error):
                    raise
            else:
                break
        self.host = "127.0.0.1" if local else container.get_container_host_ip()
        self.let_go()
        self.wait_ready()
        return self

    def remove(self) -> None:
        """Kill the container and remove it with its data. Doing it twice is fine."""
        if self._made is not None:
            with contextlib.suppress(NotFound):
                self._made.stop()
            self._made = None

    def __enter__(self) -> Self:
        return self.launch()

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    # -- where it is ---------------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The host port of plain AMQP."""
        return self._ports[AMQP]

    @property
    def tls_port(self) -> int:
        """The host port of 5671, where something listens only if `conf` says so."""
        return self._ports[AMQPS]

    @property
    def stream_port(self) -> int:
        return self._ports[STREAM]

    @property
    def url(self) -> str:
        """AMQP URL of the default virtual host, as guest."""
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        return f"amqp://guest:guest@{self.host}:{self.port}/{quote(vhost, safe='')}"

    def direct_url_of(self, vhost: str) -> str:
        """AMQP URL that leads to the container itself, past docker's proxy, for `lose_packets`."""
        return f"amqp://guest:guest@{self.address}:{AMQP}/{quote(vhost, safe='')}"

    @property
    def management(self) -> Management:
        return Management(f"http://{self.host}:{self._ports[MANAGEMENT]}")

    @property
    def container(self) -> Container:
        if self._made is None:
            raise RuntimeError("this broker was never launched, or is removed")
        return self._made.get_wrapped_container()

    @property
    def metrics_url(self) -> str:
        """Where the broker's own Prometheus metrics are."""
        return f"http://{self.host}:{self._ports[PROMETHEUS]}/metrics"

    @property
    def version(self) -> str:
        """What the broker calls itself, such as ``4.3.6``."""
        version: str = self.management.call("GET", "overview")["rabbitmq_version"]
        return version

    @property
    def cpu_seconds(self) -> float:
        """CPU time that everything in the container has taken so far."""
        usage = self.container.stats(stream=False, one_shot=True)["cpu_stats"]["cpu_usage"]["total_usage"]
        self.let_go()
        return float(usage) / 1e9

    # -- faults --------------------------------------------------------------------------------------------------------

    def stop(self, timeout: float = 60) -> None:
        """SIGTERM and an orderly shutdown: clients get ``connection.close`` with 320."""
        self.container.stop(timeout=int(timeout))
        self.wait_for_status("exited")

    def start(self, *, timeout: float = START_DEADLINE) -> None:
        """Start again what was killed or stopped, on the same ports and the same data."""
        self.container.start()
        self.let_go()
        self.wait_ready(timeout)

    def restart(self) -> None:
        """An orderly `stop`, then `start`."""
        self.stop()
        self.start()

    def set_memory_alarm(self, on: bool) -> None:
        """Set the memory watermark to nothing, or back to the default."""
        self._remember("memory", lambda: self.set_memory_alarm(False), on=on)
        self.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark({'0.0' if on else '0.6'})")
        self._wait_for_alarm(on=on)

    def set_disk_alarm(self, on: bool) -> None:
        """Ask for more free disk space than there is, or for the default again."""
        self._remember("disk", lambda: self.set_disk_alarm(False), on=on)
        self.evaluate(f'rabbit_disk_monitor:set_disk_free_limit("{"1000000GB" if on else "50MB"}")')
        self._wait_for_alarm(on=on)

    def change_certificate(self, files: Mapping[str, bytes]) -> None:
        """Replace certificates and keys that were given as `files`; in effect for connections to come."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, content in files.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
        self.container.put_archive("/", archive.getvalue())
        self.let_go()
        self.evaluate("ssl:clear_pem_cache()")

    def heal(self) -> None:
        """Undo what was done: a broker that is paused, dead or under an alarm is well again."""
        super().heal()
        for undo in list(self._to_undo.values()):
            undo()

    def rabbitmqctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl --quiet`` in the container and return what it printed.

        Raises:
            RuntimeError: it failed; its output is in the message.
        """
        return self._exec("rabbitmqctl", "--quiet", *arguments)

    def evaluate(self, expression: str) -> str:
        """Evaluate an Erlang expression in the broker's node and return the value, as Erlang writes it.

        A binary or a string comes as its text. ``erl_call`` takes a tenth of the time of ``rabbitmqctl eval``, most of
        a second of CPU, which is for images without it. The expression must bear to be evaluated again: docker loses
        the output of a short command now and then.

        Raises:
            RuntimeError: it failed; what was said is in the message.
        """
        output = ""
        for _ in range(_ASKED):
            output = self._exec("sh", "-c", _EVALUATE, "sh", _ENCODED.format(expression=expression))
            encoded = _QUOTED.search(output)
            if encoded is not None:
                return base64.b64decode(encoded[1]).decode()
            if output.strip():
                break
        raise RuntimeError(f"{expression}: {output or 'no output'}")

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float = START_DEADLINE) -> None:
        """Wait until the broker answers the AMQP protocol header, which it does when everything else is up.

        Raises:
            TimeoutError: it did not within `timeout` seconds, or its container ended.
        """

        def ready() -> bool:
            if self.status() == "exited":
                raise TimeoutError(f"the broker ended while it started:\n{self.logs()}")
            return self._answers()

        wait_until(ready, timeout=timeout, what=lambda: f"broker {self.line} ready:\n{self.logs()}", interval=0.1)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=5) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"  # a method frame: connection.start
        except OSError:
            return False

    def _remember(self, fault: str, undo: Callable[[], None], *, on: bool) -> None:
        if on:
            self._to_undo[fault] = undo
        else:
            self._to_undo.pop(fault, None)

    def _wait_for_alarm(self, *, on: bool) -> None:
        def reached() -> bool:
            return self.management.alarmed() is bool(on or self._to_undo.keys() & {"memory", "disk"})

        wait_until(reached, timeout=30, what=f"alarm {'on' if on else 'off'}", interval=0.2)

    def _exec(self, *command: str) -> str:
        api = self.container.client.api
        execution = api.exec_create(self.container.id, list(command))["Id"]
        text: str = api.exec_start(execution).decode(errors="replace")
        # Its output may end before docker knows that it has.
        ended = wait_until(
            lambda: (each := api.exec_inspect(execution))["ExitCode"] is not None and each,
            timeout=30,
            what=f"{command[0]} ended",
        )
        code = ended["ExitCode"]
        self.let_go()
        if code != 0:
            raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{text}")
        return text
