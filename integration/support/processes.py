"""Runs Python programs for a test in processes that a server forks.

Python needs most of a second of CPU time to import this package and its dependencies. One process for all tests,
`integration.programs.fork_server`, imports them once and forks the other processes. Use `subprocess` if the start of
Python itself or an option of the interpreter is part of a test.
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
    """The fork server."""

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
        """Send a request, and return the answer."""
        with self._lock:
            self._asked += 1
            socket.send_fds(self._socket, [json.dumps({**request, "number": self._asked}).encode()], streams)
            while True:
                number, _, answer = self._socket.recv(100).partition(b" ")
                assert number, "the server of processes has ended"
                if int(number) == self._asked:  # otherwise it answers an earlier request that was abandoned
                    return int(answer)

    def end(self) -> None:
        self._socket.close()
        self._process.wait(30)


@cache
def start_server() -> _Server:
    """Start the fork server, unless it runs. It ends with this process."""
    server = _Server()
    atexit.register(server.end)
    return server


class Process:
    """A program in a separate process, with a pipe for each stream.

    Its methods are those of `subprocess.Popen`.

    Args:
        name: A module, as for ``python -m``, or a file whose name ends with ``.py``.
        arguments: The arguments of the program.
        stdin, stdout, stderr: A descriptor in place of the pipe.
        cwd: The working directory. None for the directory of this process.
        env: The environment. None for `environment`.

    Attributes:
        stdin, stdout, stderr: This side of the pipes. None without a pipe.
        pid: The process id.
        returncode: The exit status. None until the process is known to have ended.
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
        self._pidfd = os.pidfd_open(self.pid)  # the process id is not reused before `wait` asks for the status
        for descriptor in made:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the process ends. If the block has failed, kill it first."""
        if kind is not None:
            self.kill()
        self._close()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends; return its exit status, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = start_server().ask({"wait": self.pid}, [])
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, given: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write to the process, wait until it ends, and return its output."""
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
            with suppress(BrokenPipeError):  # the process has closed its input
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
    """Run a program until it ends; see `Process`."""
    process = Process(name, *arguments, cwd=cwd, env=env)
    try:
        out, errors = process.communicate(given, timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess([name, *arguments], process.wait(), out, errors)
