"""The connector as a state machine.

Driver, broker and owner do whatever they may, in any order.
"""

from __future__ import annotations

import contextlib
import heapq
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import tenacity
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliable_mq.codec import InboundReader, methods
from reliable_mq.codec.methods import ConfirmSelect
from reliable_mq.connection import connection as connection_module
from reliable_mq.connection import token_renewer as renewer_module
from reliable_mq.connection.channel import Channel, ChannelTable
from reliable_mq.connection.connection import TRANSITIONS, ConnectionState, Connector
from reliable_mq.connection.interfaces import TAKES_NOTHING, ConnectAttempt, ConnectionListener
from reliable_mq.core.channel_setup import Pipeline, ServerInfo, StepRefused, publisher_setup, refusal
from reliable_mq.core.reconnect import ConnectionLoss, ReconnectPolicy
from reliable_mq.errors import BrokerUnavailable, ReliableMQError
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from reliable_mq.topology import Queue
from tests.properties import machine
from tests.transitions import changes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

CONNECT_TIMEOUT = 10.0
WAIT = 3.0
LIFETIME = 3600.0
UPDATE_SECRET = (10, 70)
CHANNEL_OPEN_OK, CHANNEL_CLOSE, CHANNEL_CLOSE_OK = (20, 11), (20, 40), (20, 41)
CONSUME, CONSUME_OK, CANCEL = (60, 20), (60, 21), (60, 30)
SELECT_OK, ACK = (85, 11), (60, 80)
UNDECIDED = (
    b"ACCESS_REFUSED - read access to queue 'q' in vhost '/' refused for user 'u', backend b returned an error: no"
)
NO_REPLICA = b"PRECONDITION_FAILED - stream queue 'q' in vhost '/' does not have a running replica on the local node"
LEGAL = changes(TRANSITIONS)
SERVER = ServerInfo("RabbitMQ", "4.3.0", (4, 3, 0))


class Timer:
    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        self.fn = None


class Loop:
    """A loop with a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.on_error: Callable[[Exception], None]
        self.soon: list[Callable[[], None]] = []
        self.timers: list[tuple[float, int, Timer]] = []
        self._order = count()

    def call_soon(self, fn: Callable[[], None]) -> None:
        self.soon.append(fn)

    def call_later(self, delay: float, fn: Callable[[], None]) -> Timer:
        timer = Timer(fn)
        heapq.heappush(self.timers, (self.now + delay, next(self._order), timer))
        return timer

    def turn(self) -> None:
        while self.soon:
            self.guard(self.soon.pop(0))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self.timers)
            fn, timer.fn = timer.fn, None
            if fn is not None:
                self.guard(fn)
            self.turn()
        self.now = end

    def guard(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except Exception as error:
            self.on_error(error)


class Link:
    """A link whose socket and broker are controlled by the test."""

    server = SERVER
    frame_max = 131072
    peer = Endpoint("192.0.2.1", 5672)
    bytes_received = 0

    def __init__(self, loop: Loop, links: list[Link], attempt: ConnectAttempt, events: Connector) -> None:
        self.loop = loop
        self.endpoint = attempt.endpoint
        self.events = events
        self.reader = InboundReader(self._on_frame)
        self.channels = ChannelTable(self.reader)
        self.channels.channel_max = 3
        self.channel: Channel | None = None
        self.asked: list[tuple[int, tuple[int, int]]] = []  # methods that the broker has not answered
        self.foreign: list[bytes] = []  # frames that the owner wrote
        self.opened = self.aborted = self.over = self.blocked = False
        self.on_read: Callable[[], None] = lambda: None
        links.append(self)

    def write(self, data: bytes) -> None:
        assert not self.over
        method = methods.method_of(data)
        if method is None or data[0] != 1:
            self.foreign.append(data)
        elif method != CHANNEL_CLOSE_OK:
            self.asked.append((int.from_bytes(data[1:3], "big"), method))

    def write_buffer_size(self) -> int:
        return len(self.foreign)

    def open_channel(self, generation: int, sink: Any) -> Channel:
        self.channel = self.channels.open(generation, self.write, sink, self.events)
        return self.channel

    def close(self) -> None:
        if self.opened:
            self.channels.close(lambda: self.loop.call_soon(self.lose))
        else:
            self.abort("closed while it was opening")

    def abort(self, reason: str) -> None:
        self.aborted = True
        self.reader.reset()

    def send(self, channel: int, method: tuple[int, int], arguments: bytes = b"") -> None:
        if not self.aborted:
            self.reader.feed(methods.method_frame(channel, *method, arguments))

    def lose(self, code: int | None = None, over: tuple[int, int] = (0, 0)) -> None:
        """Close the socket."""
        if not self.over:
            self.over = True
            loss = ConnectionLoss(code, "gone", "connection", by_broker=code is not None, over=over)
            self.events.link_closed(self, BrokerUnavailable("gone"), loss)
            self.on_read()  # a read may cause the loss

    def _on_frame(self, frame: bytes) -> None:
        self.channels.receive(frame)


class Owner(ConnectionListener):
    """The client, which checks its events against the connector's invariants."""

    largest_body = 1024

    def __init__(self) -> None:
        self.calling = False  # whether the owner is calling the connector
        self.live = 0  # the generation that is ready, or 0
        self.last = 0
        self.is_blocked = False
        self.given_up = False
        self.raises = False
        self.disconnections: list[str] = []
        self.acks = 0
        self.reads = 0
        self.in_ready: Callable[[], object] = lambda: None

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        assert not self.calling
        assert not self.live
        assert generation > self.last
        self.live = self.last = generation
        self.in_ready()
        if self.raises:
            raise RuntimeError("ready")

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        assert not self.calling
        assert generation == self.live
        self.live = 0

    def disconnected(self, reason: str) -> None:
        assert not self.calling
        assert not self.live
        assert not self.given_up
        self.disconnections.append(reason)

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        assert not self.calling
        assert not self.live
        assert not self.given_up
        self.given_up = not will_retry

    def blocked(self, reason: str) -> None:
        assert self.live
        assert not self.is_blocked
        self.is_blocked = True

    def unblocked(self) -> None:
        assert self.is_blocked
        self.is_blocked = False

    def acked(self, tag: int, multiple: bool) -> None:
        assert self.live, "content before ready, or after lost"
        self.acks += 1

    def read_finished(self) -> None:
        assert self.live
        self.reads += 1


def set_up(version: tuple[int, ...]) -> Generator[Any, Any, None]:
    """Check a queue, and continue on another channel if it is missing."""
    try:
        yield Pipeline((methods.CheckQueue("missing"),))
    except StepRefused as refused:
        if refused.connection:
            raise refusal(methods.CheckQueue("missing"), refused) from refused
    yield from publisher_setup([], version)


class ConnectorMachine(RuleBasedStateMachine):
    def __init__(self, stop: Any = None) -> None:
        super().__init__()
        self.loop = Loop()
        self.links: list[Link] = []
        self.owner = Owner()
        self.output = SimpleNamespace()
        self.asking: list[Callable[[Any], None]] = []  # waiting calls for credentials
        self.ended = 0
        self.runs: list[object] = []
        self.states: list[ConnectionState] = [ConnectionState.WAITING]
        self.patches = [
            patch.object(connection_module, "time", SimpleNamespace(monotonic=lambda: self.loop.now)),
            patch.object(connection_module, "call_in_background", lambda _name, _fn, done: self.asking.append(done)),
        ]
        for one in self.patches:
            one.start()
        self.connector = Connector(
            self.loop,
            partial(Link, self.loop, self.links),
            name="test",
            settings=ConnectionSettings(
                endpoints=(Endpoint("one", 1), Endpoint("two", 2)),
                credentials=lambda: Credentials("guest", "guest"),
                connect_timeout=CONNECT_TIMEOUT,
            ),
            setup=lambda server: set_up(server.version_tuple),
            client=self.owner,
            output=self.output,
            reconnect_policy=ReconnectPolicy(hosts=2, wait=tenacity.wait_fixed(WAIT), stop=stop),
            on_ended=self.end,
        )
        on_error = self.connector.on_error

        def failed(error: Exception) -> None:
            if not isinstance(error, RuntimeError):  # the owner raises RuntimeError on purpose
                raise error
            on_error(error)

        self.loop.on_error = self.connector.on_error = failed  # type: ignore[method-assign]
        enter = self.connector._enter

        def entered(state: ConnectionState) -> None:
            assert (self.states[-1], state) in LEGAL, (self.states[-1], state)
            self.states.append(state)
            enter(state)

        self.connector._enter = entered  # type: ignore[method-assign]
        self.connector.begin()

    def end(self) -> None:
        self.ended += 1
        assert all(link.over or link.aborted for link in self.links), "a socket is open"

    @property
    def state(self) -> ConnectionState:
        return self.states[-1]

    @property
    def link(self) -> Link | None:
        """The link in use, or None."""
        link = self.links[-1] if self.links else None
        return None if link is None or link.aborted or link.over else link

    def call(self, fn: Callable[..., object], *arguments: object) -> None:
        """Call the connector, as its owner does."""
        self.owner.calling = True
        try:
            fn(*arguments)
        finally:
            self.owner.calling = False

    # the driver and the broker

    @precondition(lambda self: self.asking)
    @rule(result=st.sampled_from([Credentials("guest", "guest"), OSError("no file"), RuntimeError("a mistake")]))
    def credentials(self, result: object) -> None:
        if not isinstance(result, Exception):
            result = connection_module.ConnectCredentials(result, None)  # type: ignore[arg-type]
        self.asking.pop(0)(result)
        self.loop.turn()

    @precondition(lambda self: self.link is not None and not self.link.opened)
    @rule()
    def handshake(self) -> None:
        assert self.link is not None
        self.link.opened = True
        self.loop.guard(lambda: self.connector.link_opened(self.links[-1]))

    @precondition(lambda self: self.link is not None and self.link.asked)
    @rule()
    def answer(self) -> None:
        assert self.link is not None
        channel, method = self.link.asked.pop(0)
        arguments = {(20, 10): bytes(4), (50, 10): bytes(9)}.get(method, b"")
        link = self.link
        self.loop.guard(lambda: link.send(channel, (method[0], method[1] + 1), arguments))
        self.loop.turn()

    @rule(steps=st.integers(1, 5))
    def proceed(self, steps: int) -> None:
        """Perform some successful steps of an attempt."""
        for _ in range(steps):
            if self.asking and self.link is None:
                self.credentials(Credentials("guest", "guest"))
            elif self.link is not None and not self.link.opened:
                self.handshake()
            elif self.link is not None and self.link.asked:
                self.answer()

    @precondition(lambda self: self.link is not None and self.link.channel is not None)
    @rule(code=st.sampled_from([403, 404, 406]))
    def close_channel(self, code: int, over: tuple[int, int] | None = None) -> None:
        """Close the channel over a method, by default over the one that is to be answered next."""
        link = self.link
        assert link is not None
        assert link.channel is not None
        number = link.channel.number
        if over is None:
            over = next((method for channel, method in link.asked if channel == number), (0, 0))
        link.asked = [one for one in link.asked if one[0] != number]
        text = {403: UNDECIDED, 406: NO_REPLICA}.get(code, b"text")
        close = code.to_bytes(2, "big") + bytes([len(text)]) + text + bytes((0, over[0], 0, over[1]))
        self.loop.guard(lambda: link.send(number, CHANNEL_CLOSE, close))
        self.loop.turn()

    @precondition(lambda self: self.link is not None and self.link.channel is not None)
    @rule()
    def confirm(self) -> None:
        link = self.link
        assert link is not None
        assert link.channel is not None
        number = link.channel.number
        self.loop.guard(lambda: link.send(number, ACK, (1).to_bytes(8, "big") + b"\0"))
        reads = self.owner.reads
        for one in self.links:
            self.loop.guard(one.on_read)
        assert self.owner.reads - reads == (self.state is ConnectionState.READY)

    @rule(code=st.sampled_from([None, 320, 541]), which=st.integers(0, 3))
    def lose_link(self, code: int | None, which: int, over: tuple[int, int] = (0, 0)) -> None:
        alive = [link for link in self.links if not link.over]
        if alive:
            link = alive[which % len(alive)]
            self.loop.guard(lambda: link.lose(code, over))
            self.loop.turn()

    @precondition(lambda self: self.link is not None and self.link.opened)
    @rule(blocked=st.booleans())
    def block(self, blocked: bool) -> None:
        link = self.links[-1]
        link.blocked = blocked
        if blocked:
            self.loop.guard(lambda: self.connector.link_blocked(link, "memory"))
        else:
            self.loop.guard(lambda: self.connector.link_unblocked(link))

    @rule(seconds=st.sampled_from([0.0, WAIT, CONNECT_TIMEOUT]))
    def pass_time(self, seconds: float) -> None:
        self.loop.turn()
        self.loop.pass_time(seconds)

    # the owner

    @rule()
    def write(self) -> None:
        frame = b"\3\0\1\0\0\0\4body\xce"
        sent = [len(link.foreign) for link in self.links]
        buffered = self.output.write_buffer_size()
        self.call(self.output.write, frame)
        wrote = [link for link, before in zip(self.links, sent, strict=True) if len(link.foreign) > before]
        if self.state is ConnectionState.READY and self.link is not None:
            assert wrote == [self.link]
            assert buffered == len(self.link.foreign) - 1
        else:
            assert not wrote
            assert buffered == TAKES_NOTHING

    @rule(unencodable=st.booleans())
    def run(self, unencodable: bool) -> None:
        def steps() -> Generator[Any, Any, object]:
            if unencodable:
                yield methods.CheckQueue("x" * 300)
            try:
                yield Pipeline((ConfirmSelect(), ConfirmSelect()))
            except StepRefused as refused:
                return refused
            return "done"

        self.runs.append(None)
        self.call(self.connector.run, steps(), partial(self._ran, len(self.runs) - 1), lambda: False)
        assert self.runs[-1] is None, "reported from inside the call"

    def _ran(self, index: int, outcome: object) -> None:
        assert self.runs[index] is None, "reported twice"
        assert outcome is not None
        self.runs[index] = outcome

    @rule()
    def discard(self) -> None:
        self.call(self.connector.discard, "in doubt")

    @rule()
    def reopen_channel(self) -> None:
        self.call(self.connector.reopen_channel)

    @rule(action=st.sampled_from(["nothing", "raise", "discard", "reopen"]))
    def choose(self, action: str) -> None:
        """Set what the owner does inside `ready` from now on."""
        self.owner.raises = action == "raise"
        self.owner.in_ready = {
            "discard": partial(self.connector.discard, "in ready"),
            "reopen": self.connector.reopen_channel,
        }.get(action, lambda: None)

    @precondition(lambda self: not self.owner.given_up)
    @rule(lot=st.integers(0, 9))
    def loop_fails(self, lot: int) -> None:
        if lot == 0:  # rarely, because hardly anything can follow
            self.loop.guard(lambda: self.connector.crashed(RuntimeError("poll")))

    @rule(lot=st.integers(0, 9))
    def close(self, lot: int) -> None:
        if lot == 0:
            self.call(self.connector.close, 1.0)

    @invariant()
    def live_while_it_may_write(self) -> None:
        if self.state is ConnectionState.READY:
            assert self.owner.live or self.owner.raises

    @invariant()
    def blocked_with_its_connection(self) -> None:
        if self.state is ConnectionState.READY and self.owner.live:
            assert self.owner.is_blocked == self.links[-1].blocked

    def teardown(self) -> None:
        try:
            self.call(self.connector.close, 1.0)
            for _ in range(4):
                for link in self.links:
                    if link.aborted:
                        self.loop.guard(lambda link=link: link.lose())  # type: ignore[misc]
                self.loop.turn()
                self.loop.pass_time(0.9)
            assert self.ended == 1
            assert not self.owner.live
            assert not self.owner.is_blocked
            assert None not in self.runs, "a run was never reported"
            self.call(self.output.write, b"\3\0\1\0\0\0\4body\xce")
        finally:
            for one in self.patches:
                one.stop()


TestConnectorMachine = ConnectorMachine.TestCase
TestConnectorMachine.settings = machine(60, steps=50)


@pytest.mark.parametrize("code", [None, 320])
def test_a_block_ends_with_a_connection_lost_in_a_set_up(code: int | None) -> None:
    """A blocked connection loses its channel.

    The connection is lost before it has another channel.
    """
    machine = ConnectorMachine()
    try:
        machine.proceed(10)
        machine.block(blocked=True)
        machine.close_channel(404)
        machine.pass_time(0.0)
        assert machine.state is ConnectionState.SETTING_UP
        machine.lose_link(code, which=-1)
        assert not machine.owner.is_blocked
        machine.pass_time(0.0)
        machine.proceed(20)
        assert machine.state is ConnectionState.READY
        machine.blocked_with_its_connection()
    finally:
        machine.teardown()


def test_discarding_a_connection_between_channels_ends_its_block() -> None:
    """A callback raises, for example.

    The link ends without a reported loss.
    """
    machine = ConnectorMachine()
    try:
        machine.proceed(10)
        machine.block(blocked=True)
        machine.close_channel(404)
        assert machine.state is ConnectionState.WAITING
        machine.connector.on_error(RuntimeError("a callback"))
        machine.pass_time(0.0)
        assert not machine.owner.is_blocked
        machine.proceed(20)
        assert machine.state is ConnectionState.READY
        machine.blocked_with_its_connection()
    finally:
        machine.teardown()


@pytest.mark.parametrize("state", [ConnectionState.SETTING_UP, ConnectionState.READY, ConnectionState.REOPENING])
def test_the_time_for_a_reply_starts_again_after_a_block(state: ConnectionState) -> None:
    """The broker replies to nothing while it blocks the connection."""
    machine = reached(state)
    try:
        if state is ConnectionState.READY:
            machine.run(unencodable=False)
            machine.loop.turn()
        machine.block(blocked=True)
        machine.loop.pass_time(1.9 * CONNECT_TIMEOUT)
        machine.block(blocked=False)
        machine.loop.pass_time(0.9 * CONNECT_TIMEOUT)
        assert machine.state is state
        machine.loop.pass_time(0.2 * CONNECT_TIMEOUT)
        assert machine.links[-1].aborted
    finally:
        machine.teardown()


@pytest.mark.parametrize("state", [ConnectionState.SETTING_UP, ConnectionState.READY, ConnectionState.REOPENING])
def test_the_end_of_no_block_extends_no_time_limit(state: ConnectionState) -> None:
    """A broker that repeats ``connection.unblocked`` does not hold up the client."""
    machine = reached(state)
    try:
        if state is ConnectionState.READY:
            machine.run(unencodable=False)
            machine.loop.turn()
        machine.loop.pass_time(0.9 * CONNECT_TIMEOUT)
        machine.block(blocked=False)
        machine.loop.pass_time(0.2 * CONNECT_TIMEOUT)
        assert machine.links[-1].aborted
    finally:
        machine.teardown()


def test_the_time_for_a_renewed_token_starts_again_after_a_block() -> None:
    machine = ConnectorMachine()
    try:
        with (
            patch.object(renewer_module, "time", SimpleNamespace(monotonic=lambda: machine.loop.now)),
            patch.object(renewer_module, "call_in_background", lambda _name, _fn, done: machine.asking.append(done)),
        ):
            machine.credentials(Credentials("guest", "first", LIFETIME))
            machine.proceed(20)
            machine.loop.pass_time(0.6 * LIFETIME)
            machine.asking.pop()(Credentials("guest", "next", LIFETIME))
            machine.loop.turn()
            assert machine.links[-1].asked == [(0, UPDATE_SECRET)]
            machine.block(blocked=True)
            machine.loop.pass_time(1.9 * CONNECT_TIMEOUT)
            machine.block(blocked=False)
            machine.loop.pass_time(0.9 * CONNECT_TIMEOUT)
            assert machine.state is ConnectionState.READY
            machine.loop.pass_time(0.2 * CONNECT_TIMEOUT)
            assert machine.links[-1].aborted
    finally:
        machine.teardown()


def test_a_token_refused_during_a_set_up_refuses_no_step() -> None:
    """RabbitMQ closes the connection. The next attempt gets another token."""
    machine = ConnectorMachine()
    try:
        with (
            patch.object(renewer_module, "time", SimpleNamespace(monotonic=lambda: machine.loop.now)),
            patch.object(renewer_module, "call_in_background", lambda _name, _fn, done: machine.asking.append(done)),
        ):
            machine.credentials(Credentials("guest", "first", CONNECT_TIMEOUT))
            machine.proceed(2)
            machine.connector._setup = lambda _server: publisher_setup([Queue("q")], (4, 3))
            machine.answer()
            machine.loop.pass_time(0.6 * CONNECT_TIMEOUT)
            machine.asking.pop()(Credentials("guest", "refused", CONNECT_TIMEOUT))
            machine.loop.turn()
            assert machine.state is ConnectionState.SETTING_UP
            errors: list[Any] = []
            machine.owner.failed = lambda error, _will_retry: errors.append(error)  # type: ignore[method-assign]
            machine.lose_link(530, which=-1, over=UPDATE_SECRET)
            assert [error.permanent for error in errors] == [False]
    finally:
        machine.teardown()


def test_a_full_connection_is_replaced_while_its_channel_closes() -> None:
    """The set-up fails, and the channel is closed.

    The broker has not answered the close when the next attempt is due.
    """
    machine = ConnectorMachine()
    try:
        machine.proceed(10)
        machine.links[-1].channels.channel_max = 1
        machine.connector._setup = lambda _server: publisher_setup([Queue("q", delayed_retry=(1, 60))], (4, 2))
        machine.close_channel(404)
        machine.pass_time(0.0)
        machine.answer()
        assert machine.state is ConnectionState.WAITING
        machine.connector._setup = lambda server: set_up(server.version_tuple)
        machine.pass_time(WAIT)
        machine.proceed(20)
        assert machine.state is ConnectionState.READY
    finally:
        machine.teardown()


def test_the_next_host_follows_a_connection_lost_between_set_ups() -> None:
    machine = ConnectorMachine()
    try:
        machine.proceed(10)
        machine.connector._setup = lambda _server: publisher_setup([Queue("q", delayed_retry=(1, 60))], (4, 2))
        machine.close_channel(404)
        machine.pass_time(0.0)
        machine.answer()
        assert machine.state is ConnectionState.WAITING
        assert machine.link is not None
        machine.lose_link(320, which=-1)
        machine.pass_time(0.0)
        assert machine.state is ConnectionState.PREPARING
        machine.credentials(Credentials("guest", "guest"))
        assert [link.endpoint.host for link in machine.links] == ["one", "two"]
    finally:
        machine.teardown()


def test_the_next_host_follows_one_discarded_between_channels() -> None:
    machine = reached(ConnectionState.READY)
    try:
        machine.close_channel(404)
        machine.discard()
        machine.loop.turn()
        machine.pass_time(WAIT)
        machine.credentials(Credentials("guest", "guest"))
        assert [link.endpoint.host for link in machine.links] == ["one", "two"]
    finally:
        machine.teardown()


def test_a_set_up_without_its_connection_fails_at_once() -> None:
    """It caught the refusal of its step, which closed the connection."""

    def steps(_server: ServerInfo) -> Generator[Any, Any, None]:
        with contextlib.suppress(StepRefused):
            yield methods.CheckQueue("q")
        yield ConfirmSelect()

    machine = ConnectorMachine()
    try:
        machine.connector._setup = steps
        machine.proceed(3)
        machine.lose_link(541, which=-1)
        machine.pass_time(0.0)
        assert machine.state is ConnectionState.PREPARING, "of the next host"
    finally:
        machine.teardown()


def test_a_connection_lost_between_channels_is_reported() -> None:
    """The owner knows only of the lost channel."""
    machine = reached(ConnectionState.READY)
    try:
        machine.close_channel(404)
        assert machine.owner.disconnections == []
        machine.lose_link(None, which=-1)
        assert machine.owner.disconnections == ["gone"]
        machine.pass_time(0.0)
        machine.proceed(20)
        machine.close_channel(404)
        machine.discard()
        machine.loop.turn()
        assert machine.owner.disconnections == ["gone", "in doubt"]
    finally:
        machine.teardown()


def test_a_step_that_was_not_sent_is_not_refused() -> None:
    """The broker closes the channel for another reason."""
    machine = reached(ConnectionState.READY)
    try:
        machine.run(unencodable=False)  # begins in the next turn
        machine.close_channel(404)
        assert isinstance(machine.runs[-1], BrokerUnavailable)
        machine.pass_time(0.0)
        machine.proceed(20)
        machine.run(unencodable=False)
        machine.pass_time(0.0)
        machine.close_channel(404)
        assert isinstance(machine.runs[-1], StepRefused)
    finally:
        machine.teardown()


@pytest.mark.parametrize("over", [(60, 40), (60, 80), (0, 0)], ids=["publish", "ack", "overdue ack"])
def test_a_channel_closed_over_another_method_refuses_no_step(
    caplog: pytest.LogCaptureFixture, over: tuple[int, int]
) -> None:
    """Nobody else would warn of the lost channel."""
    machine = reached(ConnectionState.READY)
    try:
        machine.run(unencodable=False)
        machine.pass_time(0.0)
        machine.close_channel(404, over=over)
        assert isinstance(machine.runs[-1], BrokerUnavailable)
        assert [record.levelname for record in caplog.records if "channel lost" in record.message] == ["WARNING"]
    finally:
        machine.teardown()


def test_a_consumer_cancelled_during_the_set_up_is_reported() -> None:
    """The owner gets the event after ``ready``, behind the deliveries that came before it."""
    machine = ConnectorMachine()
    events: list[str] = []
    machine.owner.in_ready = partial(events.append, "ready")
    machine.owner.acked = lambda tag, _multiple: events.append(f"content {tag}")  # type: ignore[method-assign]
    machine.owner.cancelled = events.append  # type: ignore[method-assign]

    def consume_two(_server: ServerInfo) -> Generator[Any, Any, None]:
        yield methods.Consume("one", "first")
        yield methods.Consume("two", "second")

    machine.connector._setup = consume_two
    try:
        machine.proceed(3)
        link = machine.links[-1]
        assert link.asked.pop() == (1, CONSUME)
        link.send(1, CONSUME_OK, b"\x05first")
        link.send(1, ACK, (1).to_bytes(8, "big") + b"\0")
        link.send(1, CANCEL, b"\x05first\1")
        assert not events
        assert link.asked.pop() == (1, CONSUME)
        link.send(1, CONSUME_OK, b"\x06second")
        assert events == ["ready", "content 1", "first"]
    finally:
        machine.teardown()


def test_the_handshakes_have_all_their_time_after_a_callback() -> None:
    machine = ConnectorMachine()
    try:
        for answered in (True, False):
            machine.pass_time(CONNECT_TIMEOUT - 0.1)
            machine.credentials(Credentials("guest", "guest"))
            machine.pass_time(CONNECT_TIMEOUT - 0.1)
            assert machine.state is ConnectionState.CONNECTING
            if answered:
                machine.proceed(20)
                assert machine.state is ConnectionState.READY
                machine.lose_link(None, which=-1)
                machine.pass_time(0.0)
        machine.pass_time(0.1)
        assert machine.state is ConnectionState.PREPARING, "of the next host"
    finally:
        machine.teardown()


def test_each_reply_of_a_set_up_has_all_its_time() -> None:
    """The replies to the handshake, to ``channel.open`` and to each step, on one channel after another."""
    machine = ConnectorMachine()
    try:
        machine.proceed(1)
        for reply in (machine.handshake, machine.answer, partial(machine.close_channel, 404), machine.answer):
            machine.loop.pass_time(0.9 * CONNECT_TIMEOUT)
            reply()
            assert machine.state is ConnectionState.SETTING_UP
        machine.loop.pass_time(0.9 * CONNECT_TIMEOUT)
        assert not machine.links[-1].aborted
        machine.loop.pass_time(0.2 * CONNECT_TIMEOUT)
        assert machine.links[-1].aborted
    finally:
        machine.teardown()


STEPS = {  # from the start, without failures
    ConnectionState.PREPARING: 0,
    ConnectionState.CONNECTING: 1,
    ConnectionState.SETTING_UP: 2,
}


def reached(state: ConnectionState, stop: Any = None) -> ConnectorMachine:
    machine = ConnectorMachine(stop)
    if stop is not None:  # the policy is asked when every host has failed, so the next attempt is the last
        machine.credentials(OSError("no file"))
        machine.pass_time(0.0)
    if state is ConnectionState.WAITING:
        machine.credentials(OSError("no file"))
    elif state is ConnectionState.GIVEN_UP:
        fail(machine)
    else:
        machine.proceed(STEPS.get(state, 20))
    if state is ConnectionState.REOPENING:
        machine.reopen_channel()
    elif state is ConnectionState.DISCARDED:
        machine.discard()
    elif state is ConnectionState.CLOSING:
        machine.call(machine.connector.close, 1.0)
    assert machine.state is state
    return machine


def close(machine: ConnectorMachine) -> None:
    machine.call(machine.connector.close, 1.0)


def crash(machine: ConnectorMachine) -> None:
    machine.owner.given_up = False  # a loop may fail after that
    machine.connector.crashed(RuntimeError("poll"))


def fail(machine: ConnectorMachine) -> None:
    """Fail the attempt or the connection."""
    if machine.state is ConnectionState.PREPARING:
        machine.credentials(OSError("no file"))
    elif machine.state is ConnectionState.DISCARDED:
        machine.pass_time(0.0)
    else:
        machine.lose_link(None, which=-1)


def wait(machine: ConnectorMachine) -> None:
    machine.pass_time(WAIT)


def lose_channel(machine: ConnectorMachine) -> None:
    machine.close_channel(404)
    machine.pass_time(WAIT)


def lose_both(machine: ConnectorMachine) -> None:
    """Lose the channel, and then the connection before there is another channel."""
    machine.close_channel(404)
    machine.lose_link(None, which=-1)


def discard_between_channels(machine: ConnectorMachine) -> None:
    machine.close_channel(404)
    discard_and_fail(machine)


def refuse_step(machine: ConnectorMachine) -> None:
    """Close the channel over the first step. The next step uses another channel."""
    machine.proceed(1)
    machine.close_channel(404)


def discard_and_fail(machine: ConnectorMachine) -> None:
    machine.discard()
    machine.pass_time(0.0)


def test_every_transition_of_the_table_happens() -> None:
    attempt = (ConnectionState.PREPARING, ConnectionState.CONNECTING, ConnectionState.SETTING_UP)
    established = (ConnectionState.READY, ConnectionState.REOPENING)
    open_states = [state for state in ConnectionState if state is not ConnectionState.ENDED]
    at_once = tenacity.stop_after_attempt(1)
    cases = [
        *(
            (state, event, None)
            for state in open_states
            if state is not ConnectionState.GIVEN_UP
            for event in (close, crash)
        ),
        *((ConnectionState.GIVEN_UP, event, at_once) for event in (close, crash)),
        *((state, event, None) for state in (*attempt, *established) for event in (fail, discard_and_fail)),
        *((state, event, at_once) for state in attempt for event in (fail, discard_and_fail)),
        (ConnectionState.WAITING, wait, None),
        (ConnectionState.SETTING_UP, refuse_step, None),
        (ConnectionState.READY, lose_channel, None),
        (ConnectionState.READY, lose_both, None),
        (ConnectionState.READY, discard_between_channels, None),
    ]
    seen: set[tuple[ConnectionState, ConnectionState]] = set()
    for state, event, stop in cases:
        machine = reached(state, stop)
        try:
            event(machine)
        finally:
            machine.teardown()
        seen |= set(pairwise(machine.states))
    assert seen == LEGAL


def test_reads_are_reported_only_while_the_channel_is_ready() -> None:
    """A read that loses the connection is not reported either."""
    for end in (fail, discard_and_fail, close, ConnectorMachine.reopen_channel):
        machine = reached(ConnectionState.READY)
        try:
            link = machine.links[-1]
            link.on_read()
            assert machine.owner.reads == 1
            end(machine)
            link.on_read()
            assert machine.owner.reads == 1
        finally:
            machine.teardown()
