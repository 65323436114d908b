"""``make demo``: a broker in a container, and ``reliable-mq demo`` on it, which kills that container under the orders.

The wheel knows nothing of docker: the demo is given the commands that kill and start a broker, here these two.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from reliable_mq.testing import RabbitMQ, remove_leftovers


def main(arguments: list[str]) -> int:
    """Run the demo with these arguments; return its exit status."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the demo's; we clean up when it has ended
    remove_leftovers()
    print("starting RabbitMQ in a container", file=sys.stderr)
    with RabbitMQ() as broker:
        hooks = ["--kill-command", f"docker kill {broker.container.id}"]
        hooks += ["--restart-command", f"docker start {broker.container.id}"]
        command = [sys.executable, "-m", "reliable_mq.cli", "demo", "--url", broker.url, *hooks, *arguments]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
