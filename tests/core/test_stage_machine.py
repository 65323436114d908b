"""Fault row 68: a relay that dies or loses a link moves each message once.

It may die between any two of its steps.
"""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from reliable_mq.core.stage.session import EpochState
from reliable_mq.core.stage.tail import SETTLED_AFTER
from tests.core.staging import FRAME_MAX, Channel, CheckedSession, Queued, Stage, stage_options

_FORGOTTEN = SETTLED_AFTER / 2  # the period of acks that a classic queue forgets when its broker is killed, in seconds


class RelayMachine(RuleBasedStateMachine):
    """A queue with messages, a stage of two partitions, and relays that die.

    Each step of a relay is a separate rule: write, have a frame carried out, receive a confirm, receive messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.options = stage_options(2, max_outstanding=8)
        self.stage = Stage(self.options.streams)
        self.queue: deque[Queued] = deque()
        self.acked: list[Queued] = []
        self.given: list[str] = []
        self.now = 0.0
        self.epoch = 0
        self.begin()

    def begin(self) -> None:
        """Give the lock to a relay. The channel of the relay before it is lost."""
        self.epoch += 1
        self.session = CheckedSession(self.options)
        self.channel = Channel(self.stage, self.queue)
        name = self.epoch.to_bytes(8)
        self.channel.write(self.session.opened(self.epoch, 1, FRAME_MAX, name, self.now))
        self.reading: tuple[str, int | str] | None = None

    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.given.append(f"m{len(self.given)}")
            self.queue.append(Queued(self.given[-1]))

    @rule(count=st.integers(1, 12), most=st.integers(1, 5))
    def step(self, count: int, most: int) -> None:
        """Perform the next steps of the relay and of the broker, in order."""
        for _ in range(count):
            if self.channel.work:
                self.carry_out(most)
            elif self.channel.confirms:
                self.confirm(most)
                self.ack()
            elif self.session.next_read is not None:
                self.read(10 * most)
            else:
                self.deliver(most)

    @rule(most=st.integers(1, 5))
    def carry_out(self, most: int) -> None:
        self.acked += self.channel.carry_out(self.now, most)

    @rule(most=st.integers(1, 5))
    def confirm(self, most: int) -> None:
        for _ in range(min(most, len(self.channel.confirms))):
            self.session.confirmed(self.epoch, self.channel.confirms.popleft(), False)

    @rule()
    def ack(self) -> None:
        self.channel.write(self.session.acks(self.now))

    @rule(most=st.integers(1, 5))
    def deliver(self, most: int) -> None:
        if self.session.state is not EpochState.MOVING:
            return
        deliveries = self.channel.deliver(min(most, 8 - len(self.channel.unacked)))
        if deliveries:
            self.channel.write(self.session.delivered(deliveries, self.now))
            if self.session.state is EpochState.ENDING:
                self.carry_out(len(self.channel.work))
                self.channel.die()
                self.begin()

    def read(self, most: int) -> None:
        self.reading = self.reading or self.session.next_read
        assert self.reading is not None
        name, start = self.reading
        messages = self.channel.read(name, start, most)
        over, frames = self.session.tail_read(name, messages, self.now)
        self.channel.write(frames)
        self.reading = None if over else (name, messages[-1][0] + 1)

    @precondition(lambda self: not self.queue and not self.channel.unacked)
    @rule()
    def found_empty(self) -> None:
        self.session.drained(self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, SETTLED_AFTER]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def die(self) -> None:
        self.nothing_is_in_the_stage_twice()
        self.nothing_is_lost()
        self.channel.die()
        self.begin()

    @rule(most=st.integers(0, 5))
    def close(self, most: int) -> None:
        """End an epoch, or die while it ends."""
        self.channel.write(self.session.ending(self.now))
        self.carry_out(most)
        self.die()

    @precondition(lambda self: self.channel.unacked)
    @rule(most=st.integers(1, 5))
    def link_breaks(self, most: int) -> None:
        """Break and restore the link to the channel's node; the queue redelivers."""
        self.channel.take_back()
        self.deliver(most)
        self.carry_out(most)

    @rule()
    def broker_dies(self) -> None:
        """Kill the broker. The queue also forgets the latest acks."""
        self.channel.die()
        back = [each for each in self.acked if each.acked_at is not None and self.now - each.acked_at < _FORGOTTEN]
        self.acked = [each for each in self.acked if each not in back]
        for each in reversed(back):
            each.returned()
            self.queue.appendleft(each)
        self.begin()

    def nothing_is_in_the_stage_twice(self) -> None:
        moved = Counter(self.stage.originals())
        assert not [message for message, times in moved.items() if times > 1]

    def nothing_is_lost(self) -> None:
        assert self.session.error is None
        staged = set(self.stage.originals())
        waiting = {each.properties for each in (*self.queue, *self.channel.unacked.values())}
        assert {Queued(message_id).properties for message_id in self.given} <= staged | waiting

    def teardown(self) -> None:
        """Let a last relay move all that is left."""
        self.channel.die()
        self.begin()
        for _ in range(10_000):
            self.step(10, 5)
            idle = not self.channel.work and not self.channel.confirms and not self.channel.unacked
            if idle and not self.queue and self.session.state is EpochState.MOVING:
                break
        else:
            raise AssertionError("the last relay did not come to an end")
        self.nothing_is_in_the_stage_twice()
        assert sorted(self.stage.originals()) == sorted(Queued(each).properties for each in self.given)


RelayMachine.TestCase.settings = hypothesis_settings(stateful_step_count=30)
TestF68RelayMovesEachMessageOnce = RelayMachine.TestCase
