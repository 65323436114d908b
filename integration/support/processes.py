"""Python programs beside a test, in processes that take no time to start: a server forks them.

Python needs most of a second of CPU to import what a program of ours stands on. One process for all tests has done so,
`integration.programs.fork_server`, and forks the others. Where the start of Python itself is part of a test, or options
of the interpreter are, use `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from integration.support.programs import ROOT, environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Process", "run", "start_server"]


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._asked = 0
        with theirs:
            command = [sys.executable, "-m", "integration.programs.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def ask(self, request: Mapping[str, Any], streams: list[int]) -> int:
        """Return its answer to a request."""
        with self._lock:
            self._asked += 1
            socket.send_fds(self._socket, [json.dumps({**request, "number": self._asked}).encode()], streams)
            while True:
                number, _, answer = self._socket.recv(100).partition(b" ")
                assert number, "the server of processes has ended"
                if int(number) == self._asked:  # an earlier one's is of a test whose time was over
                    return int(answer)

    def end(self) -> None:
        self._socket.close()
        self._process.wait(30)


@cache
def start_server() -> _Server:
    """Start it in the background, unless it runs. It ends with this process."""
    server = _Server()
    atexit.register(server.end)
    return server


class Process:
    """A program in a process of its own, with a pipe for each stream; its methods are those of `subprocess.Popen`.

    Args:
        name: a module, as for ``python -m``, or a file whose name ends with ``.py``.
        arguments: of the program.
        stdin, stdout, stderr: a descriptor in place of the pipe.
        cwd: its directory; by default that of this process.
        env: its environment; by default that of `environment`.

    Attributes:
        stdin, stdout, stderr: this side of the pipes; None without.
        pid: its process id.
        returncode: None until it is known that it has ended.
    """

    def __init__(
        self,
        name: str,
        *arguments: str | bytes,
        stdin: int = subprocess.PIPE,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        ours: list[IO[bytes] | None] = [None, None, None]
        theirs, made = [stdin, stdout, stderr], []
        for number, descriptor in enumerate(theirs):
            if descriptor == subprocess.PIPE:
                read, write = os.pipe()
                theirs[number] = write if number else read
                made.append(theirs[number])
                ours[number] = os.fdopen(read, "rb") if number else os.fdopen(write, "wb")
        self.stdin, self.stdout, self.stderr = ours
        self.returncode: int | None = None
        self._read: dict[IO[bytes], bytes] = {}
        self._readers: list[threading.Thread] = []
        request = {
            "run": ["file" if name.endswith(".py") else "module", name, *map(os.fsdecode, arguments)],
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(environment() if env is None else env),
        }
        self.pid = start_server().ask(request, theirs)
        self._pidfd = os.pidfd_open(self.pid)  # until `wait` asked for its status, the process id is not used again
        for descriptor in made:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for its end; kill it before if the block has failed, since nobody else will end it."""
        if kind is not None:
            self.kill()
        self._close()
        self.wait()

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; return its exit status, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = start_server().ask({"wait": self.pid}, [])
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, given: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write to it, read all that it writes until it ends, and return that."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            calls: list[tuple[Any, ...]] = [(self._reading, stream) for stream in (self.stdout, self.stderr) if stream]
            calls.append((self._writing, given))
            self._readers = [threading.Thread(target=call, args=more, daemon=True) for call, *more in calls]
            for thread in self._readers:
                thread.start()
        for thread in self._readers:
            thread.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        out, errors = (self._read.get(stream, b"") if stream else b"" for stream in (self.stdout, self.stderr))
        self._close()
        return out, errors

    def _reading(self, stream: IO[bytes]) -> None:
        if not stream.closed:
            self._read[stream] = stream.read()

    def _writing(self, given: bytes) -> None:
        if self.stdin is not None and not self.stdin.closed:
            with suppress(BrokenPipeError):  # it does not want any more
                self.stdin.write(given)
                self.stdin.close()

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None and not stream.closed:
                with suppress(BrokenPipeError):
                    stream.close()


def run(
    name: str,
    *arguments: str | bytes,
    given: bytes = b"",
    timeout: float = 60,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end; see `Process`."""
    process = Process(name, *arguments, cwd=cwd, env=env)
    try:
        out, errors = process.communicate(given, timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess([name, *arguments], process.wait(), out, errors)
