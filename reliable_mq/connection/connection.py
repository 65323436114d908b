"""Keep one connection with one channel: connect, set up, and reconnect.

`core.reconnect` decides which host is tried when, and when to give up. `core.channel_setup` maps a refused step to an
error. `Connector` drives both on an event loop: pika's loop on a separate thread, or asyncio's.

`TRANSITIONS` lists the changes of its `ConnectionState`.

Invariants:

- ``ready`` and ``lost`` alternate. Each pair has a generation, which is never used again.
- The client gets no event of a channel before its ``ready`` (the channel holds content back) and none after its
  ``lost``. Events of an older link or channel are recognised by identity and dropped.
- `Output.write` sends only in READY, so no frame reaches a channel that the client did not mean.
- PREPARING, CONNECTING, SETTING_UP, REOPENING and CLOSING end by a timer at the latest. Except in CLOSING, the timer is
  suspended while the broker blocks the connection, because the broker does not reply then, and starts again afterwards.
- No method of the client is called from inside a call of the client.
- A connection that the broker has blocked counts as blocked until it ends. A later connection does not inherit this.
"""

from __future__ import annotations

import enum
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from reliable_mq._util.logs import get_logger, given_up_logger
from reliable_mq._util.threads import call_in_background
from reliable_mq.connection.channel import SetupRunner, StepQueue
from reliable_mq.connection.errors import as_ours, is_refusal
from reliable_mq.connection.interfaces import ConnectAttempt, ConnectCredentials, do_nothing, takes_nothing
from reliable_mq.connection.token_renewer import TokenRenewer
from reliable_mq.core.channel_setup import is_out_of_reach, reconnect_reason
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.reconnect import ConnectionLoss, CredentialsCalls
from reliable_mq.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reliable_mq.connection.channel import Channel
    from reliable_mq.connection.interfaces import ConnectionListener, EventLoop, OpenLink, Output, TimerHandle
    from reliable_mq.connection.link import BaseLink
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepGenerator
    from reliable_mq.core.reconnect import ReconnectPolicy
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.settings import ConnectionSettings, Endpoint

logger = get_logger(__name__)

_CALL_AGAIN_AFTER = 0.9  # the part of the time to connect after which the credentials callback is called again
_ABORT_GRACE = 1.0  # seconds for aborted sockets to close, which takes one turn of the loop


class ConnectionState(enum.Enum):
    WAITING = "until the next attempt"
    PREPARING = "reading credentials and certificates"
    CONNECTING = "socket, TLS and the AMQP handshake"
    SETTING_UP = "opening a channel and performing its steps"
    READY = "the client may write"
    REOPENING = "closing the channel; the connection stays"
    DISCARDED = "aborted; the loss is reported in the next turn of the loop"
    GIVEN_UP = "no attempt will follow"
    CLOSING = "for good; sockets may still be open"
    ENDED = "every socket is closed"


_S = ConnectionState
_ATTEMPT: Final = (_S.PREPARING, _S.CONNECTING, _S.SETTING_UP)
_ESTABLISHED: Final = (_S.READY, _S.REOPENING)
_ANY: Final = [state for state in _S if state is not _S.ENDED]
#: Event -> state before -> states after. For tests and documentation; not used at run time.
TRANSITIONS: Final[Mapping[str, Mapping[ConnectionState, set[ConnectionState]]]] = {
    "connect": {_S.WAITING: {_S.PREPARING}},
    "credentials": {_S.PREPARING: {_S.CONNECTING}},
    "open channel": {state: {_S.SETTING_UP} for state in (_S.WAITING, _S.CONNECTING, _S.SETTING_UP)},
    "set up": {_S.SETTING_UP: {_S.READY}},
    "reopen channel": {_S.READY: {_S.REOPENING}},
    "discard": {state: {_S.DISCARDED} for state in (_S.WAITING, *_ATTEMPT, *_ESTABLISHED)},
    "attempt failed": {state: {_S.WAITING, _S.GIVEN_UP} for state in (*_ATTEMPT, _S.DISCARDED)},
    "lost": {state: {_S.WAITING} for state in (_S.WAITING, *_ESTABLISHED, _S.DISCARDED)},
    "close": {state: {_S.CLOSING} for state in _ANY},
    "all closed": {_S.CLOSING: {_S.ENDED}},
    "event loop failed": {state: {_S.GIVEN_UP} for state in _ANY},
}
del _S


class Connector:
    """A connection with one channel, which reconnects. Call its methods on the loop."""

    def __init__(
        self,
        loop: EventLoop,
        open_link: OpenLink,
        *,
        name: str,
        settings: ConnectionSettings,
        setup: Callable[[ServerInfo], SetupGenerator],
        client: ConnectionListener,
        reconnect_policy: ReconnectPolicy,
        output: Output,
        on_ended: Callable[[], None],
    ) -> None:
        self.callback_errors = 0  # exceptions that callbacks raised
        self._loop = loop
        self._open_link = open_link
        self._name = name  # in log lines, and on the broker unless `settings` has one
        self._settings = settings
        self._setup = setup  # called once per attempt; returns the steps to perform before a channel is ready
        self._client = client
        self._output = output  # each change of the state sets its functions
        output.write, output.write_buffer_size = do_nothing, takes_nothing
        self._reconnect_policy = reconnect_policy  # no other connector may use it
        self._on_ended = on_ended  # called once, after `close`, when every socket is closed
        self._state = ConnectionState.WAITING  # changed only by `_enter`
        self._timer: TimerHandle | None = None  # the state's timer
        # Tracks the calls of the credentials callback, with a time limit slightly below the attempt's.
        self._credentials_calls = CredentialsCalls(_CALL_AGAIN_AFTER * settings.connect_timeout)
        self._renewer = TokenRenewer(
            name,
            loop,
            settings,
            self._credentials_calls,
            discard=self.discard,
            is_blocked=lambda: self._blocked is not None,
            unneeded=self._call_for_credentials,
        )
        self.tokens = self._renewer.statistics
        self.peer: Endpoint | None = None  # the address of the last connected host, if it is known
        self._link: BaseLink | None = None
        self._dying: set[BaseLink] = set()  # aborted links whose sockets are not closed yet
        self._channel: Channel | None = None
        self._generation = 0
        self._live = False  # ``ready`` was reported, ``lost`` was not
        self._blocked: str | None = None  # the broker's reason, while it has blocked the connection
        self._blocked_reported = False
        self._warned = False  # a loss or failed attempt was logged as a warning; its end is logged at that level too
        self._set_up: SetupRunner | None = None
        self._answered_at = float("-inf")  # when the broker last answered a step of a set-up
        #: Returns the number of bytes read from the current connection so far.
        self.bytes_received: Callable[[], int] = lambda: 0 if self._link is None else self._link.bytes_received
        self._runs = StepQueue(
            loop,
            settings.connect_timeout,
            channel=self._ready_channel,
            is_blocked=lambda: self._blocked is not None,
            bytes_received=self.bytes_received,
            discard=self.discard,
        )

    def begin(self) -> None:
        """Connect, and reconnect until `close`. Do nothing if `close` was called before."""
        if self._state is ConnectionState.WAITING:
            self._reconnect_policy.begin(time.monotonic())
            self._connect()

    # -- calls of the client -------------------------------------------------------------------------------------------

    def run(self, generator: StepGenerator, done: Callable[[Any], None], in_line: Callable[[], bool]) -> None:
        """Perform steps on the ready channel, after those of earlier calls.

        Args:
            generator: A generator of steps, as for a set-up. The broker closes the channel over a step that it refuses.
            done: A callable for the generator's result, or for the exception that ended it: the generator's own, or
                BrokerUnavailable if no channel was ready or it was lost meanwhile (then ``lost`` follows). It is called
                exactly once, never from inside this call.
            in_line: A callable that returns whether the steps wait behind work that has a time limit of its own.
        """
        if self._state is ConnectionState.READY:
            self._runs.add(generator, partial(self._notify, done), in_line)
        else:
            generator.close()
            self._loop.call_soon(partial(self._notify, done, BrokerUnavailable("no channel is open")))

    def _ready_channel(self) -> Channel | None:
        return self._channel if self._state is ConnectionState.READY else None

    def discard(self, reason: str) -> None:
        """Abort a connection whose channel is in doubt; ``lost`` and a reconnect follow."""
        report: Callable[[], None] | None = None
        if self._state in _ATTEMPT:
            report = partial(self._attempt_failed, BrokerUnavailable(reason))
        elif self._state in _ESTABLISHED or (self._state is ConnectionState.WAITING and self._link is not None):
            loss = ConnectionLoss(None, reason, "connection", by_broker=False)
            report = partial(self._plan_reconnect, loss)
        if report is not None:
            self._loop.call_soon(partial(self._discarded, report))
            self._enter(ConnectionState.DISCARDED)
            self._cancel_timer()
        self._drop_link(reason)

    def reopen_channel(self) -> None:
        """Close the channel, report the loss, and open another channel on the connection.

        If the broker does not reply within the time to connect, the connection is discarded.
        """
        if self._state is ConnectionState.READY and self._channel is not None:
            self._enter(ConnectionState.REOPENING)
            self._channel.silence()
            self._channel.close()
            self._set_timer(self._settings.connect_timeout, self._on_timeout)

    def close(self, grace: float) -> None:
        """Close the connection for good; abort it if that takes over `grace` seconds."""
        if self._state is ConnectionState.ENDED:
            return
        again = self._state is ConnectionState.CLOSING
        self._enter(ConnectionState.CLOSING)
        self._set_timer(max(0.0, grace), self._close_now)
        if again:
            return
        self._end_set_up()
        self._runs.fail_all(BrokerUnavailable(f"{self._name} is closed"))
        if self._link is not None:
            self._link.close()
        self._end_if_closed()

    def crashed(self, error: BaseException) -> None:
        """Report a permanent loss, because the loop itself failed."""
        if self._state is ConnectionState.ENDED:
            return
        self._enter(ConnectionState.GIVEN_UP)
        self._cancel_timer()
        self._end_set_up()
        self._drop_link("the event loop failed")
        self._report_loss(ConnectionLoss(None, f"the event loop failed: {error!r}", "connection", by_broker=False))
        self._notify(self._client.failed, BrokerUnavailable(f"{self._name}: the event loop failed: {error!r}"), False)

    def on_error(self, error: Exception) -> None:
        """Discard the connection, because a callback raised and left its work unfinished."""
        self.callback_errors += 1
        logger.error("%s: a callback failed; reconnecting", self._name, exc_info=error)
        self.discard(f"a callback failed: {error!r}")

    # -- one attempt ---------------------------------------------------------------------------------------------------

    @property
    def _endpoint(self) -> Endpoint:
        return self._settings.endpoints[self._reconnect_policy.host]

    def _reconnect(self) -> None:
        """Begin the next attempt after the wait."""
        if self._link is None:
            self._connect()
        else:
            self._open_channel(self._link)

    def _connect(self) -> None:
        self._enter(ConnectionState.PREPARING)
        self._set_timer(self._settings.connect_timeout, self._on_timeout)
        if self._settings.tls is None and not callable(self._settings.credentials):
            self._on_credentials(self._read_credentials())
        else:
            self._call_for_credentials()

    def _call_for_credentials(self) -> None:
        """Read credentials for an attempt, unless a running call can supply them."""
        if self._state is ConnectionState.PREPARING and self._credentials_calls.begin(time.monotonic()):
            call_in_background(
                f"{self._name} credentials",
                self._read_credentials,
                lambda result: self._loop.call_soon(partial(self._on_credentials_read, result)),
            )

    def _read_credentials(self) -> ConnectCredentials:
        """Read credentials and certificates. The user's callback and files may block."""
        tls = self._settings.tls
        return ConnectCredentials(self._settings.resolve_credentials(), None if tls is None else tls.build_context())

    def _on_credentials_read(self, result: ConnectCredentials | Exception) -> None:
        self._credentials_calls.answered()
        self._on_credentials(result)

    def _on_credentials(self, result: ConnectCredentials | Exception) -> None:
        if self._state is not ConnectionState.PREPARING:
            return
        if isinstance(result, Exception):
            self._attempt_failed(as_ours(result, f"no credentials: the callback raised {type(result).__name__}"))
            return
        self._enter(ConnectionState.CONNECTING)
        self._set_timer(self._settings.connect_timeout, self._on_timeout)
        self._renewer.credentials_read(result.credentials)
        logger.debug("%s: connecting to %s", self._name, self._endpoint)
        self._link = self._open_link(ConnectAttempt(self._endpoint, self._settings, result, self._name), self)

    def link_opened(self, link: BaseLink) -> None:
        if link is self._link and self._state is ConnectionState.CONNECTING:
            self._renewer.connected(link)
            self._open_channel(link)

    def link_secret_updated(self, link: BaseLink) -> None:
        if link is self._link:
            self._renewer.accepted()

    @property
    def patience(self) -> float:
        """The seconds left for the broker's next reply in a running set-up."""
        if self._state is not ConnectionState.SETTING_UP:
            return 0.0
        return max(0.0, self._answered_at + self._time_to_answer - time.monotonic())

    @property
    def _time_to_answer(self) -> float:
        usual = self._settings.connect_timeout
        return usual if self._set_up is None else self._set_up.time_to_answer(usual)

    def _open_channel(self, link: BaseLink) -> None:
        self._enter(ConnectionState.SETTING_UP)
        self._restart_timer()
        self._generation += 1
        try:
            self._channel = link.open_channel(self._generation, self._client)
        except BrokerUnavailable as error:
            self._attempt_failed(error)

    def channel_opened(self, channel: Channel) -> None:
        if channel is not self._channel or self._link is None or self._state is not ConnectionState.SETTING_UP:
            return
        self._restart_timer()
        if self._set_up is None:
            self._set_up = SetupRunner(self._setup(self._link.server), self._set_up_ended, self._restart_timer)
        self._set_up.start(channel)

    def _restart_timer(self) -> None:
        """Restart the timer: the time limit is for each reply, not for a whole topology."""
        self._answered_at = time.monotonic()
        self._set_timer(self._settings.connect_timeout, self._on_timeout)

    @property
    def _step_outstanding(self) -> SetupRunner | None:
        """The set-up, if it waits for a reply of the broker."""
        set_up = self._set_up if self._state is ConnectionState.SETTING_UP else None
        return None if set_up is None or set_up.wants_channel else set_up

    def _continue_set_up(self) -> None:
        """Open another channel for a set-up whose channel the broker has closed."""
        wanted = self._set_up is not None and self._set_up.wants_channel
        if wanted and self._state is ConnectionState.SETTING_UP and self._channel is None and self._link is not None:
            self._open_channel(self._link)

    def _set_up_ended(self, outcome: object) -> None:
        self._set_up = None
        if isinstance(outcome, Exception):
            if self._channel is not None:  # the broker refused no step: the generator or the encoding failed
                channel, self._channel = self._channel, None
                channel.silence()
                channel.close()
            error = as_ours(outcome, f"the set-up failed: {outcome!r}")
            self._attempt_failed(error, connected=self._link is not None and not is_out_of_reach(error))
        elif self._link is not None and self._channel is not None:
            self._become_ready(self._link, self._channel)

    def _become_ready(self, link: BaseLink, channel: Channel) -> None:
        self._cancel_timer()
        self._reconnect_policy.ready()
        self._live = True
        self.peer = link.peer
        self._enter(ConnectionState.READY)
        level, again = (logging.WARNING, " again") if self._warned else (logging.INFO, "")
        self._warned = False
        server = link.server
        logger.log(
            level, "%s: connected%s to %s, %s %s", self._name, again, link.endpoint, server.product, server.version
        )
        self._notify(self._client.ready, channel.generation, channel.number, link.frame_max, link.server)
        self._report_blocked()
        if self._state is ConnectionState.READY:  # the client may have ended the connection in `ready`
            channel.release_content()

    def _on_timeout(self) -> None:
        """End a state that took longer than the time to connect."""
        seconds = self._time_to_answer
        if self._blocked is not None:
            self._set_timer(seconds, self._on_timeout)
        elif self.patience > 0:
            self._set_timer(self.patience, self._on_timeout)
        elif self._state is ConnectionState.REOPENING:
            self.discard(f"channel.close was not answered within {seconds:g} s")
        else:
            doing = _DOING[self._state]
            if self._state is ConnectionState.PREPARING:
                doing += f", calls without an answer: {self._credentials_calls.unanswered}"
            self._attempt_failed(BrokerUnavailable(f"{self._endpoint}: not ready within {seconds:g} s ({doing})"))

    def _attempt_failed(self, error: ReliableMQError, *, connected: bool = False) -> None:
        """Plan the next attempt (of a channel only, if `connected`), or give up."""
        self._end_set_up()
        if not connected:
            self._drop_link(str(error))
        wait = self._reconnect_policy.failed(error, time.monotonic(), connected=connected)
        if (cause := self._reconnect_policy.broken) is not None:
            logger.error(
                "%s: reconnect_wait or reconnect_stop raised; using the default wait", self._name, exc_info=cause
            )
        if wait is None:
            self._enter(ConnectionState.GIVEN_UP)
            self._cancel_timer()
            self._drop_link("given up")
            if not self._reconnect_policy.quiet:
                given_up_logger.error("%s: giving up: %s", self._name, error)
        else:
            self._enter(ConnectionState.WAITING)
            self._set_timer(wait, self._reconnect)
            self._warned = True
            logger.warning("%s: %s; next attempt in %.1f s", self._name, error, wait)
        if self._link is None:
            self._unblock()
        self._notify(self._client.failed, error, wait is not None)

    # -- losses and the end --------------------------------------------------------------------------------------------

    def link_closed(self, link: BaseLink, error: BrokerUnavailable, loss: ConnectionLoss) -> None:
        self._dying.discard(link)
        link.on_read = do_nothing
        if link is self._link:
            self._link = self._channel = None
            token_refused = self._renewer.lost(loss)
            if self._state in (*_ESTABLISHED, ConnectionState.WAITING):  # WAITING to open another channel on the link
                self._plan_reconnect(loss)
            elif self._step_outstanding is not None and is_refusal(loss) and not token_refused:
                self._step_outstanding.refuse(loss.code or 0, loss.text, connection=True)
                if self._state is ConnectionState.SETTING_UP:  # the set-up would go on, without a connection
                    self._attempt_failed(error)
            elif self._state in _ATTEMPT:
                self._attempt_failed(error)
        self._end_if_closed()

    def channel_closed(self, channel: Channel, code: int, text: str, by_broker: bool) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        if self._state is not ConnectionState.CLOSING and (reason := reconnect_reason(code, text)):
            self.discard(reason)
        elif self._state is ConnectionState.SETTING_UP:
            if self._step_outstanding is not None:
                self._step_outstanding.refuse(code, text)
                self._loop.call_soon(self._continue_set_up)
            else:
                self._attempt_failed(BrokerUnavailable(f"the broker opened no channel: {code} {text}"), connected=True)
        elif self._state in _ESTABLISHED:
            refused = self._runs.is_busy and channel.step_refused
            if refused:
                self._runs.refuse(code, text)
            # The caller of `run` knows of the refusal, and decides whether it matters.
            level = logging.INFO if refused else logging.WARNING
            self._plan_reconnect(ConnectionLoss(code if by_broker else None, text, "channel", by_broker), level)

    def _discarded(self, report: Callable[[], None]) -> None:
        if self._state is ConnectionState.DISCARDED:
            report()

    def _plan_reconnect(self, loss: ConnectionLoss, level: int = logging.WARNING) -> None:
        wait = self._reconnect_policy.lost(loss, time.monotonic(), was_ready=self._live)
        self._enter(ConnectionState.WAITING)
        self._set_timer(wait, self._reconnect)
        self._warned |= level >= logging.WARNING
        code = "" if loss.code is None else f"{loss.code} "
        text = "%s: %s lost: %s%s; next attempt in %.1f s"
        logger.log(level, text, self._name, loss.scope, code, printable(loss.text), wait)
        self._report_loss(loss)

    def _report_loss(self, loss: ConnectionLoss) -> None:
        self._runs.fail_all(BrokerUnavailable(f"the {loss.scope} was lost: {loss.text}"))
        if self._live:
            self._live = False
            self._notify(self._client.lost, self._generation, loss)
        elif self._state in (ConnectionState.WAITING, *_ATTEMPT):  # its channel was lost before
            self._notify(self._client.disconnected, loss.text)
        if loss.scope == "connection":
            self._unblock()  # after the loss: the client would otherwise write to a connection that is gone

    def _drop_link(self, reason: str) -> None:
        """Abort the link. Its only later event is that its socket is closed."""
        link, self._link, self._channel = self._link, None, None
        if link is not None:
            self._renewer.lost()
            self._dying.add(link)
            link.abort(reason)

    def _close_now(self) -> None:
        """Abort when the grace is over.

        A socket that does not close even now stays open until the process ends.
        """
        if self._link is None:
            self._dying.clear()
        self._drop_link("closed")
        self._set_timer(_ABORT_GRACE, self._close_now)
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._state is ConnectionState.CLOSING and self._link is None and not self._dying:
            self._cancel_timer()
            self._enter(ConnectionState.ENDED)
            self._report_loss(ConnectionLoss(None, "closed by us", "connection", by_broker=False))
            self._on_ended()

    # -- other events of the link --------------------------------------------------------------------------------------

    def link_blocked(self, link: BaseLink, reason: str) -> None:
        if link is self._link:
            self._blocked = reason or "no reason given"
            self._report_blocked()

    def link_unblocked(self, link: BaseLink) -> None:
        if link is self._link and self._blocked is not None:
            self._unblock()
            self._runs.restart_timer()
            self._renewer.unblocked()
            if self._state in (ConnectionState.SETTING_UP, ConnectionState.REOPENING):
                self._restart_timer()

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
        if channel is self._channel:
            self._notify(self._client.cancelled, consumer_tag)

    def link_drained(self, link: BaseLink) -> None:
        if link is self._link and self._state is ConnectionState.READY:
            self._notify(self._client.write_drained)

    # -- state and timers ----------------------------------------------------------------------------------------------

    def _enter(self, state: ConnectionState) -> None:
        """Change the state. Nothing else connects or disconnects `Output` and the link."""
        self._state = state
        link, output = self._link, self._output
        if state is ConnectionState.READY and link is not None:
            output.write, output.write_buffer_size = link.write, link.write_buffer_size
            link.on_read = self._client.read_finished
        else:
            output.write, output.write_buffer_size = do_nothing, takes_nothing
            if link is not None:
                link.on_read = do_nothing

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
    ConnectionState.PREPARING: "asking for credentials",
    ConnectionState.CONNECTING: "connecting",
    ConnectionState.SETTING_UP: "setting up the channel",
}
