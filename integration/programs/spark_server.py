"""Fork the Python processes of Spark, so that none has to import its modules.

Spark starts a Python process for each kind of task and for each query. Each imports PySpark, PyArrow and this package,
which takes a second of CPU time. `integration.programs.spark_python` is such a process: it gives its arguments,
environment and standard streams to this server, which forks a child for it.

Usage: ``python -m integration.programs.spark_server SOCKET``, with the number of a Unix socket that listens. The server
ends with its standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

from integration.programs.fork_server import become

_IMPORTED = (
    *("encodings.idna", "pandas", "pyarrow.compute", "pyarrow.pandas_compat"),  # PyArrow imports pandas if it is there
    *("pyspark.worker", "pyspark.sql.pandas.types", "reliable_mq.spark.datasource"),
    *("pyspark.sql.worker.create_data_source", "pyspark.sql.worker.data_source_pushdown_filters"),
    *("pyspark.sql.worker.lookup_data_sources", "pyspark.sql.worker.plan_data_source_read"),
    *("pyspark.sql.worker.write_into_data_source", "pyspark.sql.worker.commit_data_source_write"),
    "pyspark.sql.worker.python_streaming_sink_runner",
)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork children until the input ends; in each child, return its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child
    while listener in select.select([sys.stdin, listener], [], [])[0]:
        client, _ = listener.accept()
        with client:
            packet, streams, _flags, _address = socket.recv_fds(client, 1 << 20, 3)
            child = os.fork()
            if child:
                client.send(b"%d" % child)
            else:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
            for stream in streams:
                os.close(stream)
        if not child:
            request: dict[str, Any] = json.loads(packet)
            return request
    return None


if __name__ == "__main__":
    for _name in _IMPORTED:
        importlib.import_module(_name)
    gc.freeze()
    _request = serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:  # a child, which only runs its program from here on
        become(_request)
        _path = [path for path in os.environ["PYTHONPATH"].split(":") if path not in sys.path]
        sys.path[:1] = [_request["cwd"], *_path]
        runpy.run_module(_request["run"][1], run_name="__main__", alter_sys=True)
