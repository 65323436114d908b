"""Servers in docker containers, with the faults that all servers share.

Invariants:
- A method that changes the state of a server returns when the change is in effect, or raises after its deadline.
- Host ports are chosen once and survive `kill`, `stop` and `start`, so a URL stays valid.
- Containers and networks carry a label that names the process that owns them. `remove_leftovers` removes only those
  whose process is gone.
- A connection to docker serves one request, because tests may count the descriptors of their process.
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

from docker.errors import APIError, ContainerError, DockerException, ImageNotFound, NotFound
from testcontainers.core.docker_client import DockerClient

from reliable_mq.errors import ConfigurationError, LabError, UsageError
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from docker.models.containers import Container

OWNER_LABEL: Final = "reliable-mq.testing.owner"
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1"})
_START_ATTEMPTS: Final = 10
_STATUS_TIMEOUT: Final = 30.0
_CALLS_PER_STATUS: Final = 10  # docker answers more slowly than a starting server


class File(NamedTuple):
    """A file in a container.

    Attributes:
        content: The content of the file.
        user: The name of the owner, which the image must know. Empty for root.
        mode: The permission bits.
    """

    content: bytes
    user: str = ""
    mode: int = 0o644


class ContainedServer(ABC):
    """A server in a container, with the faults that all servers share.

    Args:
        ports: The ports in the container. Each gets a port of the host.

    Attributes:
        host: The name or address of the host that has the ports.
    """

    def __init__(self, ports: Iterable[int]) -> None:
        self.host = "127.0.0.1"
        self._ports = dict.fromkeys(ports, 0)
        self._container: Container | None = None
        self._loss = 0.0
        self._unreachable: set[tuple[str, str]] = set()
        self._refused: set[str] = set()
        self._filter: list[str] | None = []  # the rules in effect, None if they are not known

    # life

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server answers."""

    def wait_ready(self, timeout: float = 90.0) -> None:
        """Block until the server answers.

        Args:
            timeout: The maximum wait, in seconds.

        Raises:
            TimeoutError: If the server does not answer within `timeout`, or its container ends. The message has the end
                of the log.
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
            image: The docker image. If docker does not have it, it is pulled, which may take minutes.
            command: The arguments of the image's entry point.
            files: The files to write into the container, by absolute path.
            options: Options of docker's ``create``, such as environment, network and hostname.

        Raises:
            LabError: If docker does not answer, or cannot create or start the container.
            UsageError: If the container was created already.
        """
        if self._container is not None:
            raise UsageError("the container was created already: remove() it first")
        docker = connect_to_docker()
        self._loss, self._unreachable, self._refused, self._filter = 0.0, set(), set(), []
        try:
            host = docker.host()
            local = host in _LOOPBACK
            self.host = "127.0.0.1" if local else host
            if not has_image(image, docker):
                docker.client.images.pull(image)
            for attempt in range(_START_ATTEMPTS):
                self._ports = {inside: free_port() for inside in self._ports}
                bind = "127.0.0.1" if local else "0.0.0.0"  # noqa: S104  # docker runs elsewhere
                self._container = docker.client.containers.create(
                    image,
                    list(command),
                    labels={OWNER_LABEL: owner()},
                    ports={f"{inside}/tcp": (bind, outside) for inside, outside in self._ports.items()},
                    **options,
                )
                try:
                    self.put_files(files or {})
                    self._container.start()
                    break
                except BaseException as error:
                    self.remove()
                    # Another process may have bound one of the ports after it was found free.
                    if not isinstance(error, APIError) or attempt == _START_ATTEMPTS - 1 or "port" not in str(error):
                        raise
        except DockerException as error:
            raise LabError(f"docker cannot start a container of {image}: {error}") from error

    def remove(self) -> None:
        """Kill the container and remove it with its data. Repeated calls are safe."""
        if self._container is not None:
            with contextlib.suppress(NotFound):
                self._container.remove(force=True, v=True)
            self._container = None

    @property
    def container(self) -> Container:
        """The container object of docker's client.

        Raises:
            UsageError: If the container was never created, or was removed.
        """
        if self._container is None:
            raise UsageError(f"this {type(self).__name__} was never launched, or is removed")
        return self._container

    @property
    def address(self) -> str:
        """The container's own address, which bypasses docker's port proxy."""
        self.container.reload()
        networks: dict[str, Any] = self.container.attrs["NetworkSettings"]["Networks"]
        address: str = next(iter(networks.values()))["IPAddress"]
        return address

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of all processes in the container so far."""
        usage = self.container.stats(stream=False, one_shot=True)["cpu_stats"]["cpu_usage"]["total_usage"]
        return float(usage) / 1e9

    def status(self) -> str:
        """Return docker's name of the state: ``"running"``, ``"paused"``, ``"exited"``."""
        self.container.reload()
        status: str = self.container.status
        return status

    def logs(self, tail: int = 200) -> str:
        """Return the last lines of the server's log."""
        text: bytes = self.container.logs(tail=tail)
        return text.decode(errors="replace")

    # faults

    def kill(self) -> None:
        """Kill the server with SIGKILL. Blocks until it is dead.

        Raises:
            LabError: If the server is dead already.
        """
        self._change_state("kill")
        self.wait_for_status("exited")

    def stop(self, timeout: float = 60.0) -> None:
        """Stop the server with SIGTERM. Blocks until it has ended.

        Args:
            timeout: The time after which the server is killed, in seconds.
        """
        self._change_state("stop", timeout=int(timeout))
        self.wait_for_status("exited")

    def start(self, *, timeout: float = 90.0) -> None:
        """Start a killed or stopped server with the same ports and data.

        Blocks until the server answers.

        Args:
            timeout: The maximum wait, in seconds.

        Raises:
            LabError: If the server is paused.
            TimeoutError: If the server does not answer, as for `wait_ready`.
        """
        if self.status() == "exited":
            self._filter = []  # the network namespace is new
        self._change_state("start")
        self._set_packet_filter()
        self.wait_ready(timeout)

    def restart(self) -> None:
        """Stop the server with SIGTERM and start it again."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze every process of the server.

        The server's sockets stay open, and the kernel still accepts connections for it.

        Raises:
            LabError: If the server is dead, or paused already.
        """

        def frozen() -> bool:
            try:
                self._change_state("pause")
            except LabError as error:
                # A process that waits for the disk cannot be frozen before the disk answers. The runtime gives up
                # within a third of a second, and then all processes run again.
                if "unable to freeze" in str(error):
                    return False
                raise
            return True

        wait_until(frozen, timeout=_STATUS_TIMEOUT, what="container frozen")
        self.wait_for_status("paused")

    def unpause(self) -> None:
        """Resume a paused server.

        Raises:
            LabError: If the server is not paused.
        """
        self._change_state("unpause")
        self.wait_for_status("running")

    def lose_packets(self, share: float) -> None:
        """Drop a share of the server's TCP packets, in both directions.

        A dead server drops them from its next start. No packet is lost between docker's port proxy and a client on
        docker's host, so connect to `address` instead.

        Args:
            share: The share to drop, from 0 (no packets) to 1.

        Raises:
            ConfigurationError: If `share` is out of range.
            LabError: If docker's host has no ``iptables``.
        """
        if not 0 <= share <= 1:
            raise ConfigurationError(f"share is from 0 to 1, not {share!r}")
        self._loss = share
        self._set_packet_filter()

    def lost_packets(self) -> int:
        """Return the number of packets dropped in both directions since the last change."""
        listed = self._in_network_of_container("iptables -w -nvxL INPUT && iptables -w -nvxL OUTPUT")
        return sum(int(line.split()[0]) for line in listed.splitlines() if " DROP " in line)

    def heal(self) -> None:
        """Undo every fault. Blocks until the server answers.

        Raises:
            TimeoutError: If the server does not answer, as for `wait_ready`.
        """
        self.lose_packets(0)
        status = self.status()
        if status == "paused":
            self.unpause()
        elif status != "running":
            self.start()
        self.wait_ready()

    # below

    def put_files(self, files: Mapping[str, File]) -> None:
        """Write files into the container, which does not need to run."""
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

    def execute(self, *command: str) -> str:
        """Run a command in the container. Wait for its end and return its output.

        Raises:
            LabError: If the command fails, or the container is not running. The message has the output of a command
                that failed.
        """
        api = self.container.client.api
        try:
            execution = api.exec_create(self.container.id, list(command))["Id"]
            text: str = api.exec_start(execution).decode(errors="replace")
            # The output may end before docker notices that the command has ended.
            wait_until(
                lambda: api.exec_inspect(execution)["ExitCode"] is not None,
                timeout=_STATUS_TIMEOUT,
                what=f"{command[0]} ended",
            )
            code: int = api.exec_inspect(execution)["ExitCode"]
        except DockerException as error:
            raise LabError(f"{' '.join(command)}: {error}") from error
        if code != 0:
            raise LabError(f"{' '.join(command)}: exit code {code}\n{text}")
        return text

    def wait_for_status(self, status: str) -> None:
        """Block until docker reports a state.

        Raises:
            TimeoutError: If docker does not report it within 30 s.
        """
        wait_until(lambda: self.status() == status, timeout=_STATUS_TIMEOUT, what=f"container {status}")

    def _change_state(self, action: str, **options: Any) -> None:
        """Call a method of docker's container object that changes the container's state."""
        try:
            getattr(self.container, action)(**options)
        except DockerException as error:
            raise LabError(f"docker cannot {action} {self}, which is {self.status()}: {error}") from error

    def _set_packet_filter(self) -> None:
        """Set the packet filter of a running container to the current faults."""
        rules = [f"-A {chain} {'-s' if chain == 'INPUT' else '-d'} {peer} -j DROP" for chain, peer in self._unreachable]
        rules += [f"-A OUTPUT -d {peer} -p tcp -j REJECT --reject-with tcp-reset" for peer in self._refused]
        if self._loss:
            drop = f"-p tcp -m statistic --mode random --probability {self._loss:.4f} -j DROP"
            rules += [f"-A {chain} {drop}" for chain in ("INPUT", "OUTPUT")]
        rules.sort()
        if rules == self._filter or self.status() not in ("running", "paused"):
            return
        before, self._filter = self._filter, None
        lines = ["*filter", ":INPUT ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", *rules, "COMMIT"]
        script = "printf '%s\\n' " + " ".join(f"'{one}'" for one in lines) + " | iptables-restore"
        try:
            self._in_network_of_container(script)
        except LabError as error:
            if isinstance(error.__cause__, ContainerError):  # iptables-restore replaces all rules or none
                self._filter = before
            raise
        self._filter = rules

    def _in_network_of_container(self, script: str) -> str:
        """Run a script in the container's network namespace. Return its output.

        The script runs in another container with the file system of docker's host, and uses the tools of that host.
        Therefore, the server's image does not need these tools, and this process does not need to be root.
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
                volumes_from=[f"{container.id}:ro"],  # or docker would create volumes for the image, and keep them
                labels={OWNER_LABEL: owner()},
                remove=True,
            )
        except DockerException as error:
            raise LabError(f"the packet filter needs iptables on docker's host: {error}") from error
        return output.decode()

    def _ids_of(self, user: str) -> tuple[int, int]:
        chunks, _ = self.container.get_archive("/etc/passwd")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            content = tar.extractfile("passwd")
            lines = [] if content is None else content.read().decode(errors="replace").splitlines()
        for line in lines:
            name, _, uid, gid, *_ = line.split(":")
            if name == user:
                return int(uid), int(gid)
        raise LabError(f"the image has no user {user}: take an image of RabbitMQ's, or one made from Debian's package")


def connect_to_docker() -> DockerClient:
    """Return a new client of the docker daemon.

    Raises:
        ConfigurationError: If the system is not Linux.
        LabError: If no docker daemon answers.
    """
    if sys.platform != "linux":
        raise ConfigurationError(f"the lab runs on Linux with docker, not on {sys.platform}")
    try:
        docker = DockerClient()
    except DockerException as error:
        raise LabError(f"no docker daemon answers ({error}): start it, or set DOCKER_HOST") from error
    docker.client.close()  # it has asked for the version of the API
    docker.client.api.headers["Connection"] = "close"
    return docker


def has_image(image: str, client: DockerClient | None = None) -> bool:
    """Return whether docker has an image, so that it does not need to be pulled.

    Raises:
        ConfigurationError: If the system is not Linux.
        LabError: If no docker daemon answers.
    """
    try:
        (client or connect_to_docker()).client.images.get(image)
    except ImageNotFound:
        return False
    except DockerException as error:
        raise LabError(f"docker cannot look for the image {image}: {error}") from error
    return True


def remove_leftovers() -> None:
    """Remove the containers and networks of processes that no longer run.

    Only processes of this boot of the host, and of this process's PID namespace, are considered. A container in which
    tests run usually has a PID namespace of its own.

    Raises:
        ConfigurationError: If the system is not Linux.
        LabError: If no docker daemon answers.
    """
    client = connect_to_docker().client
    wanted = {"label": OWNER_LABEL}
    try:
        # A full listing inspects each container, which fails if another process removes its container meanwhile.
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


def owner(process: int | str = "self") -> str:
    """Return a process's home, id and start time, since process ids are reused."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return f"{process_home()}:{os.getpid() if process == 'self' else process}:{fields[19]}"


def process_home() -> str:
    """Return the boot and the PID namespace, in which a process id has a meaning.

    A host name does not tell, because containers may have the name of their host, or of each other.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


def is_orphan(label: str) -> bool:
    """Return whether the process of an `OWNER_LABEL` is known to be gone."""
    home, process, _started = label.rsplit(":", 2)
    if home != process_home():
        return False
    try:
        return owner(process) != label
    except OSError:  # the process is gone, or belongs to another user and /proc hides it (hidepid)
        return not _exists(int(process))


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def free_port() -> int:
    """Return a free port, outside the kernel's range of local ports if it leaves any.

    A client that repeatedly connects to a dead port inside that range would at some time connect to itself, and the
    server could then not bind the port again.
    """
    low, high = (int(n) for n in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = range(10_000, 65_000)
    candidates = [port for port in ports if not low <= port <= high] or ports
    for port in random.SystemRandom().sample(candidates, min(100, len(candidates))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LabError("no free port: is the range of local ports (net.ipv4.ip_local_port_range) too wide?")
