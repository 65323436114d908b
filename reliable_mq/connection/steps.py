"""Carries out a generator of steps on a data channel, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliable_mq.core.setup import StepRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.events import DataChannel
    from reliable_mq.core.setup import Reply, StepGenerator

__all__ = ["StepRun"]


class StepRun:
    """One generator, carried out. Lives on the I/O thread.

    Args:
        generator: the steps.
        done: called exactly once, with what the generator returned or the exception that ended it, unless it is
            dropped.
    """

    def __init__(self, generator: StepGenerator, done: Callable[[Any], None]) -> None:
        self._generator = generator
        self._done: Callable[[Any], None] | None = done

    def start(self, channel: DataChannel) -> None:
        """Perform the first step."""
        self._channel = channel
        self._advance(None)

    def refuse(self, code: int, text: str) -> None:
        """The broker closed the channel: the generator says which error that is."""
        if self._done is None:
            return
        try:
            self._generator.throw(StepRefused(code, text))
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception as error:  # noqa: BLE001  # handed on
            self._finish(error)
        else:
            self.fail(RuntimeError("a set-up generator went on after its channel was closed"))

    def fail(self, error: Exception) -> None:
        """End with `error`, whatever the generator was waiting for."""
        if self._done is not None:
            self._generator.close()
            self._finish(error)

    def drop(self) -> None:
        """End without a word."""
        self._done = None
        self._generator.close()

    def _advance(self, reply: Reply) -> None:
        if self._done is None:
            return
        try:
            self._channel.perform(self._generator.send(reply), self._advance)
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception as error:  # noqa: BLE001  # of the generator, or of a step that cannot be encoded; handed on
            self._generator.close()
            self._finish(error)

    def _finish(self, outcome: object) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(outcome)
