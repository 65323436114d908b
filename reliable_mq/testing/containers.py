"""Servers in docker containers, and the faults of any of them.

Invariants: a method that changes the state of a server returns when the change is in effect, or raises after its
deadline. Host ports are chosen once and kept by `kill`, `stop` and `start`, so that a URL stays valid. Containers and
networks carry a label that names the process that owns them; `remove_leftovers` removes those whose process is gone and
no others. Docker clients keep no idle connections: tests may count the descriptors of their process.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import sys
import tarfile
from abc import ABC, abstractmethod
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from testcontainers.core.docker_client import DockerClient

from reliable_mq.errors import ConfigurationError, LabError, UsageError
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from docker.models.containers import Container

__all__ = ["OWNER_LABEL", "ContainedServer", "File", "connect_to_docker", "has_image", "owner", "remove_leftovers"]

OWNER_LABEL: Final = "reliable-mq.testing.owner"
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1"})
_START_ATTEMPTS: Final = 10
_STATUS_TIMEOUT: Final = 30.0
_CALLS_PER_STATUS: Final = 10  # docker takes longer to answer than a server that starts


class File(NamedTuple):
    """A file of a container.

    Attributes:
        content: in bytes.
        user: its owner, a name that the image knows; root where it is empty.
        mode: of its permissions.
    """

    content: bytes
    user: str = ""
    mode: int = 0o644


class ContainedServer(ABC):
    """A server in a container, with the faults that are common to all servers.

    Args:
        ports: in the container, each of which gets a port of the host.

    Attributes:
        host: the name or address at which the host's ports are reached.
    """

    def __init__(self, ports: Iterable[int]) -> None:
        self.host = "127.0.0.1"
        self._ports = dict.fromkeys(ports, 0)
        self._docker: DockerClient | None = None
        self._container: Container | None = None
        self._loss = 0.0
        self._unreachable: set[tuple[str, str]] = set()

    # life

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server answers."""

    def wait_ready(self, timeout: float = 90.0) -> None:
        """Block until the server answers.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it did not within `timeout`, or its container ended; the text has the end of its log.
        """
        calls = count(1)

        def ready() -> bool:
            if self.answers():
                return True
            if next(calls) % _CALLS_PER_STATUS == 0 and self.status() == "exited":
                raise TimeoutError(f"{self} ended while it started:\n{self.logs()}")
            return False

        wait_until(ready, timeout=timeout, what=lambda: f"{self} ready:\n{self.logs()}", interval=0.1)

    def create(
        self, image: str, command: Iterable[str] = (), *, files: Mapping[str, File] | None = None, **options: Any
    ) -> None:
        """Create and start the container, without waiting for the server.

        Args:
            image: pulled where docker does not have it, which may take minutes.
            command: the arguments of the image's entry point.
            files: of the container: absolute path → content.
            options: of docker's `create`: environment, network, hostname and so on.

        Raises:
            LabError: docker does not answer, or cannot create or start the container.
            UsageError: it was created already.
        """
        if self._container is not None:
            raise UsageError("the container was created already: remove() it first")
        self._docker = connect_to_docker()
        try:
            host = self._docker.host()
            local = host in _LOOPBACK
            self.host = "127.0.0.1" if local else host
            if not has_image(image, self._docker):
                self._docker.client.images.pull(image)
            for attempt in range(_START_ATTEMPTS):
                self._ports = {inside: free_port() for inside in self._ports}
                bind = "127.0.0.1" if local else "0.0.0.0"  # noqa: S104  # docker runs elsewhere
                self._container = self._docker.client.containers.create(
                    image,
                    list(command),
                    labels={OWNER_LABEL: owner()},
                    ports={f"{inside}/tcp": (bind, outside) for inside, outside in self._ports.items()},
                    **options,
                )
                self.put_files(files or {})
                try:
                    self._container.start()
                    break
                except APIError as error:
                    # Another process may have taken one of the ports since it was found free.
                    self._container.remove(force=True, v=True)
                    self._container = None
                    if attempt == _START_ATTEMPTS - 1 or "port" not in str(error):
                        raise
        except DockerException as error:
            raise LabError(f"docker cannot start a container of {image}: {error}") from error
        finally:
            self._docker.client.close()

    def remove(self) -> None:
        """Kill the container and remove it with its data. May be called again."""
        if self._container is not None:
            with contextlib.suppress(NotFound):
                self._container.remove(force=True, v=True)
            self.let_go()
            self._container = None

    @property
    def container(self) -> Container:
        """The container, as docker's client sees it.

        Raises:
            UsageError: it was never created, or is removed.
        """
        if self._container is None:
            raise UsageError(f"this {type(self).__name__} was never launched, or is removed")
        return self._container

    @property
    def address(self) -> str:
        """The container's own address, which leads past docker's proxy for ports."""
        container = self.container
        container.reload()
        self.let_go()
        networks: dict[str, Any] = container.attrs["NetworkSettings"]["Networks"]
        address: str = next(iter(networks.values()))["IPAddress"]
        return address

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of all processes in the container so far."""
        usage = self.container.stats(stream=False, one_shot=True)["cpu_stats"]["cpu_usage"]["total_usage"]
        self.let_go()
        return float(usage) / 1e9

    def status(self) -> str:
        """Return docker's word for its state: ``"running"``, ``"paused"``, ``"exited"``."""
        container = self.container
        container.reload()
        self.let_go()
        status: str = container.status
        return status

    def logs(self, tail: int = 200) -> str:
        """Return the last lines of the server's log."""
        text: bytes = self.container.logs(tail=tail)
        self.let_go()
        return text.decode(errors="replace")

    # faults

    def kill(self) -> None:
        """Kill the server with SIGKILL; return when it is dead."""
        self.container.kill()
        self.wait_for_status("exited")

    def stop(self, timeout: float = 60.0) -> None:
        """Stop the server with SIGTERM; return when it has ended.

        Args:
            timeout: seconds, after which it is killed.
        """
        self.container.stop(timeout=int(timeout))
        self.wait_for_status("exited")

    def start(self, *, timeout: float = 90.0) -> None:
        """Start a server that was killed or stopped, on the same ports and data.

        Blocks until it answers.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: see `wait_ready`.
        """
        self.container.start()
        self.let_go()
        if self._loss or self._unreachable:
            self._set_packet_filter()
        self.wait_ready(timeout)

    def restart(self) -> None:
        """Stop the server in an orderly way, and start it again."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze every process of the server.

        Its sockets stay open, and the kernel goes on accepting connections for it.
        """

        def frozen() -> bool:
            try:
                self.container.pause()
            except APIError as error:
                # The runtime gives up within a third of a second where a process waits for the disk, which cannot be
                # frozen until it has its answer; all of them run on then.
                if "unable to freeze" in str(error):
                    return False
                raise
            return True

        wait_until(frozen, timeout=_STATUS_TIMEOUT, what="container frozen")
        self.wait_for_status("paused")

    def unpause(self) -> None:
        """Let a paused server run on."""
        self.container.unpause()
        self.wait_for_status("running")

    def lose_packets(self, share: float) -> None:
        """Drop a share of all TCP packets of the server, in both directions.

        Between docker's proxy and a client on its host no packet is lost: connect to `address`.

        Args:
            share: from 0 (none, as before) to 1.

        Raises:
            ConfigurationError: it is out of range.
            LabError: docker's host has no ``iptables``.
        """
        if not 0 <= share <= 1:
            raise ConfigurationError(f"share is from 0 to 1, not {share!r}")
        self._loss = share
        self._set_packet_filter()

    def lost_packets(self) -> int:
        """Return how many packets were dropped since the last change, in both directions."""
        listed = self._in_network_of_container("iptables -w -nvxL INPUT && iptables -w -nvxL OUTPUT")
        return sum(int(line.split()[0]) for line in listed.splitlines() if " DROP " in line)

    def heal(self) -> None:
        """Undo every fault; block until the server answers."""
        status = self.status()
        if status == "paused":
            self.unpause()
        elif status != "running":
            self.start()
        if self._loss:
            self.lose_packets(0)

    # below

    def put_files(self, files: Mapping[str, File]) -> None:
        """Write files into the container, which need not run."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, file in files.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(file.content), file.mode
                if file.user:
                    entry.uid, entry.gid = self._ids_of(file.user)
                tar.addfile(entry, io.BytesIO(file.content))
        if files:
            self.container.put_archive("/", archive.getvalue())
            self.let_go()

    def execute(self, *command: str) -> str:
        """Run a command in the container; return its output when it has ended.

        Raises:
            LabError: it failed, or the container does not run; the text has its output.
        """
        api = self.container.client.api
        try:
            execution = api.exec_create(self.container.id, list(command))["Id"]
            text: str = api.exec_start(execution).decode(errors="replace")
            # Its output may end before docker knows that it has.
            wait_until(
                lambda: api.exec_inspect(execution)["ExitCode"] is not None,
                timeout=_STATUS_TIMEOUT,
                what=f"{command[0]} ended",
            )
            code: int = api.exec_inspect(execution)["ExitCode"]
        except DockerException as error:
            raise LabError(f"{' '.join(command)}: {error}") from error
        finally:
            self.let_go()
        if code != 0:
            raise LabError(f"{' '.join(command)}: exit code {code}\n{text}")
        return text

    def wait_for_status(self, status: str) -> None:
        """Block until docker reports a state.

        Raises:
            TimeoutError: it did not within 30 s.
        """
        wait_until(lambda: self.status() == status, timeout=_STATUS_TIMEOUT, what=f"container {status}")

    def let_go(self) -> None:
        """Close the idle connections of the docker client."""
        self.container.client.close()

    def _set_packet_filter(self) -> None:
        """Replace the container's packet filter by the rules of the faults."""
        rules = [f"-A {chain} {'-s' if chain == 'INPUT' else '-d'} {peer} -j DROP" for chain, peer in self._unreachable]
        if self._loss:
            drop = f"-p tcp -m statistic --mode random --probability {self._loss:.4f} -j DROP"
            rules += [f"-A {chain} {drop}" for chain in ("INPUT", "OUTPUT")]
        lines = ["*filter", ":INPUT ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", *sorted(rules), "COMMIT"]
        self._in_network_of_container("printf '%s\\n' " + " ".join(f"'{one}'" for one in lines) + " | iptables-restore")

    def _in_network_of_container(self, script: str) -> str:
        """Run a script in the container's network namespace; return its output.

        The tools are those of docker's host, in a container with its file system: the server's image need not have
        them, nor must this process be root.
        """
        container = self.container
        try:
            output: bytes = container.client.containers.run(
                container.image.id,
                ["/host", "sh", "-c", script],
                entrypoint="chroot",
                user="0",
                network_mode=f"container:{container.id}",
                cap_add=["NET_ADMIN"],
                volumes={"/": {"bind": "/host", "mode": "rw"}},
                labels={OWNER_LABEL: owner()},
                remove=True,
            )
        except DockerException as error:
            raise LabError(f"the packet filter needs iptables on docker's host: {error}") from error
        finally:
            self.let_go()
        return output.decode()

    def _ids_of(self, user: str) -> tuple[int, int]:
        chunks, _ = self.container.get_archive("/etc/passwd")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            content = tar.extractfile("passwd")
            lines = [] if content is None else content.read().decode(errors="replace").splitlines()
        self.let_go()
        for line in lines:
            name, _, uid, gid, *_ = line.split(":")
            if name == user:
                return int(uid), int(gid)
        raise LabError(f"the image has no user {user}: take an image of RabbitMQ's, or one made from Debian's package")


def connect_to_docker() -> DockerClient:
    """Return a new client of the docker daemon.

    Raises:
        ConfigurationError: this is not Linux.
        LabError: no daemon answers.
    """
    if sys.platform != "linux":
        raise ConfigurationError(f"the lab runs on Linux with docker, not on {sys.platform}")
    try:
        return DockerClient()
    except DockerException as error:
        raise LabError(f"no docker daemon answers ({error}): start it, or set DOCKER_HOST") from error


def has_image(image: str, client: DockerClient | None = None) -> bool:
    """Return whether docker has an image, so that none need be pulled.

    Raises:
        ConfigurationError: this is not Linux.
        LabError: no docker daemon answers.
    """
    with contextlib.closing((client or connect_to_docker()).client) as connected:
        try:
            connected.images.get(image)
        except ImageNotFound:
            return False
        except DockerException as error:
            raise LabError(f"docker cannot look for the image {image}: {error}") from error
    return True


def remove_leftovers() -> None:
    """Remove the containers and networks of processes that were killed.

    Those of this host only, and of no process that is alive.

    Raises:
        LabError: no docker daemon answers.
    """
    client = connect_to_docker().client
    wanted = {"label": OWNER_LABEL}
    try:
        # Sparse, for what is listed may be gone when it is looked at: other processes remove theirs meanwhile.
        for container in client.containers.list(all=True, sparse=True, filters=wanted):
            if is_orphan(container.attrs["Labels"][OWNER_LABEL]):
                with contextlib.suppress(NotFound, APIError):
                    container.remove(force=True, v=True)
        for network in client.networks.list(filters=wanted):
            if is_orphan(network.attrs["Labels"][OWNER_LABEL]):
                with contextlib.suppress(NotFound, APIError):
                    network.remove()
    except DockerException as error:
        raise LabError(f"docker cannot list what is left of earlier runs: {error}") from error
    finally:
        client.close()


def owner(process: int | str = "self") -> str:
    """Return host, process id and start time, since a process id is used again."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return f"{socket.gethostname()}:{os.getpid() if process == 'self' else process}:{fields[19]}"


def is_orphan(label: str) -> bool:
    """Return whether the process of an `OWNER_LABEL` is known to be gone."""
    host, process, _started = label.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    try:
        return owner(process) != label
    except FileNotFoundError:
        return True


def free_port() -> int:
    """Return a port that nothing listens on, outside the kernel's local range.

    A client that tries again and again to connect to a dead port inside that range ends up connected to itself, and the
    server could not bind it again.
    """
    low, high = (int(n) for n in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = [port for port in range(10_000, 65_000) if not low <= port <= high]
    for port in random.SystemRandom().sample(candidates, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LabError("no free port outside the range of local ports (net.ipv4.ip_local_port_range)")
