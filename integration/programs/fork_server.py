"""Run modules and files as programs, each in a forked child.

The server imports the modules that most programs need before it forks. `integration.support.processes` starts it with
the number of a socket. A request is a JSON object in one packet:

- ``{"run": [KIND, NAME, ARGUMENT...], "cwd": PATH, "environment": {...}}`` with three descriptors, which become its
  standard streams. KIND is ``module`` or ``file``. The answer is its process id.
- ``{"wait": PROCESS}`` for a process that has ended. The answer is its exit status, negative for a signal.

Each request has a ``number``, which precedes the answer.

A child behaves like ``python -m NAME``, from its arguments and streams to its exit. With ``PYTHONWARNINGS=error``, its
warnings are errors. It does not suit a program that depends on other environment variables that are read while Python
starts, or while one of the modules below is imported.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import runpy
import socket
import sys
import warnings
from typing import Any, TextIO

import typer

_IMPORTED = (
    *("aiosqlite", "prometheus_client", "psycopg", "pymysql", "redis", "sqlalchemy.ext.asyncio"),
    *("sqlalchemy.dialects.mysql", "sqlalchemy.dialects.postgresql", "sqlalchemy.dialects.sqlite"),
    *("rich.live", "rich.progress", "rich.table", "shlex", "typer.rich_utils"),
    *("reliable_mq", "reliable_mq.deadletters", "reliable_mq.outbox", "reliable_mq.stores", "reliable_mq.testing"),
    *("reliable_mq.aio.consumer", "reliable_mq.aio.publisher", "reliable_mq.stage"),
)


def load_typer() -> None:
    """Parse a command line, because typer imports most of what it needs only then."""
    app = typer.Typer()

    @app.command()
    def run(*, number: int = 0) -> None:
        """Do nothing."""

    typer.main.get_command(app)(["--number", "1"], standalone_mode=False)


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork children until the client disconnects; in each child, return its request."""
    while True:
        packet, streams, _flags, _address = socket.recv_fds(requests, 1 << 20, 3)
        if not packet:
            return None
        request: dict[str, Any] = json.loads(packet)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            requests.send(b"%d %d" % (request["number"], os.waitstatus_to_exitcode(status)))
            continue
        child = os.fork()
        if child == 0:
            requests.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return request
        for stream in streams:
            os.close(stream)
        requests.send(b"%d %d" % (request["number"], child))


def become(request: dict[str, Any]) -> None:
    """Apply the directory, environment, streams and arguments of a request."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    sys.argv[1:] = request["run"][2:]
    stdin = io.BufferedReader(io.FileIO(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(stdin, errors=sys.stdin.errors)
    sys.stdout = sys.__stdout__ = _writer(sys.stdout, by_line=os.isatty(1) or "PYTHONUNBUFFERED" in os.environ)
    sys.stderr = sys.__stderr__ = _writer(sys.stderr, by_line=True)


def _writer(former: TextIO, *, by_line: bool) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(former.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, errors=former.errors, line_buffering=by_line)


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    load_typer()
    gc.freeze()
    _request = serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:  # a child, which only runs its program from here on
        become(_request)
        _kind, _name = _request["run"][:2]
        sys.path[0] = _request["cwd"] if _kind == "module" else os.path.dirname(os.path.abspath(_name))  # noqa: PTH100, PTH120
        if _kind == "module":
            runpy.run_module(_name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(_name, run_name="__main__")
