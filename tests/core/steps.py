"""A broker that grants every step of a set-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliable_mq.codec.methods import CheckQueue, DeclareQueue, QueueState, Step
from reliable_mq.core.channel_setup import Pipeline

if TYPE_CHECKING:
    from collections.abc import Generator

    from reliable_mq.codec.methods import MethodReply


def granted(step: Step) -> MethodReply:
    return QueueState(step.name, 0, 0) if isinstance(step, DeclareQueue | CheckQueue) else None


def sent_by(generator: Generator[Step | Pipeline, Any, None]) -> list[Step | Pipeline]:
    """Run a generator, and return what it yielded, with pipelines as they are."""
    sent: list[Step | Pipeline] = []
    reply: object = None
    try:
        while True:
            step = generator.send(reply)
            sent.append(step)
            reply = tuple(map(granted, step.steps)) if isinstance(step, Pipeline) else granted(step)
    except StopIteration:
        return sent


def steps_of(generator: Generator[Step | Pipeline, Any, None]) -> list[Step]:
    """Run a generator, and return its steps, including those of pipelines."""
    return [one for step in sent_by(generator) for one in (step.steps if isinstance(step, Pipeline) else (step,))]
