"""A Python process of Spark, which `spark_server` forks.

It imports little, because Spark starts many. It lasts as long as the forked process.

Usage: ``python -ISE spark_python.py SOCKET -m MODULE ARGUMENT...``
"""

import json
import os
import select
import signal
import socket
import sys


def main(server: str, option: str, module: str, *arguments: str) -> None:
    assert option == "-m"
    request = {"run": ["module", module, *arguments], "cwd": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(server)
        socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
        child = int(asked.recv(100))
    try:
        process = os.pidfd_open(child)
    except ProcessLookupError:  # it has ended
        return
    signal.signal(signal.SIGTERM, lambda *_: signal.pidfd_send_signal(process, signal.SIGTERM))
    select.select([process], [], [])


if __name__ == "__main__":
    main(*sys.argv[1:])
