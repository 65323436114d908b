"""Carries out a generator of steps on a data channel, one after the other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq.core.setup import Pipeline, StepRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.events import DataChannel
    from reliable_mq.core.setup import Reply, Step, StepGenerator

__all__ = ["StepRun"]


class StepRun:
    """One generator, carried out. Lives on the I/O thread.

    Args:
        generator: the steps.
        done: called exactly once, with what the generator returned or the exception that ended it, unless it is
            dropped.
        answered: called with every answer of the broker.
    """

    def __init__(
        self, generator: StepGenerator, done: Callable[[Any], None], answered: Callable[[], None] | None = None
    ) -> None:
        self._generator = generator
        self._done: Callable[[Any], None] | None = done
        self._answered = answered
        self._next: Step | Pipeline | None = None  # to be taken on another channel
        self._replies: list[Reply] = []  # to the pipeline that is outstanding
        self._channel: DataChannel

    def start(self, channel: DataChannel) -> None:
        """Perform the first step, or go on on another channel."""
        self._channel = channel
        if self._next is None:
            self._advance(None)
        else:
            step, self._next = self._next, None
            self._perform(step)

    @property
    def wants_channel(self) -> bool:
        """Whether it goes on, on another channel, though the broker has closed its own."""
        return self._next is not None

    def refuse(self, code: int, text: str, *, connection: bool = False) -> None:
        """The broker closed the channel, or the connection: the generator says which error that is, or goes on."""
        if self._done is None:
            return
        refused = StepRefused(code, text, answered=tuple(self._replies), connection=connection)
        self._replies.clear()
        try:
            self._next = self._generator.throw(refused)
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception as error:  # noqa: BLE001  # handed on
            self._finish(error)

    def fail(self, error: Exception) -> None:
        """End with `error`, whatever the generator was waiting for."""
        if self._done is not None:
            self._generator.close()
            self._finish(error)

    def drop(self) -> None:
        """End without a word."""
        self._done = None
        self._generator.close()

    def _advance(self, reply: Reply | tuple[Reply, ...]) -> None:
        if self._done is None:
            return
        try:
            step = self._generator.send(reply)
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception as error:  # noqa: BLE001  # handed on
            self._finish(error)
        else:
            self._perform(step)

    def _perform(self, step: Step | Pipeline) -> None:
        try:
            if isinstance(step, Pipeline):
                self._channel.perform_all(step.steps, partial(self._collect, len(step.steps)))
            else:
                self._channel.perform(step, self._reply)
        except Exception as error:  # noqa: BLE001  # of a step that cannot be encoded; handed on
            self._generator.close()
            self._finish(error)

    def _reply(self, reply: Reply) -> None:
        if self._answered is not None:
            self._answered()
        self._advance(reply)

    def _collect(self, count: int, reply: Reply) -> None:
        if self._answered is not None:
            self._answered()
        self._replies.append(reply)
        if len(self._replies) == count:
            replies, self._replies = tuple(self._replies), []
            self._advance(replies)

    def _finish(self, outcome: object) -> None:
        done, self._done = self._done, None
        self._next = None
        if done is not None:
            done(outcome)
