"""The broker dies and comes back, by two commands of the user's, at moments that depend on the job, not on a clock."""

from __future__ import annotations

import enum
import shlex
import subprocess
import threading
from typing import Final

__all__ = ["BrokerState", "Outages"]

_PATIENCE: Final = 120.0  # seconds for a command


class BrokerState(enum.Enum):
    """What the commands have made of the broker."""

    RUNNING = "running"
    KILLED = "killed"
    STARTING = "starting"


class Outages:
    """Kills the broker `times` times, evenly spread over the job. For one thread; the commands run on another.

    Args:
        kill: a command that kills the broker and returns when it is dead; None for no outages.
        restart: a command that starts it again; it need not wait until the broker is up.
        times: how often.

    Attributes:
        done: how many outages there were.
        state: of the broker, as far as the commands go.
        failure: why it ended early: a command failed.
    """

    def __init__(self, kill: str | None, restart: str | None, *, times: int) -> None:
        self.done = 0
        self.state = BrokerState.RUNNING
        self.failure: str | None = None
        self._commands = None if kill is None or restart is None else (kill, restart)
        self._times = 0 if self._commands is None else times
        self._thread: threading.Thread | None = None

    def advance(self, part: float, *, connected: bool) -> None:
        """The job has come this far: kill the broker if it is time. Does not wait.

        Args:
            part: of the job, 0 to 1.
            connected: whether it is connected: the broker is back then, and may be killed again.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and connected:
            self.state = BrokerState.RUNNING
        due = self.done < self._times and part >= (self.done + 1) / (self._times + 1)
        if due and connected and self._thread is None and self.failure is None and self._commands is not None:
            self.done += 1
            self._thread = threading.Thread(target=self._outage, args=self._commands, name="outage")
            self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether the broker is yet to be killed, or to be started."""
        return self.failure is None and (self.done < self._times or self._thread is not None)

    def end(self) -> None:
        """Kill no more; wait until a broker that was killed is started again."""
        self._times = self.done
        if self._thread is not None:
            self._thread.join()

    def _outage(self, kill: str, restart: str) -> None:
        self.state = BrokerState.KILLED
        self._run(kill)
        self.state = BrokerState.STARTING
        self._run(restart)

    def _run(self, command: str) -> None:
        try:
            subprocess.run(  # noqa: S603  # the user's own command
                shlex.split(command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=_PATIENCE,
                start_new_session=True,  # Ctrl-C is ours: the broker is to be started again
            )
        except subprocess.CalledProcessError as error:
            self.failure = f"{command!r} failed with status {error.returncode}: {error.stderr.strip()}"
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.failure = f"{command!r} failed: {error}"
