"""The positions of streams: where they begin and end, and where a batch does.

A planner looks at streams on one connection, which it makes when it is first asked. It decides which differences from
the position of a query are data loss, and which only show a replica that lags behind.

Invariants: a position of a query never moves back unless its stream is certain to be shorter. A lookup that was cut off
is an error, never an earlier end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Final, TypeVar

from reliable_mq._util.logs import get_logger
from reliable_mq.codec.methods import CheckQueue, QueueState
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, TopologyMismatch
from reliable_mq.spark.options import StreamOptions
from reliable_mq.spark.stream_broker import (
    EndWatch,
    PartitionFinder,
    StreamChannel,
    StreamEnd,
    end_of,
    exists,
    first_offsets,
    first_offsets_and_next,
    from_host,
    has_newest,
    is_shorter,
    offsets_at,
)
from reliable_mq.spark.stream_offsets import second

logger = get_logger(__name__)

_FRESH: Final = 0.25  # seconds for which a looked-up end stays valid: Spark requests it every 10 ms
_SURE: Final = 3.0  # seconds without a delivery after which a running query takes a stream for empty
_QUICK: Final = 0.25  # the same if the stream will be queried again
_CERTAIN: Final = 12.0  # the same if messages would be missed, and to look again: RabbitMQ counts every five seconds
_BETWEEN_ATTEMPTS: Final = 1.0  # seconds
_EMPTY: Final = StreamEnd(0, 0.0)
_position: Final = attrgetter("position")
_position_and_count: Final = attrgetter("position", "messages")


_Value = TypeVar("_Value", int, int | str)
_Found = TypeVar("_Found")


class StreamPlanner:
    """A planner that finds positions in streams, on one lazily made connection."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._channel: StreamChannel | None = None
        self._watch: EndWatch  # of the channel
        self._finder: PartitionFinder | None = None
        self._ends: dict[str, StreamEnd] = {}
        self._before: dict[str, StreamEnd] = {}  # ends on a lost channel, of streams that may have been made anew since
        self._looked_at = float("-inf")
        self._read: frozenset[str] = frozenset()  # streams that the query has read
        self._anew: frozenset[str] = frozenset()  # streams that did not exist when the query began
        self._passed = 0  # hosts that others are preferred to, since a replica there lagged behind or was missing

    def at_some_host(self, look: Callable[[], _Found]) -> _Found:
        """Return the result of a lookup at the first host at which it does not fail."""
        for _ in self._options.settings().endpoints[1:]:
            try:
                return look()
            except BrokerUnavailable as error:
                if error.permanent or self._channel is None:  # no host can be reached
                    raise
                logger.warning("%s; continuing at another host", error)
                self.pass_host()
        return look()

    def pass_host(self) -> None:
        """Continue at the next host, if one was reached: a lookup has failed there."""
        self._passed += self._channel is not None
        self.close()

    def lost(self, positions: Mapping[str, int], timeout: float) -> list[str]:
        """Return the streams that do not exist, or end before these positions of a query.

        Waits while the broker is unreachable, and while only the replica that is read ends before a position.

        Raises:
            BrokerUnavailable: If the broker could not be queried within ``timeout`` seconds, or the error is permanent.
        """
        until = time.monotonic() + timeout
        while True:
            deadline = time.monotonic() + _CERTAIN  # for all streams together
            try:
                return [name for name, position in positions.items() if self._is_lost(name, position, deadline)]
            except BrokerUnavailable as error:
                if error.permanent or time.monotonic() >= until:
                    raise
                self.pass_host()
            time.sleep(_BETWEEN_ATTEMPTS)

    def _is_lost(self, name: str, position: int, deadline: float) -> bool:
        channel = self._connected()
        if not exists(channel, name):
            return True
        end = end_of(channel, name, _QUICK).position if position else 0
        return self._newest(name, end, position, deadline) < position - 1

    def begin_anew(self, names: Iterable[str]) -> None:
        """Record streams that are created again, so that old positions are invalid."""
        self._anew = frozenset(names)

    def recall(self, names: Iterable[str]) -> None:
        """Record the streams that the query has read. Some may follow a deleted one."""
        self._read = frozenset(names)

    def ends(self, *, sure: bool) -> dict[str, int]:
        """Return the positions after the newest messages of all streams.

        If ``sure``, query now, wait until a stream without deliveries is certain to be empty, and look further where
        the leader of a stream has more than the replica that is read.

        Raises:
            BrokerUnavailable: If the leader of a stream does not respond, and ``sure``.
        """
        if sure or time.monotonic() - self._looked_at > _FRESH:
            try:
                self._ends = self._looked_up(sure=sure)
            except TopologyMismatch as error:  # a stream was deleted
                if self._finder is None or not self._finder.forget(error.name):
                    raise
                return self.ends(sure=sure)
            self._looked_at = time.monotonic()
        return self.known_ends()

    def _looked_up(self, *, sure: bool) -> dict[str, StreamEnd]:
        names = self._names()
        channel = self._connected()
        patience = _CERTAIN if sure else _QUICK
        begun = {name for name, end in self._ends.items() if end.position}
        begun |= first_offsets(channel, [name for name in names if name not in begun], patience).keys()
        look = partial(end_of, channel) if sure else self._watch.end_of
        found = {name: look(name, patience) if name in begun else _EMPTY for name in names}
        if sure:
            return self._furthest(found)
        return {name: end if end.position else self._ends.get(name, end) for name, end in found.items()}

    def _furthest(self, ends: dict[str, StreamEnd]) -> dict[str, StreamEnd]:
        """Return later ends where this node's replica lags behind the leader.

        The leader also counts the chunks that only store positions of consumers. So its count can exceed every end for
        good: the hosts of the URL are asked first, and the wait is for an end that moves.
        """
        ends = dict(ends)
        begun = [name for name, end in ends.items() if end.position]
        first = first_offsets(self._connected(), begun, _SURE)

        def in_doubt() -> list[str]:
            return [name for name in begun if not 0 < ends[name].messages <= ends[name].position - first.get(name, 0)]

        if behind := in_doubt():
            elsewhere, complete = self._elsewhere(behind)
            ends |= {name: max(ends[name], end, key=_position) for name, end in elsewhere.items()}
            if complete:
                return ends
        changed_at = began = time.monotonic()
        while behind := in_doubt():
            now = time.monotonic()
            unknown = [name for name in behind if not ends[name].messages]
            if unknown and now - began >= _CERTAIN:
                raise BrokerUnavailable(
                    f"stream {unknown[0]!r} has messages, and RabbitMQ counts none: its leader does not respond to "
                    "this node, which may not have the newest of them"
                )
            if not unknown and now - changed_at >= _SURE:
                logger.warning(
                    "the leaders of the streams %s count more messages than this node has: it lags, or the counts "
                    "include stored consumer offsets",
                    ", ".join(behind),
                )
                break
            time.sleep(_QUICK)
            for name in behind:
                newer = max(ends[name], end_of(self._connected(), name, _SURE), key=_position_and_count)
                if newer != ends[name]:
                    ends[name], changed_at = newer, time.monotonic()
        return ends

    def _elsewhere(self, names: Iterable[str]) -> tuple[dict[str, StreamEnd], bool]:
        """Return the furthest ends on the hosts of the URL, and whether all answered.

        With one host in the URL, nothing is asked, and the answer is not complete.
        """
        found: dict[str, StreamEnd] = {}
        settings = self._options.settings()
        complete = len(settings.endpoints) > 1
        for endpoint in settings.endpoints if complete else ():
            try:
                with StreamChannel(replace(settings, endpoints=(endpoint,)), name="spark-ends") as channel:
                    for name in names:
                        found[name] = max(found.get(name, _EMPTY), end_of(channel, name, _QUICK), key=_position)
            except (BrokerUnavailable, ConfigurationError) as error:
                logger.info("failed to read the last offsets of the streams at %s: %s", endpoint, error)
                complete = False
        return found, complete

    def known_ends(self) -> dict[str, int]:
        """Return the ends that were found last; none before the first lookup."""
        return {name: end.position for name, end in self._ends.items()}

    def beginnings(self) -> dict[str, int]:
        """Return the oldest offset of each stream; 0 for an empty one."""
        try:
            names = self._names()
            channel = self._connected()
            return dict.fromkeys(names, 0) | first_offsets(channel, names, _QUICK)
        except BrokerUnavailable as error:
            logger.info("failed to read the first offsets of the streams: %s", error)
            return {}

    def depth(self, queue: str) -> int | None:
        """Return the number of ready messages of a queue, or None if it is unknown."""
        try:
            state = self._connected().carry_out(CheckQueue(queue))
        except (BrokerUnavailable, TopologyMismatch) as error:
            logger.info("failed to get the depth of queue %r: %s", queue, error)
            return None
        return state.messages if isinstance(state, QueueState) and not state.in_doubt else None

    def is_older(self, name: str, position: int, age: float) -> bool:
        """Return whether the message arrived over ``age`` seconds ago, by its chunk."""
        since = time.time() - age
        if since <= 0:
            return False
        try:
            newer = offsets_at(self._connected(), {name: datetime.fromtimestamp(since, UTC)}, _SURE).get(name)
        except BrokerUnavailable as error:
            logger.info("failed to get the age of the messages of stream %r: %s", name, error)
            return False
        return newer is None or position < newer

    def averages(self) -> dict[str, float]:
        """Return the average message size in bytes, by stream, from the last lookup."""
        return {name: end.average for name, end in self._ends.items()}

    def starting(self) -> dict[str, int]:
        """Return the positions where a query begins, according to the options."""
        names = self._names()
        channel = self._connected()
        if self._options.starting_timestamp is not None:
            times = _by_name("startingOffsetsByTimestamp", self._options.starting_timestamp, names)
            return self._since(channel, times)
        by_name = _by_name("startingOffsets", self._options.starting_offsets, names)
        # Streams that are known to be empty are skipped, because confirming that takes long.
        asked = [name for name in names if self._ends.get(name) != _EMPTY and isinstance(by_name[name], str)]
        latest = [name for name in asked if by_name[name] == "latest"]
        first, came = first_offsets_and_next(channel, asked, latest, _CERTAIN)
        ends = {name: end_of(channel, name, _SURE).position for name in latest if name in first and name not in came}
        found = dict.fromkeys(names, 0) | first | ends | came
        return {name: found[name] if isinstance(at, str) else at for name, at in by_name.items()}

    def ending(self) -> dict[str, int]:
        """Return the positions where a batch ends, according to the options."""
        ends = self.ends(sure=True)
        if self._options.ending_timestamp is not None:
            until = _by_name("endingOffsetsByTimestamp", self._options.ending_timestamp, ends)
            places = {name: second(when, up=True) for name, when in until.items()}
            found = offsets_at(self._connected(), places, _SURE)
            return {name: min(end, found.get(name, end)) for name, end in ends.items()}
        by_name = _by_name("endingOffsets", self._options.ending_offsets, ends)
        wanted = {name: ends[name] if isinstance(at, str) else at for name, at in by_name.items()}
        for name, position in wanted.items():
            if position > ends[name]:
                raise ConfigurationError(
                    f"endingOffsets of stream {name!r} is {position}, and its newest message has offset "
                    f"{ends[name] - 1}; the end itself is not read"
                )
        return wanted

    def beginning(self, end: Mapping[str, int]) -> dict[str, int]:
        """Return the positions where a batch begins, according to the options.

        Raise `ConfigurationError` for an offset in the options that lies after ``end``.
        """
        begin, given = self.starting(), self._options.starting_offsets
        for name, position in begin.items():
            if not isinstance(given, str) and position == given[name] and position > end[name]:
                raise ConfigurationError(
                    f"startingOffsets of stream {name!r} is {position}, and the batch ends before {end[name]}: there "
                    "is nothing between"
                )
        return begin

    def check_begun(self) -> None:
        """Refuse an offset after the end of a stream: it would look like data loss."""
        given = self._options.starting_offsets
        offsets = {} if isinstance(given, str) else {name: at for name, at in given.items() if isinstance(at, int)}
        for name, end in self.ends(sure=True).items() if any(offsets.values()) else ():
            if offsets.get(name, 0) > end:
                raise ConfigurationError(
                    f"startingOffsets of stream {name!r} is {offsets[name]}, and its next message will have offset "
                    f"{end}: begin there, or at 'latest'"
                )

    def reconciled(self, begin: Mapping[str, int], end: Mapping[str, int]) -> dict[str, int]:
        """Return the positions where the next batch begins, for all existing streams.

        A new stream is read from its first message. A stream that is gone, or that ends before the position of the
        query, is data loss.

        Raises:
            BrokerUnavailable: If only the replica that is read ends before the position of the query.
            ConsumeError: If data was lost (``failOnDataLoss``).
        """
        deadline = time.monotonic() + _CERTAIN  # for all streams together
        lost = [f"stream {name!r} is in the checkpoint and no longer read" for name in begin if name not in end]
        new = [name for name in end if name not in begin]
        result = dict.fromkeys(new, 0) | (first_offsets(self._connected(), new, _SURE) if new else {})
        for name, position in end.items():
            if name in result:
                continue
            if name in self._anew:
                lost.append(f"stream {name!r} was read up to offset {begin[name] - 1} and was gone")
                result[name] = 0
            elif (last := self._newest(name, position, begin[name], deadline)) < begin[name] - 1:
                now = f"ends at {last} now" if last >= 0 else "is empty now"
                lost.append(f"stream {name!r} was read up to offset {begin[name] - 1} and {now}")
                result[name] = 0
            elif self._has_others(name):
                lost.append(f"stream {name!r} was read up to offset {begin[name] - 1} and has other messages now")
                result[name] = 0
            else:
                result[name] = begin[name]
        for what in lost:
            if self._options.fail_on_data_loss:
                raise ConsumeError(f"{what}: was it deleted, and made anew? Set failOnDataLoss to false to go on")
            logger.warning("%s; continuing because failOnDataLoss is false", what)
        self._anew = frozenset()
        self._before = {name: end for name, end in self._before.items() if result.get(name)}
        return result

    def _has_others(self, name: str) -> bool:
        """Return whether a stream was made anew since the last channel, and is as long.

        That a stream is deleted also ends a channel.
        """
        before = self._before.get(name)
        same = None if before is None else has_newest(self._connected(), name, before, _QUICK)
        if same is not None:
            del self._before[name]
        return same is False

    def _newest(self, name: str, end: int, begin: int, deadline: float) -> int:
        """Return a stream's newest offset. Look again while the query is further ahead.

        The replica of a stream on another node may lag behind. And a stream is certain to be empty only after a while.
        """
        found, looked = StreamEnd(end, 0.0), False
        while found.position < begin and not (looked and time.monotonic() >= deadline):
            time.sleep(_QUICK)
            found, looked = end_of(self._connected(), name, max(deadline - time.monotonic(), _QUICK)), True
        if found.position < begin and (
            not is_shorter(self._connected(), name, found, begin, _SURE)
            or self._elsewhere([name])[0].get(name, _EMPTY).position >= begin
        ):
            raise BrokerUnavailable(
                f"stream {name!r} was read up to offset {begin - 1}, and the replica on this node ends at "
                f"{found.position - 1}: it lags behind, or its leader does not respond"
            )
        return found.position - 1

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.__exit__(None, None, None)

    def _since(self, channel: StreamChannel, times: Mapping[str, int]) -> dict[str, int]:
        # A stream that was just restarted shows no message of any time.
        begun = first_offsets(channel, [name for name in times if self._ends.get(name) != _EMPTY], _CERTAIN)
        ends = {name: end_of(channel, name, _SURE).position for name in begun}
        found = offsets_at(channel, {name: second(times[name]) for name in begun}, _SURE)
        # For a time after the last message, RabbitMQ begins at the next one that comes, whatever its time.
        found = {name: offset for name, offset in found.items() if offset < ends[name]}
        late = [name for name in times if name not in found]
        if late and not self._options.latest_without_match:
            name = late[0]
            raise ConfigurationError(
                f"stream {name!r} has no message as new as {second(times[name]):%Y-%m-%d %H:%M:%S} UTC, to begin at: "
                "give an earlier time, or startingOffsetsByTimestampStrategy=latest to begin at the end"
            )
        return found | {name: ends.get(name, 0) for name in late}

    def _names(self) -> list[str]:
        """Return the streams in order. A lookup by names may end the channel."""
        if self._finder is None:
            self._finder = PartitionFinder(
                self._options.settings(), self._options.streams, self._options.management_url
            )
        return self._finder.streams(self._connected(), self._read)

    def _connected(self) -> StreamChannel:
        if self._channel is None or not self._channel.usable:
            self.close()
            channel = StreamChannel(from_host(self._options.settings(), self._passed), name="spark-streams")
            try:
                self._channel = channel.__enter__()
            except ConfigurationError as error:
                if self._ends:  # it was connected: a certificate is being renewed
                    raise BrokerUnavailable(str(error)) from error
                raise
            self._watch = EndWatch(self._channel)
            self._before = {name: end for name, end in self._ends.items() if end.position} | self._before
        return self._channel


def _by_name(option: str, given: _Value | Mapping[str, _Value], names: Collection[str]) -> dict[str, _Value]:
    """Return the value of an option for each stream."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    if set(given) != set(names):
        raise ConfigurationError(
            f"{option} must have a value for each of the streams {', '.join(names)}, and for no other; it has "
            f"{', '.join(given)}"
        )
    return {name: given[name] for name in names}
