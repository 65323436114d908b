"""What the harness has in common for its containers: whose they are, where they listen, how they are frozen.

Invariants: a method that changes the state of a server returns when the change is in effect, or raises after its
deadline. Containers carry a label that names the process that owns them; `remove_leftovers` removes those whose process
is gone and no others. Docker clients are left without idle connections: tests count this process's descriptors.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
from docker.errors import APIError, NotFound

from integration.support.waiting import wait_until

if TYPE_CHECKING:
    from docker.models.containers import Container

OWNER_LABEL = "reliable-mq.integration.owner"
_SETUP = Path(__file__).parent.parent / "setup.sh"


class ContainedServer(ABC):
    """A server in a container, and the faults that can be done to every such server."""

    _losing = False

    @property
    @abstractmethod
    def container(self) -> Container:
        """As docker's client knows it.

        Raises:
            RuntimeError: it was never launched, or is removed.
        """

    @abstractmethod
    def start(self) -> None:
        """Start again what was killed or stopped, on the same ports and the same data; returns when it answers."""

    def kill(self) -> None:
        """SIGKILL; returns when the server is dead."""
        self.container.kill()
        self.wait_for_status("exited")

    def pause(self) -> None:
        """Freeze every process of the server; its sockets stay, and the kernel goes on accepting connections for it."""

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

        wait_until(frozen, timeout=30, what="container frozen")
        self.wait_for_status("paused")

    def unpause(self) -> None:
        self.container.unpause()
        self.wait_for_status("running")

    def lose_packets(self, share: float) -> None:
        """Drop this share of the packets of every TCP connection of the server, each way; 0 for none, as before.

        By the statistic module of iptables, in the network namespace of the container. The tool is the host's, in a
        container with its file system: the server's image need not have it, nor this process be root. What is between
        docker's proxy and a client on its host loses nothing: connect to `address`.
        """
        self._losing = share > 0
        for chain in ("INPUT", "OUTPUT"):
            self._iptables("-F", chain)
            if share:
                drop = ["-m", "statistic", "--mode", "random", "--probability", f"{share:.4f}", "-j", "DROP"]
                self._iptables("-A", chain, "-p", "tcp", *drop)

    def lost_packets(self) -> int:
        """How many packets were dropped so far, both ways."""
        listed = "".join(self._iptables("-L", chain, "-nvx") for chain in ("INPUT", "OUTPUT"))
        return sum(int(line.split()[0]) for line in listed.splitlines() if " DROP " in line)

    @property
    def address(self) -> str:
        """The container's own, which a process on its host reaches without a proxy."""
        container = self.container
        container.reload()
        self.let_go()
        networks: dict[str, Any] = container.attrs["NetworkSettings"]["Networks"]
        address: str = next(iter(networks.values()))["IPAddress"]
        return address

    def _iptables(self, *arguments: str) -> str:
        container = self.container
        output: bytes = container.client.containers.run(
            container.image.id,
            ["/host", "iptables", "-w", *arguments],
            entrypoint="chroot",
            user="0",
            network_mode=f"container:{container.id}",
            cap_add=["NET_ADMIN"],
            volumes={"/": {"bind": "/host", "mode": "rw"}},
            labels={OWNER_LABEL: owner()},
            remove=True,
        )
        self.let_go()
        return output.decode()

    def heal(self) -> None:
        """A server that is paused or dead, or loses packets, is well again."""
        status = self.status()
        if status == "paused":
            self.unpause()
        elif status != "running":
            self.start()
        if self._losing:
            self.lose_packets(0)

    def status(self) -> str:
        """In docker's words: ``"running"``, ``"paused"``, ``"exited"``."""
        container = self.container
        container.reload()
        self.let_go()
        status: str = container.status
        return status

    def wait_for_status(self, status: str) -> None:
        wait_until(lambda: self.status() == status, timeout=30, what=f"container {status}")

    def logs(self, tail: int = 200) -> str:
        """The last lines that the server logged."""
        text: bytes = self.container.logs(tail=tail)
        self.let_go()
        return text.decode(errors="replace")

    def let_go(self) -> None:
        """Close the docker client's idle connections."""
        self.container.client.close()


def set_up(*part: str) -> None:
    """Have ``setup.sh`` see to it that docker runs and that an image exists; what is missing takes minutes to build.

    Args:
        part: ``"image", line`` for the broker of that line, or ``"databases"``.

    Raises:
        RuntimeError: it cannot be had on this machine; the message says what to do.
    """
    done = subprocess.run([_SETUP, *part], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"setup.sh {' '.join(part)}:\n{done.stderr}")


def remove_leftovers() -> None:
    """Remove the containers of earlier test runs on this host that were killed before they could do it."""
    client = docker.from_env()
    try:
        # Sparse, for what is listed may be gone when it is looked at: other test processes remove theirs meanwhile.
        for container in client.containers.list(all=True, sparse=True, filters={"label": OWNER_LABEL}):
            if is_orphan(container.attrs["Labels"][OWNER_LABEL]):
                with contextlib.suppress(NotFound, APIError):
                    container.remove(force=True, v=True)
    finally:
        client.close()


def owner(process: int | str = "self") -> str:
    """Host, process id and start time: a process id alone is used again."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return f"{socket.gethostname()}:{os.getpid() if process == 'self' else process}:{fields[19]}"


def is_orphan(label: str) -> bool:
    """Whether the process of an `OWNER_LABEL` is gone, as far as this host can know."""
    host, process, _started = label.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    try:
        return owner(process) != label
    except FileNotFoundError:
        return True


def free_port() -> int:
    """A port that nothing listens on, outside the range that the kernel takes local ports from.

    A client that tries again and again to connect to a dead port inside that range ends up connected to itself, and the
    server could not bind it again.
    """
    low, high = (int(n) for n in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = [port for port in range(10_000, 65_000) if not low <= port <= high]
    for port in random.SystemRandom().sample(candidates, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port outside the range of local ports")
