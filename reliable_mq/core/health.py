"""The judgement whether a publisher or consumer is live, ready and progressing.

The engine collects signs, and the functions here judge them. The three answers are separate, as their remedies differ:

- Not live: only a new process helps. The event loop stalls or has ended, or the part has given up for good.
- Not ready: the part works but cannot do its task now. It has no connection or no idempotency store, cannot store in
  its outbox or gets no answer of it, or is blocked by the broker, paused or stopping.
- Not progressing: the part has had work for a long time, and none of that work has ended.

Invariants:

- A part that is not live is not ready.
- A reason is given if and only if an answer is no.
- A part that its program has closed is live, not ready, and progressing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

_STORE_FAILURE_LASTS: Final = 30.0  # seconds: three readiness probes of Kubernetes by default


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a publisher, of a consumer, or of a part of your own.

    Attributes:
        live: False if only a new process helps.
        ready: Whether the part can do its task now.
        progressing: False if the part has had work for a long time and none of it has ended.
        since: When the oldest reason began, in seconds since 1970. Without a reason, when the part became ready.
        reason: Why an answer is no. Empty if every answer is yes.
    """

    live: bool
    ready: bool
    progressing: bool
    since: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """The signs of one connection. Times are in seconds of the monotonic clock."""

    changed_at: float  # when it was last made, connected, lost or closed
    stuck_after: float  # the seconds after which work counts as stuck if none of it ends
    closed: str = ""  # how its program closed it ("closed", "stopped")
    started: bool = True  # whether a first connect was requested
    connected: bool = False  # whether its channel is ready
    disconnected_reason: str | None = None
    given_up: str = ""  # why no attempt to connect follows
    loop_over: bool = False  # whether its I/O thread or event loop has ended before it was closed
    unanswered_since: float | None = None  # since when its event loop has not run a call
    patience: float = 0.0  # the seconds for which an unanswered call is no problem
    work: int = 0  # the number of waiting messages
    worked_at: float = 0.0  # when some work was last done, or when the first work arrived


class StoreFailure(NamedTuple):
    """An outbox that fails to store messages. Times are as in `Signs`."""

    since: float  # when the first message after the last stored one failed
    last: float  # when the last message failed
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSigns:
    """The signs of an outbox and its relay."""

    open: bool  # whether it was opened
    store_failing: StoreFailure | None = None  # None if the last message was stored
    unstored: int = 0  # the number of messages that wait for an answer of the outbox
    answered_at: float = 0.0  # when the outbox last answered, or when the first of these messages arrived
    unanswered_since: float | None = None  # since when its relay waits for an answer of the outbox
    relay_over: bool = False  # whether its relay has ended before it was closed
    trouble: str = ""  # why nothing can be relayed now
    trouble_since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSigns(Signs):
    """Signs of a publisher."""

    blocked_reason: str | None = None  # the reason of the broker, while it blocks publishing
    blocked_at: float | None = None  # since when; None if it has just begun
    outbox: OutboxSigns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSigns(Signs):
    """Signs of a consumer, whose work is deliveries with handlers."""

    paused: bool = False  # whether the kill switch pauses it
    paused_at: float | None = None  # since when; None if it has just begun
    store_failing: tuple[float, str] | None = None  # since when its idempotency store fails, and why
    #: The signs of the connection for retries and dead letters, whose work is unconfirmed messages. None before the
    #: first message.
    republisher: PublisherSigns | None = None
    holds_publishes: bool = False  # whether retries or dead letters wait for another try to publish them


class _Problem(NamedTuple):
    text: str
    since: float
    live: bool = True
    ready: bool = False
    progressing: bool = True


def health_of(signs: PublisherSigns | ConsumerSigns, now: float, wall_clock: float) -> Health:
    """Judge signs at `now` (monotonic clock), which is `wall_clock` since 1970."""
    if signs.closed:
        return Health(True, False, True, wall_clock - (now - signs.changed_at), signs.closed)
    problems = _common(signs, now)
    problems += _of_publisher(signs, now) if isinstance(signs, PublisherSigns) else _of_consumer(signs, now)
    since = min((problem.since for problem in problems), default=signs.changed_at)
    live = all(problem.live for problem in problems)
    return Health(
        live,
        live and all(problem.ready for problem in problems),
        all(problem.progressing for problem in problems),
        wall_clock - (now - since),
        "; ".join(problem.text for problem in problems),
    )


def _common(signs: Signs, now: float) -> list[_Problem]:
    """Find problems that publishing and consuming share."""
    problems: list[_Problem] = []
    unanswered = signs.unanswered_since
    if signs.loop_over:
        problems.append(_Problem("its I/O thread or event loop has ended", signs.changed_at, live=False))
    elif unanswered is not None and now - unanswered >= signs.patience:
        text = f"its event loop has stalled for {now - unanswered:.1f} s or longer"
        problems.append(_Problem(text, unanswered, live=False))
    relayed = isinstance(signs, PublisherSigns) and signs.outbox is not None  # a relay retries forever
    if signs.given_up and not relayed:
        problems.append(_Problem(f"given up: {signs.given_up}", signs.changed_at, live=False))
    waited = now - signs.worked_at
    if signs.work and waited >= signs.stuck_after:
        text = f"{signs.work} {_WORK[type(signs)]}, and none of them has ended for {waited:.1f} s"
        problems.append(_Problem(text, signs.worked_at, ready=True, progressing=False))
    return problems


def _of_publisher(signs: PublisherSigns, now: float) -> list[_Problem]:
    outbox = signs.outbox
    if outbox is not None:  # messages are stored, with or without a connection
        return _of_outbox(outbox, signs, now)
    if not signs.connected:
        return [] if signs.given_up else [_not_connected(signs)]
    if signs.blocked_reason:
        since = now if signs.blocked_at is None else signs.blocked_at
        return [_Problem(f"the broker blocks publishing: {signs.blocked_reason}", since)]
    return []


def _of_outbox(outbox: OutboxSigns, signs: PublisherSigns, now: float) -> list[_Problem]:
    if not outbox.open:
        return [_Problem("its outbox is not open", signs.changed_at)]
    problems = _of_store_failure(outbox, signs, now)
    waited = now - outbox.answered_at
    if outbox.unstored and waited >= signs.stuck_after:
        text = f"{outbox.unstored} messages are not stored, and its outbox has not answered for {waited:.1f} s"
        problems.append(_Problem(text, outbox.answered_at, progressing=False))
    silent_since = outbox.unanswered_since
    if silent_since is not None and now - silent_since >= signs.stuck_after:
        text = f"its outbox has not answered its relay for {now - silent_since:.1f} s"
        problems.append(_Problem(text, silent_since, progressing=False))
    if outbox.relay_over:
        problems.append(_Problem("the relay of its outbox has ended", signs.changed_at, live=False))
    if outbox.trouble and now - outbox.trouble_since >= signs.stuck_after:
        text = f"nothing of its outbox can be published: {outbox.trouble}"
        problems.append(_Problem(text, outbox.trouble_since, ready=True, progressing=False))
    return problems


def _of_store_failure(outbox: OutboxSigns, signs: PublisherSigns, now: float) -> list[_Problem]:
    """Find the problem of an outbox that fails to store messages.

    It ends with the next stored message, or a while after the last failure. A failed message is not tried again, and a
    publisher that is not ready gets no traffic: only new traffic shows whether the outbox can store messages again.
    While messages wait for an answer, the answer will show it.
    """
    failure = outbox.store_failing
    if failure is None or (not outbox.unstored and now - failure.last >= _STORE_FAILURE_LASTS):
        return []
    progressing = now - failure.since < signs.stuck_after
    text = f"its outbox cannot store messages: {failure.reason}"
    return [_Problem(text, failure.since, progressing=progressing)]


def _of_consumer(signs: ConsumerSigns, now: float) -> list[_Problem]:
    problems: list[_Problem] = []
    if not signs.connected:
        if not signs.given_up:
            problems.append(_not_connected(signs))
    elif signs.paused:
        since = now if signs.paused_at is None else signs.paused_at
        problems.append(_Problem("paused by the kill switch: its handlers fail", since, progressing=False))
    if signs.store_failing is not None:
        since, why = signs.store_failing
        progressing = now - since < signs.stuck_after
        problems.append(_Problem(f"its idempotency store fails: {why}", since, progressing=progressing))
    if signs.republisher is not None:
        problems += _of_republisher(signs.republisher, now, signs.holds_publishes)
    return problems


def _of_republisher(signs: PublisherSigns, now: float, holds_publishes: bool) -> list[_Problem]:
    """Find problems that delay retries and dead letters, if any are waiting."""
    problems = _common(signs, now) + (_of_publisher(signs, now) if signs.work or holds_publishes else [])
    return [problem._replace(text=f"its retries and dead letters: {problem.text}") for problem in problems]


def _not_connected(signs: Signs) -> _Problem:
    if not signs.started:
        return _Problem("not started: `with`, `connect()` or the first call connects", signs.changed_at)
    return _Problem(f"not connected: {signs.disconnected_reason or 'the first attempt goes on'}", signs.changed_at)


_WORK = {PublisherSigns: "messages are outstanding", ConsumerSigns: "deliveries are with handlers"}
