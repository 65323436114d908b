"""Keeps one connection with one data channel: connects, sets up, notices the loss, connects again.

What to try next, when, and whether at all, is `core.reconnect`'s decision; what a refused step means,
`core.channel_setup`'s. This carries it out, on an event loop. The states, and what leads from one to the next::

        WAITING --no connection--> PREPARING --credentials--> CONNECTING --handshake--> SETTING_UP --last step--> READY
       |   `--the connection lives---------------------------------------------------^
       ^---- an attempt failed or took longer than the time to connect; a channel or a connection was lost
    READY --reopen_channel--> REOPENING --close-ok--> WAITING
    an attempt, READY, REOPENING --discard--> DISCARDED --next turn of the loop--> WAITING
    an attempt failed and recovery gives up --> GIVEN_UP
    any --close--> CLOSING --every socket is closed--> on_ended()

Invariants:

- ``ready`` and ``lost`` alternate, each pair with a generation of its own, that is never used again.
- The client hears nothing of a channel before its ``ready`` (a `ReadyGate` holds it back) and nothing after its
  ``lost``; what comes from an older link or channel is known by identity and dropped.
- Nothing reaches a socket through ``write`` but in READY: never a frame on a channel that the client did not mean.
- PREPARING, CONNECTING, SETTING_UP, REOPENING and CLOSING end by a timer at the latest. Only a broker that has blocked
  the connection, and so answers nothing, suspends it (not in CLOSING).
- No method of the client is called from inside a call of the client.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq._util.threads import in_background
from reliable_mq.connection.channel import SetupRunner
from reliable_mq.connection.interfaces import ConnectCredentials
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.reconnect import Asking, ConnectionLoss
from reliable_mq.errors import BrokerUnavailable, ReliableMQError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.channel import Channel
    from reliable_mq.connection.interfaces import ConnectionListener, EventLoop, Link, OpenLink, TimerHandle
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.reconnect import ReconnectPolicy
    from reliable_mq.settings import ConnectionSettings, Endpoint

__all__ = ["Connector"]

logger = logging.getLogger(__name__)

_ASKED_AGAIN = 0.9  # of the time to connect
_ABORT_GRACE = 1.0  # seconds for aborted sockets to be closed, which takes one turn of the loop


class _ConnectionState(enum.Enum):
    WAITING = enum.auto()
    PREPARING = enum.auto()
    CONNECTING = enum.auto()
    SETTING_UP = enum.auto()
    READY = enum.auto()
    REOPENING = enum.auto()
    DISCARDED = enum.auto()
    GIVEN_UP = enum.auto()
    CLOSING = enum.auto()


_ATTEMPT = frozenset({_ConnectionState.PREPARING, _ConnectionState.CONNECTING, _ConnectionState.SETTING_UP})


class Connector:
    """See the module. Everything is called on the loop; what a face hands on to its client is described there.

    Attributes:
        callback_errors: exceptions that came out of callbacks.
    """

    def __init__(
        self,
        loop: EventLoop,
        open_link: OpenLink,
        *,
        name: str,
        settings: ConnectionSettings,
        setup: Callable[[ServerInfo], SetupGenerator],
        client: ConnectionListener,
        recovery: ReconnectPolicy,
        on_ended: Callable[[], None],
    ) -> None:
        self.callback_errors = 0
        self._loop = loop
        self._open_link = open_link
        self._name = name
        self._settings = settings
        self._setup = setup
        self._client = client
        self._recovery = recovery
        self._on_ended = on_ended
        self._state = _ConnectionState.WAITING
        self._timer: TimerHandle | None = None  # of the state
        # For credentials, on helper threads; an attempt that has waited for an answer in vain is over a little earlier.
        self._asking = Asking(_ASKED_AGAIN * settings.connect_timeout)
        self._link: Link | None = None
        self._dying: set[Link] = set()  # aborted, sockets not closed yet
        self._channel: Channel | None = None
        self._generation = 0
        self._live = False  # ready was reported, lost was not
        self._blocked: str | None = None  # the reason, while the broker has blocked the connection
        self._blocked_reported = False
        self._set_up: SetupRunner | None = None
        self._answered_at = float("-inf")  # when the broker answered a step of a set-up last
        self._runs: deque[SetupRunner] = deque()  # the first is under way
        self._run_timer: TimerHandle | None = None

    def begin(self) -> None:
        """Connect, and go on until `close`, which may have come before."""
        if self._state is _ConnectionState.WAITING:
            self._recovery.begin(time.monotonic())
            self._connect()

    # -- what the client asks for ----------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._state is _ConnectionState.READY and self._link is not None:
            self._link.write(data)

    def write_buffer_size(self) -> int:
        return self._link.write_buffer_size if self._link is not None else 0

    def run(self, generator: StepGenerator, done: Callable[[Any], None]) -> None:
        if self._state is _ConnectionState.READY:
            self._runs.append(SetupRunner(generator, partial(self._run_ended, done)))
            if len(self._runs) == 1:
                self._loop.call_soon(self._start_run)
        else:
            generator.close()
            self._loop.call_soon(partial(self._notify, done, BrokerUnavailable("no channel is open")))

    def discard(self, reason: str) -> None:
        if self._state in {_ConnectionState.READY, _ConnectionState.REOPENING}:
            self._state = _ConnectionState.DISCARDED
            self._cancel_timer()
            self._loop.call_soon(partial(self._discarded, ConnectionLoss(None, reason, "connection", by_broker=False)))
        elif self._state in _ATTEMPT:
            self._state = _ConnectionState.DISCARDED
            self._cancel_timer()
            self._loop.call_soon(partial(self._attempt_discarded, BrokerUnavailable(reason)))
        self._drop_link(reason)

    def reopen_channel(self) -> None:
        if self._state is _ConnectionState.READY and self._channel is not None:
            self._state = _ConnectionState.REOPENING
            self._channel.silence()
            self._channel.close()
            self._set_timer(self._settings.connect_timeout, self._late)

    def close(self, grace: float) -> None:
        """End: a closing handshake where there is a connection, for up to `grace` seconds, else abort."""
        again = self._state is _ConnectionState.CLOSING
        self._state = _ConnectionState.CLOSING
        self._set_timer(max(0.0, grace), self._close_now)
        if again:
            return
        self._end_set_up()
        self._end_runs(BrokerUnavailable(f"{self._name} is closed"))
        if self._link is not None:
            self._link.close()
        self._end_if_closed()

    def crashed(self, error: Exception) -> None:
        """The loop itself failed: report all as lost, for good."""
        self._state = _ConnectionState.GIVEN_UP
        self._cancel_timer()
        self._drop_link("the event loop failed")
        self._report_loss(ConnectionLoss(None, f"the event loop failed: {error!r}", "connection", by_broker=False))
        self._notify(self._client.failed, BrokerUnavailable(f"{self._name}: the event loop failed: {error!r}"), False)

    def on_error(self, error: Exception) -> None:
        """An exception came out of a callback: what it left half done ends with the connection."""
        self.callback_errors += 1
        logger.error("%s: a callback failed, the connection is replaced", self._name, exc_info=error)
        self.discard(f"a callback failed: {error!r}")

    # -- one attempt -----------------------------------------------------------------------------------------------

    @property
    def _endpoint(self) -> Endpoint:
        return self._settings.endpoints[self._recovery.host]

    def _next(self) -> None:
        """The wait is over."""
        if self._link is None:
            self._connect()
        else:
            self._set_timer(self._settings.connect_timeout, self._late)
            self._open_channel(self._link)

    def _connect(self) -> None:
        self._state = _ConnectionState.PREPARING
        self._set_timer(self._settings.connect_timeout, self._late)
        if self._settings.tls is None and not callable(self._settings.credentials):
            self._prepared(self._ask_secrets())
        elif self._asking.begin(time.monotonic()):  # else an earlier attempt's answer, if it comes, will do
            in_background(
                f"{self._name} credentials",
                self._ask_secrets,
                lambda answer: self._loop.call_soon(partial(self._answered, answer)),
            )

    def _ask_secrets(self) -> ConnectCredentials:
        """Ask for what is new at every connect. May block: a user's callback, files."""
        tls = self._settings.tls
        return ConnectCredentials(self._settings.resolve_credentials(), None if tls is None else tls.build_context())

    def _answered(self, answer: ConnectCredentials | Exception) -> None:
        self._asking.answered()
        self._prepared(answer)

    def _prepared(self, answer: ConnectCredentials | Exception) -> None:
        if self._state is not _ConnectionState.PREPARING:
            return
        if isinstance(answer, Exception):
            self._attempt_failed(_as_ours(answer, f"no credentials: the callback raised {type(answer).__name__}"))
            return
        self._state = _ConnectionState.CONNECTING
        logger.debug("%s: connecting to %s", self._name, self._endpoint)
        self._link = self._open_link(self._endpoint, self._settings, answer, self._name, self)

    def link_opened(self, link: Link) -> None:
        if link is self._link and self._state is _ConnectionState.CONNECTING:
            self._open_channel(link)

    @property
    def patience(self) -> float:
        """Seconds for which a set-up that the broker has begun to answer may go on without another answer."""
        if self._state is not _ConnectionState.SETTING_UP:
            return 0.0
        return max(0.0, self._answered_at + self._settings.connect_timeout - time.monotonic())

    def _open_channel(self, link: Link) -> None:
        self._state = _ConnectionState.SETTING_UP
        self._generation += 1
        self._channel = link.open_channel(self._generation, self._client, self)

    def channel_opened(self, channel: Channel) -> None:
        if channel is not self._channel or self._link is None or self._state is not _ConnectionState.SETTING_UP:
            return
        if self._set_up is None:
            self._set_up = SetupRunner(self._setup(self._link.server), self._set_up_ended, self._step_answered)
        self._set_up.start(channel)

    def _step_answered(self) -> None:
        """A large topology takes its time: what is bounded is the wait for each answer."""
        self._answered_at = time.monotonic()
        self._set_timer(self._settings.connect_timeout, self._late)

    @property
    def _step_outstanding(self) -> SetupRunner | None:
        """The set-up, where the broker owes it an answer."""
        waits = (
            self._state is _ConnectionState.SETTING_UP and self._set_up is not None and not self._set_up.wants_channel
        )
        return self._set_up if waits else None

    def _go_on(self) -> None:
        """The set-up goes on, on a new channel."""
        goes_on = self._set_up is not None and self._set_up.wants_channel
        if goes_on and self._state is _ConnectionState.SETTING_UP and self._channel is None and self._link is not None:
            self._open_channel(self._link)

    def _set_up_ended(self, outcome: object) -> None:
        self._set_up = None
        if isinstance(outcome, Exception):
            if self._channel is not None:  # what failed was no step
                channel, self._channel = self._channel, None
                channel.silence()
                channel.close()
            error = _as_ours(outcome, f"the set-up failed: {outcome!r}")
            self._attempt_failed(error, connected=self._link is not None)
        elif self._link is not None and self._channel is not None:
            self._become_ready(self._link, self._channel)

    def _become_ready(self, link: Link, channel: Channel) -> None:
        self._cancel_timer()
        self._recovery.ready()
        self._state = _ConnectionState.READY
        self._live = True
        logger.info("%s: connected to %s, %s %s", self._name, link.endpoint, link.server.product, link.server.version)
        self._notify(self._client.ready, channel.generation, channel.number, link.frame_max, link.server)
        self._report_blocked()
        if self._state is _ConnectionState.READY:  # the client may have ended it already
            channel.release_content()

    def _late(self) -> None:
        """The time to connect is over."""
        seconds = self._settings.connect_timeout
        if self._blocked is not None:
            self._set_timer(seconds, self._late)
        elif self._state is _ConnectionState.REOPENING:
            self.discard(f"channel.close was not answered within {seconds:g} s")
        else:
            doing = _DOING[self._state]
            if self._state is _ConnectionState.PREPARING:
                doing += f", calls without an answer: {self._asking.unanswered}"
            self._attempt_failed(BrokerUnavailable(f"{self._endpoint}: not ready within {seconds:g} s ({doing})"))

    def _attempt_failed(self, error: ReliableMQError, *, connected: bool = False) -> None:
        """Args: connected: whether the connection stands and only its channel is to be opened again."""
        self._end_set_up()
        if not connected:
            self._drop_link(str(error))
        wait = self._recovery.failed(error, time.monotonic(), connected=connected)
        if self._recovery.broken is not None:
            logger.error(
                "%s: reconnect_wait or reconnect_stop raised; the default wait is taken in its place",
                self._name,
                exc_info=self._recovery.broken,
            )
        if wait is None:
            self._state = _ConnectionState.GIVEN_UP
            self._cancel_timer()
            self._drop_link("given up")
            logger.error("%s: given up: %s", self._name, error)
        else:
            self._state = _ConnectionState.WAITING
            self._set_timer(wait, self._next)
            logger.warning("%s: %s; next attempt in %.1f s", self._name, error, wait)
        self._notify(self._client.failed, error, wait is not None)

    def _attempt_discarded(self, error: BrokerUnavailable) -> None:
        if self._state is _ConnectionState.DISCARDED:
            self._attempt_failed(error)

    # -- the end of what was ready ---------------------------------------------------------------------------------

    def link_closed(self, link: Link, error: BrokerUnavailable, loss: ConnectionLoss) -> None:
        self._dying.discard(link)
        if link is self._link:
            self._link = self._channel = None
            if self._state in {_ConnectionState.READY, _ConnectionState.REOPENING}:
                self._recover(loss)
            elif self._step_outstanding is not None and _is_refusal(loss):
                self._step_outstanding.refuse(loss.code or 0, loss.text, connection=True)
            elif self._state in _ATTEMPT:
                self._attempt_failed(error)
            else:  # while waiting to open another channel on it, or closing
                self._unblock()
        self._end_if_closed()

    def channel_closed(self, channel: Channel, code: int, text: str, by_broker: bool) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        if self._state is _ConnectionState.SETTING_UP:
            if self._step_outstanding is not None:
                self._step_outstanding.refuse(code, text)
                self._loop.call_soon(self._go_on)
            else:
                self._attempt_failed(BrokerUnavailable(f"the broker opened no channel: {code} {text}"), connected=True)
        elif self._state in {_ConnectionState.READY, _ConnectionState.REOPENING}:
            refused = by_broker and bool(self._runs)
            if refused:
                self._runs[0].refuse(code, text)
            # Who asked for the step has been told; whether it matters is theirs to say.
            level = logging.INFO if refused else logging.WARNING
            self._recover(ConnectionLoss(code if by_broker else None, text, "channel", by_broker), level)

    def _discarded(self, loss: ConnectionLoss) -> None:
        if self._state is _ConnectionState.DISCARDED:
            self._recover(loss)

    def _recover(self, loss: ConnectionLoss, level: int = logging.WARNING) -> None:
        wait = self._recovery.lost(loss, time.monotonic())
        self._state = _ConnectionState.WAITING
        self._set_timer(wait, self._next)
        logger.log(
            level,
            "%s: %s lost: %s%s; next attempt in %.1f s",
            self._name,
            loss.scope,
            "" if loss.code is None else f"{loss.code} ",
            printable(loss.text),
            wait,
        )
        self._report_loss(loss)

    def _report_loss(self, loss: ConnectionLoss) -> None:
        self._end_runs(BrokerUnavailable(f"the {loss.scope} was lost: {loss.text}"))
        if loss.scope == "connection":
            self._unblock()
        if self._live:
            self._live = False
            self._notify(self._client.lost, self._generation, loss)

    def _drop_link(self, reason: str) -> None:
        """Abort what there is; nothing is heard of it any more but that its socket is closed."""
        link, self._link, self._channel = self._link, None, None
        if link is not None:
            self._dying.add(link)
            link.abort(reason)

    def _close_now(self) -> None:
        """The grace is over: abort; and where even that does not end, leave it to the end of the process."""
        if self._link is None:
            self._dying.clear()
        self._drop_link("closed")
        self._set_timer(_ABORT_GRACE, self._close_now)
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._state is _ConnectionState.CLOSING and self._link is None and not self._dying:
            self._cancel_timer()
            self._report_loss(ConnectionLoss(None, "closed by us", "connection", by_broker=False))
            self._on_ended()

    # -- what else the broker says ---------------------------------------------------------------------------------

    def link_blocked(self, link: Link, reason: str) -> None:
        if link is self._link:
            self._blocked = reason
            self._report_blocked()

    def link_unblocked(self, link: Link) -> None:
        if link is self._link:
            self._unblock()

    def _report_blocked(self) -> None:
        if self._live and self._blocked is not None and not self._blocked_reported:
            self._blocked_reported = True
            self._notify(self._client.blocked, self._blocked)

    def _unblock(self) -> None:
        self._blocked = None
        if self._blocked_reported:
            self._blocked_reported = False
            self._notify(self._client.unblocked)

    def consumer_cancelled(self, channel: Channel, consumer_tag: str) -> None:
        if channel is self._channel and self._live:
            self._notify(self._client.cancelled, consumer_tag)

    def link_read(self, link: Link) -> None:
        if link is self._link and self._state is _ConnectionState.READY:
            self._notify(self._client.read_finished)

    def link_drained(self, link: Link) -> None:
        if link is self._link and self._state is _ConnectionState.READY:
            self._notify(self._client.write_drained)

    # -- steps on the live channel ---------------------------------------------------------------------------------

    def _start_run(self) -> None:
        if self._runs and self._channel is not None and self._state is _ConnectionState.READY:
            self._run_timer = self._loop.call_later(self._settings.connect_timeout, self._run_late)
            self._runs[0].start(self._channel)

    def _run_ended(self, done: Callable[[Any], None], outcome: object) -> None:
        self._runs.popleft()
        self._cancel_run_timer()
        if self._runs:
            self._loop.call_soon(self._start_run)
        self._notify(done, outcome)

    def _run_late(self) -> None:
        seconds = self._settings.connect_timeout
        if self._blocked is not None:
            self._run_timer = self._loop.call_later(seconds, self._run_late)
        else:
            self.discard(f"the broker did not answer within {seconds:g} s")

    def _end_runs(self, error: Exception) -> None:
        while self._runs:
            self._runs[0].fail(error)

    def _cancel_run_timer(self) -> None:
        if self._run_timer is not None:
            self._run_timer.cancel()
            self._run_timer = None

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _end_set_up(self) -> None:
        run, self._set_up = self._set_up, None
        if run is not None:
            run.drop()

    def _set_timer(self, delay: float, fn: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(delay, fn)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notify(self, fn: Callable[..., None], *args: object) -> None:
        try:
            fn(*args)
        except Exception as error:  # noqa: BLE001  # the loop goes on, the connection does not
            self.on_error(error)


_DOING = {
    _ConnectionState.PREPARING: "asking for credentials",
    _ConnectionState.CONNECTING: "connecting",
    _ConnectionState.SETTING_UP: "setting up the channel",
}

_CONNECTION_FORCED = 320  # a broker that shuts down: no opinion about the step that was under way


def _is_refusal(loss: ConnectionLoss) -> bool:
    return loss.by_broker and loss.code != _CONNECTION_FORCED


def _as_ours(error: Exception, otherwise: str) -> ReliableMQError:
    if isinstance(error, ReliableMQError):
        return error
    ours = BrokerUnavailable(otherwise)
    ours.__cause__ = error
    return ours
