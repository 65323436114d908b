"""A publisher whose calls are interrupted by signal handlers.

The handlers raise exceptions or use the publisher.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from integration.support.programs import environment
from integration.support.seeds import soaking
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import VirtualHost


def test_f48_exceptions_of_signal_handlers_cost_only_the_call(vhost: VirtualHost, seed: int) -> None:
    """Thousands of random interruptions lose no wake-up, window place or outcome."""
    seconds = "5" if soaking() else "2"
    command = [sys.executable, "-m", "integration.programs.interrupted", vhost.url, str(seed), seconds, "100"]
    done = subprocess.run(command, check=True, timeout=120, env=environment(), stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    interruptions, confirmed = (int(word) for word in done.stdout.split() if word.isdigit())
    assert interruptions > 100
    assert confirmed > 100


def test_f48_signal_handlers_may_use_and_close_their_publisher(vhost: VirtualHost, seed: int) -> None:
    """A handler that uses the publisher never waits for the call that it interrupts."""
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "integration.programs.handling_signals",
        vhost.url,
        str(seed),
    ]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        wait_until(lambda: (vhost.queue("orders") or {}).get("messages", 0) > 300, timeout=30, what="messages")
        program.send_signal(signal.SIGTERM)
        confirmed = int(program.communicate(timeout=30)[0])
        assert program.returncode == 0
    vhost.wait_for_messages("orders", confirmed)
