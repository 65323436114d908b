"""The search for the publish that caused the broker to close a channel.

A channel exception (404 no such exchange, 406 message too large, 403 not permitted, ...) names no publish. Publishing
everything outstanding again would close every following channel too. Failing everything would fail innocent publishes.
The search uses three facts:

- The broker processes a channel in order. Everything before the culprit was processed, and its confirms may be lost.
  Nothing after the culprit was processed.
- If the text of the error names an exchange or a value, only publishes with it can be the culprit.
- An INTERNAL_ERROR (541) is a crash in the broker. A publish may have provoked it or be unrelated to it, and may have
  been processed before it. So a publish that was alone is sent once more, and is the culprit if the broker crashes
  again.

The publishes that the text names (`named_by`) are separated from the others. A single named publish is the culprit.
Several are published once more, as a separate group, behind the others. If the channel closes again with an error that
names all of them, they have the same flaw, and all are culprits. If the text names none, all are suspects, and are
narrowed down twice: first in groups of the square root of their number, then one by one.

A group that is not confirmed for the confirm timeout is cleared, since the broker has read it and closed no channel
over it. Otherwise one queue that does not confirm would stop all publishing until the deadline of its publishes. If the
broker was frozen, and has read nothing, the search begins again when it closes the channel over the cleared publishes.

Invariants:

- Every suspect is either returned as a culprit, settled by the broker, cleared, or in exactly one group. None is
  forgotten.
- Groups keep the order of publishing, except that the named publishes come last. So do the cleared publishes, which
  come after all groups.
- Several culprits that one error names are found by one further channel close, and a single one without any. A culprit
  that no text names is found by two.
- The broker processes an innocent publish at most once more than without the error if the text names the culprit, and
  at most twice more if it does not. A publish behind the culprit is never processed twice. A loss for another reason
  adds to this.

RabbitMQ's text names the exchange, the routing key or the value that it objects to. The texts here are those of
RabbitMQ 4.0 to 4.3. A long reply text is cut at 255 bytes and ends with three dots. Invariants of `named_by`:

- A publish is named if its own exchange, routing key, key of CC or BCC, property or size is in the text, or if the text
  means its ``reply_to``. An unknown text names none.
- Properties that cannot be decoded are no error here.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from reliable_mq.codec import Properties
from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core.headers import may_copy
from reliable_mq.core.publisher.publication import Publication

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reliable_mq.core.publisher.publication import BrokerReply

# Connection-level reply codes that a publish can provoke. The others result from the broker's state: CONNECTION_FORCED,
# NOT_ALLOWED on a deleted virtual host, ...
BLAMES_A_PUBLISH = frozenset(
    {
        ReplyCode.FRAME_ERROR,
        ReplyCode.SYNTAX_ERROR,
        ReplyCode.COMMAND_INVALID,
        ReplyCode.CHANNEL_ERROR,
        ReplyCode.UNEXPECTED_FRAME,
        ReplyCode.INTERNAL_ERROR,
    }
)

T = TypeVar("T")

#: Whether an error has named all members of a group, or none of a larger group that was divided into this one.
_Kind = Literal["any", "named", "narrowed"]


class _Group(NamedTuple, Generic[T]):
    members: list[T]
    kind: _Kind


class ChannelErrorBisector(Generic[T]):
    """Groups of suspects that remain to be probed. Not thread-safe."""

    def __init__(self) -> None:
        self.active = False  # True while suspects are probed and nothing else may be published
        self.overdue = False  # whether the channel is given up because the probed group is not confirmed
        self._groups: list[_Group[T]] = []  # a stack: the next group to probe is last
        self._kind: _Kind = "any"  # the kind of the probed group
        self._cleared: list[T] = []

    def closed(
        self, unsettled: Sequence[T], unwritten: Sequence[T] = (), named: Sequence[T] = (), *, crashed: bool = False
    ) -> list[T]:
        """Return the known culprits of an error that closed the channel.

        Args:
            unsettled: The publishes on the channel, in order. The culprit is among them.
            unwritten: The publishes of the probed group that were not written.
            named: The publishes of both groups that the text of the error may name, in this order. Empty if there are
                none.
            crashed: Whether the error is an INTERNAL_ERROR, which a single publish must provoke twice.
        """
        kind, self._kind = self._kind, "any"
        if not unsettled:
            self._push(unwritten, kind)
            return []
        everyone = [*unsettled, *unwritten]
        probed_again = crashed and kind == "any"
        culprits = [] if probed_again else self._culprits(kind, unsettled, everyone, named)
        if culprits:
            first, last = everyone.index(culprits[0]), everyone.index(culprits[-1])
            self._push(everyone[last + 1 :])
            self._push(everyone[:first])
        elif named:
            first = everyone.index(named[0])
            those = set(map(id, named))
            self._push(named, "named")
            self._push([one for one in everyone[first:] if id(one) not in those])
            self._push(everyone[:first])
        else:
            self._push(unwritten, kind)
            size = 1 if kind == "narrowed" else isqrt(len(unsettled))
            for start in reversed(range(0, len(unsettled), size)):
                self._push(unsettled[start : start + size], "narrowed")
        return culprits

    def interrupted(self, unsettled: Sequence[T], unwritten: Sequence[T] = ()) -> None:
        """Probe the group again after a loss that blames no publish, unless it is overdue.

        Args:
            unsettled: The publishes on the channel, in order.
            unwritten: The publishes of the probed group that were not written.
        """
        if self.overdue:
            self._cleared += unsettled
            self._push(unwritten, self._kind)
        else:
            self._push([*unsettled, *unwritten], self._kind)

    def innocent(self, publications: Sequence[T]) -> None:
        """Publish provisional publishes again, before the next group."""
        self._push(publications)

    def next_group(self) -> list[T]:
        """Return the group to publish alone, until it is settled or the channel is lost.

        If no suspects remain, the bisector is idle, and the group has the cleared publishes, which need not be alone.
        """
        self.overdue = False
        if self._groups:
            members, self._kind = self._groups.pop()
            return members
        self.active = False
        self._kind = "any"
        cleared, self._cleared = self._cleared, []
        return cleared

    def _culprits(self, kind: _Kind, unsettled: Sequence[T], everyone: list[T], named: Sequence[T]) -> list[T]:
        if kind == "named" and len(named) == len(everyone):
            return everyone
        if len(unsettled) == 1:
            return list(unsettled)
        on_channel = set(map(id, unsettled))
        of_these = [one for one in named if id(one) in on_channel]
        return of_these if len(of_these) == 1 else []

    def _push(self, group: Sequence[T], kind: _Kind = "any") -> None:
        if group:
            self.active = True
            self._groups.append(_Group(list(group), kind))


P = TypeVar("P", bound=Publication)

_CUT = "..."
_CUT_FROM = 240  # the bytes above which a text may have been cut; a character that was cut through is also missing
_CARBON_COPIES = ("CC", "BCC")
_DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"


def named_by(reply: BrokerReply, publications: Iterable[P]) -> list[P]:
    """Return the publishes that the text of the broker may name, in order."""
    return [one for one in publications if _is_named(reply, one)]


def processed(lost: Sequence[P], named: Sequence[P]) -> int:
    """Return the number of publishes on a closed channel that may be processed.

    The broker processes a channel in order, so neither the culprit nor the publishes after it were processed. The last
    named publish is the culprit or came after it.
    """
    if len(lost) == 1:
        return 0
    those = set(map(id, named))
    return next((place for place in reversed(range(len(lost))) if id(lost[place]) in those), len(lost))


def _is_named(reply: BrokerReply, publication: Publication) -> bool:
    text = reply.text
    cut = text.endswith(_CUT) and len(text.encode("utf-8", "surrogateescape")) > _CUT_FROM
    try:
        for phrase in _phrases(reply.code, publication):
            if phrase.startswith(text.removesuffix(_CUT)) if cut else text.startswith(phrase):
                return True
    except Exception:  # noqa: BLE001 -- a damaged message, or a user's own: the broker got something else
        return False
    return False


def _phrases(code: int, publication: Publication) -> Iterator[str]:
    """Yield the beginnings of the broker's possible error texts for a publish."""
    exchange = str.__str__(publication.exchange)  # a member of an enum is another text in an f-string
    match code:
        case ReplyCode.NOT_FOUND:
            yield f"NOT_FOUND - no exchange '{exchange}' in vhost '"
        case ReplyCode.ACCESS_REFUSED:
            yield f"ACCESS_REFUSED - write access to exchange '{exchange or 'amq.default'}' in vhost '"
            yield f"ACCESS_REFUSED - cannot publish to internal exchange '{exchange}' in vhost '"
            for key in _routing_keys(publication):
                yield f"ACCESS_REFUSED - write access to topic '{key}' in exchange '{exchange}' in vhost '"
        case ReplyCode.PRECONDITION_FAILED:
            yield f"PRECONDITION_FAILED - message size {publication.size} is larger than "
            encoded = publication.message.encoded_properties
            if encoded is not None:
                yield from _of_properties(Properties(encoded))


def _routing_keys(publication: Publication) -> Iterator[object]:
    """Yield all routing keys of a publish: the broker checks those of CC and BCC, too."""
    yield str.__str__(publication.routing_key)
    encoded = publication.message.encoded_properties
    if encoded is not None and may_copy(encoded):
        headers = Properties(encoded).headers
        for name in _CARBON_COPIES:
            keys = headers.get(name)
            if isinstance(keys, list):
                yield from keys


def _of_properties(properties: Properties) -> Iterator[str]:
    yield f"PRECONDITION_FAILED - invalid expiration '{properties.expiration}': "
    yield f"PRECONDITION_FAILED - user_id property set to '{properties.user_id}' but "
    if properties.reply_to == _DIRECT_REPLY_TO:  # it needs a consumer on the same channel
        yield "PRECONDITION_FAILED - fast reply consumer does not exist"
    for name in _CARBON_COPIES:
        if name in properties.header_names() and not isinstance(properties.headers[name], list):
            yield f'PRECONDITION_FAILED - invalid message: {{unacceptable_type_in_header,"{name}",'
