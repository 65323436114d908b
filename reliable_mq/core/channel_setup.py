"""The set-up of a channel, as generators of steps.

A generator yields one step at a time and receives the reply of the broker. If the broker closes the channel over a
step, `StepRefused` is thrown at that ``yield``. An exception raised by the generator ends the attempt. When the
generator returns, the channel is ready.

Invariants:

- One step is outstanding at a time, or one pipeline of steps, which the broker answers in order. So a refusal belongs
  to the step that was yielded last, or to the first unanswered step of the pipeline.
- If a declaration differs from the existing queue or exchange, the two are compared argument by argument (`compare`)
  before the error is raised. This happens only during a set-up, since each step may cost the channel. A declaration
  that was refused on a channel in use is compared at the next set-up.
- A quorum queue or stream counts as new (`core.new_queues`) before it is declared, unless a check has shown that the
  broker has it.
- A refusal is raised as an error of this package, which names the step. `core.reconnect.is_permanent` derives from the
  error whether another attempt can help.
- Nothing here selects transactions. The broker forbids a channel that is both transactional and confirming.
- Prefetch is set per consumer. RabbitMQ 4.3 refuses a channel-wide prefetch.

AMQP does not return the arguments of a queue or an exchange. The broker's refusal of a differing declaration names one
argument, with both values. A declaration with that argument corrected (`corrected`) is refused with the name of the
next argument, until the broker agrees.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from reliable_mq.codec.methods import (
    Bind,
    CheckExchange,
    CheckQueue,
    ConfirmSelect,
    Consume,
    DeclareExchange,
    DeclareQueue,
    DeleteQueue,
    MethodReply,
    ReplyCode,
    SetPrefetch,
    Step,
)
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.errors import BrokerUnavailable, Difference, ReliableMQError, TopologyMismatch
from reliable_mq.topology import (
    Declaration,
    Exchange,
    Queue,
    declarations,
    inequivalence_from_reply,
    mismatch_from_differences,
    mismatch_from_reply,
)
from reliable_mq.topology.arguments import REPLICATED

if TYPE_CHECKING:
    from reliable_mq.core.new_queues import NewQueueListener
    from reliable_mq.topology import Inequivalence

_PROPERTIES = frozenset({"durable", "auto_delete", "internal", "type"})
#: Arguments of a `Consume` that a stream refuses. The priority is the default of other queues.
NO_STREAM: Final = {"x-priority": 0}
_MOST_DIFFERENCES = 24  # maximum rounds of a comparison, each of which costs a channel
# RabbitMQ has no code for a queue that exists and does not run, only texts, which it cuts at 255 bytes. AMQP is up
# before the replicas of streams and quorum queues are.
_NO_REPLICA = "PRECONDITION_FAILED - stream queue '"
_AWAY = (
    "NOT_FOUND - home node '",
    "NOT_FOUND - failed to perform operation on queue '",
    "NOT_FOUND - queue '",
    _NO_REPLICA,
)
_DELAYED_RETRY = (4, 3)
# COMMAND_INVALID: an exchange type that does not exist.
_DIFFERENT = frozenset({ReplyCode.PRECONDITION_FAILED, ReplyCode.COMMAND_INVALID})
# NOT_ALLOWED: a reserved name. Other conditions pass: RESOURCE_LOCKED (the exclusive queue of a connection that is
# dying), INTERNAL_ERROR, ...
_PERMANENT = frozenset(
    {
        ReplyCode.ACCESS_REFUSED,
        ReplyCode.NOT_FOUND,
        *_DIFFERENT,
        ReplyCode.NOT_ALLOWED,
        ReplyCode.NOT_IMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server properties of the broker."""

    product: str  # "RabbitMQ"
    version: str  # as sent, e.g. "4.3.6"
    version_tuple: tuple[int, ...]  # the numbers, e.g. (4, 3, 6), for comparisons; empty if there are none
    properties: Mapping[str, object] = field(default_factory=dict, repr=False)  # all server properties

    @property
    def reported_name(self) -> str:
        """The name that the broker reports, empty if it reports none.

        It is the name of the cluster, or of the node (``rabbit@host``).
        """
        return str(self.properties.get("cluster_name", ""))

    @property
    def cluster_name(self) -> str:
        """The name that the cluster was given, empty if it was given none.

        Without a cluster name, each node reports its own name (``rabbit@host``), which changes with the node that a
        reconnect reaches.
        """
        name = self.reported_name
        return "" if "@" in name else name

    @classmethod
    def of(cls, properties: Mapping[str, object]) -> ServerInfo:
        version = printable(str(properties.get("version", "")))
        return cls(printable(str(properties.get("product", ""))), version, parse_version(version), dict(properties))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Declarations and checks that are sent together, in one round trip.

    The reply is a tuple of their replies.
    """

    steps: tuple[DeclareQueue | CheckQueue | DeclareExchange | CheckExchange | Bind | ConfirmSelect, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of a declaration from the existing queue or exchange."""

    existing: DeclareQueue | DeclareExchange | None  # the declaration that the broker accepts, if known
    differences: tuple[Difference, ...]  # in the order in which the broker named them
    ended_by: str = ""  # the code and text of the refusal that ended the search; empty if `existing` is known


StepGenerator = Generator[Step | Pipeline, Any, Any]
SetupGenerator = Generator[Step | Pipeline, Any, None]


class StepRefused(Exception):
    """The broker closed the channel or the connection over a step.

    It is thrown into generators and never reaches a user. While the connection lives, the generator of a set-up may
    continue, and the next step is carried out on a new channel.
    """

    def __init__(
        self, code: int, text: str, *, answered: tuple[MethodReply, ...] = (), connection: bool = False
    ) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text
        self.answered = answered  # the replies to the steps before the refused one in a `Pipeline`
        self.connection = connection  # whether the connection is also lost


def publisher_setup(
    topology: Iterable[Declaration], version: tuple[int, ...], listener: NewQueueListener | None = None
) -> SetupGenerator:
    """Declare `topology`, in order, and select confirms.

    The version of the broker decides which arguments are sent. The listener is notified of the quorum queues and
    streams that are made. If it is None, the set-up does not check first whether they exist.

    Raises:
        TopologyMismatch: If an existing queue or exchange differs, or a named one is missing.
        BrokerUnavailable: If the broker refused a step for another reason.
    """
    yield from _declare_all(topology, version, listener)
    yield from carry_out(ConfirmSelect())


def consumer_setup(
    queue: Queue | str,
    topology: Iterable[Declaration],
    version: tuple[int, ...],
    consume: Consume,
    *,
    prefetch: int,
    listener: NewQueueListener | None = None,
) -> SetupGenerator:
    """Carry out `pull_setup`, set the prefetch of this consumer, and consume."""
    yield from pull_setup(queue, topology, version, listener)
    yield from carry_out(SetPrefetch(prefetch))
    yield from carry_out(consume)


def pull_setup(
    queue: Queue | str,
    topology: Iterable[Declaration],
    version: tuple[int, ...],
    listener: NewQueueListener | None = None,
) -> SetupGenerator:
    """Declare `topology`, then declare the queue, or check a queue given by name.

    Raises:
        TopologyMismatch, BrokerUnavailable: For the same reasons as `publisher_setup`.
    """
    if isinstance(queue, Queue):
        yield from _declare_all([*topology, queue], version, listener)
    else:
        yield from _declare_all(topology, version, listener)
        yield from carry_out(CheckQueue(queue))


def declare(queue: Queue, version: tuple[int, ...], listener: NewQueueListener | None = None) -> SetupGenerator:
    """Declare one queue on a channel that is in use.

    The queue is not checked first, because the channel would close if it did not exist. A quorum queue or stream counts
    as new.

    Raises:
        TopologyMismatch: If the queue exists and differs.
        BrokerUnavailable: If the broker refused the declaration for another reason.
    """
    new = [queue.name] if queue.type in REPLICATED else []
    yield from _declare_new(new, listener, carry_out(_declare_queue(queue, version)))


def explain(
    queue: Queue, error: ReliableMQError, version: tuple[int, ...]
) -> Generator[Pipeline, Any, ReliableMQError]:
    """Return the error of an earlier `declare`, with every difference."""
    if not isinstance(error, TopologyMismatch):
        return error
    comparison = yield from compare(_declare_queue(queue, version))
    return _mismatch(comparison, "queue", queue.name) or error


def round_trip() -> StepGenerator:
    """Send a method that changes nothing, to get an answer.

    The channel is in use and in confirm mode.
    """
    yield Pipeline((ConfirmSelect(),))


def compare(
    declared: DeclareQueue | DeclareExchange, refused: StepRefused | None = None
) -> Generator[Pipeline, Any, Comparison]:
    """Find every argument in which an existing queue or exchange differs.

    Nothing changes on the broker. Each round declares with one more argument corrected, on its own channel. The same
    round trip checks first that the queue or exchange still exists, so that no deleted queue is created again.

    ``refused`` is the broker's refusal of the declaration, or None if it was not sent before.
    """
    kind, name = _subject(declared)
    check = CheckQueue(name) if isinstance(declared, DeclareQueue) else CheckExchange(name)
    assumed: DeclareQueue | DeclareExchange = declared
    found: dict[str, Difference] = {}
    while True:
        if refused is None:
            try:
                yield Pipeline((check, assumed))
            except StepRefused as again:
                refused = again
                if not again.answered:  # the check failed: it is gone, or its state is unknown
                    break
            else:
                return Comparison(assumed, tuple(found.values()))
        different = refused.code == ReplyCode.PRECONDITION_FAILED and not refused.connection
        inequivalence = inequivalence_from_reply(kind, name, refused.text) if different else None
        if inequivalence is None or inequivalence.argument in found or len(found) == _MOST_DIFFERENCES:
            break
        found[inequivalence.argument] = inequivalence.difference
        correction = corrected(assumed, inequivalence)
        if correction is None:
            break
        assumed, refused = correction, None
    return Comparison(None, tuple(found.values()), f"{refused.code} {refused.text}")


def corrected(
    step: DeclareQueue | DeclareExchange, inequivalence: Inequivalence
) -> DeclareQueue | DeclareExchange | None:
    """Return a refused declaration with one argument as it exists, None if unknown."""
    argument = inequivalence.argument
    if not inequivalence.is_known:
        return None
    if argument in _PROPERTIES and hasattr(step, argument):
        value = inequivalence.existing_value(getattr(step, argument))
        fields: dict[str, Any] = {argument: value}
        return None if value is None else replace(step, **fields)
    arguments = dict(step.arguments)
    declared = arguments.pop(argument, None)
    value = inequivalence.existing_value(declared)
    if type(value) is type(declared) and value == declared:  # True equals 1
        return None
    if value is not None:
        arguments[argument] = value
    return replace(step, arguments=arguments)


def carry_out(step: Step) -> StepGenerator:
    """Yield a step and return its reply, or raise the error that its refusal means."""
    try:
        return (yield step)
    except StepRefused as refused:
        raise refusal(step, refused) from refused


def refusal(step: Step, refused: StepRefused) -> ReliableMQError:
    code, text = refused.code, refused.text
    kind, name = _subject(step)
    away = is_away(refused)
    if code == ReplyCode.NOT_FOUND and kind and not away:
        if isinstance(step, CheckQueue):
            to_do = "a name alone declares nothing: create the queue first; in Python, a Queue declares it"
        else:
            to_do = "declare it in the same topology, or create it first"
        return TopologyMismatch(f"cannot {_describe(step)}: {code} {text} ({to_do})", kind=kind, name=name)
    if code in _DIFFERENT and isinstance(step, DeclareQueue | DeclareExchange):
        return mismatch_from_reply(kind, name, code, text)
    if isinstance(step, Consume) and is_a_stream(refused):
        to_do = 'give offset=, or Queue(..., type="stream")'
        return TopologyMismatch(f"queue {name!r} is a stream: {to_do}", kind=kind, name=name)
    permanent = code in _PERMANENT and not away and not in_exclusive_use(text)
    return BrokerUnavailable(f"the broker refused to {_describe(step)}: {code} {text}", permanent=permanent)


def is_away(refused: StepRefused) -> bool:
    """Return whether a queue was refused that exists and does not run at present."""
    return refused.text.startswith(_AWAY)


def is_a_stream(refused: StepRefused) -> bool:
    """Return whether a `Consume` with `NO_STREAM` was refused by a stream."""
    return refused.code == ReplyCode.PRECONDITION_FAILED and "'x-priority'" in refused.text


def in_exclusive_use(text: str) -> bool:
    """Return whether a queue was refused with 403 because of an exclusive consumer."""
    return "in exclusive use" in text


def backend_failed(text: str) -> bool:
    """Return whether a user was refused because an authorization backend failed."""
    return "', backend " in text.rpartition("' refused for user '")[2]


def reconnect_reason(code: int, text: str) -> str:
    """Return why another connection may succeed after a refusal, empty if it cannot.

    An authorization backend failed, or the token of the connection has expired: RabbitMQ 4.0 does not
    disconnect then, and refuses whatever needs a permission. Or the node has no replica of a stream, and another node
    may have one.
    """
    if code == ReplyCode.ACCESS_REFUSED and backend_failed(text):
        return f"the broker cannot check a permission: {code} {text}"
    if text.startswith(_NO_REPLICA):
        return f"the stream has no replica on this node: {code} {text}"
    return ""


def lacks_permission(code: int | None, text: str) -> bool:
    """Return whether a permission is missing, so that another attempt is refused, too."""
    return code == ReplyCode.ACCESS_REFUSED and not in_exclusive_use(text) and not reconnect_reason(code, text)


def is_missing(error: ReliableMQError) -> bool:
    """Return whether a set-up ended because a queue or an exchange does not exist."""
    cause = error.__cause__
    return isinstance(cause, StepRefused) and cause.code == ReplyCode.NOT_FOUND and not is_away(cause)


def is_out_of_reach(error: ReliableMQError) -> bool:
    """Return whether a set-up ended because a queue does not run.

    The node may only be cut off from the queue's node or leader, which other nodes reach.
    """
    cause = error.__cause__
    return isinstance(cause, StepRefused) and is_away(cause)


def parse_version(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, e.g. ``(4, 3, 0)`` for ``"4.3.0-rc.1"``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _declare_all(
    topology: Iterable[Declaration], version: tuple[int, ...], listener: NewQueueListener | None
) -> SetupGenerator:
    """Declare in two round trips: checks, then declarations."""
    declared = declarations(topology)
    steps = tuple(_declare(declaration, version) for declaration in declared)
    if not steps:
        return
    replicated = [item.name for item in declared if isinstance(item, Queue) and item.type in REPLICATED]
    missing = (yield from _missing(replicated)) if listener is not None else []
    yield from _declare_new(missing, listener, _carry_out_all(steps))


def _missing(names: list[str]) -> Generator[Pipeline, Any, list[str]]:
    """Check queues. Return those that the broker is not known to have.

    The broker closes the channel over the first missing queue, and does not answer the checks of the others. Checking
    each queue would cost a channel each, while counting an existing queue as missing only costs time.
    """
    if not names:
        return []
    try:
        yield Pipeline(tuple(map(CheckQueue, names)))
    except StepRefused as refused:
        missing = names[len(refused.answered) :]
        if refused.connection:
            raise refusal(CheckQueue(missing[0]), refused) from refused
        return missing  # also if the queue exists but is locked, for example: its declaration is refused again
    return []


def _declare_new(names: list[str], listener: NewQueueListener | None, steps: SetupGenerator) -> SetupGenerator:
    """Carry out the steps that declare these new queues."""
    if listener is None or not names:
        yield from steps
        return
    listener.begin(names)
    try:
        yield from steps
    finally:
        listener.end(names)  # even after a refusal or an abandoned wait, the queues may have been made


def _declare_queue(queue: Queue, version: tuple[int, ...]) -> DeclareQueue:
    if queue.delayed_retry is not None and version and version < _DELAYED_RETRY:
        # The broker would accept the arguments and ignore them. Rejected messages would return at once.
        raise TopologyMismatch(
            f"queue {queue.name!r} has delayed_retry, which RabbitMQ knows from 4.3 on, and this one is "
            f"{'.'.join(map(str, version))}: leave it out, and retries wait in delay queues",
            kind="queue",
            name=queue.name,
        )
    return DeclareQueue(queue.name, queue.durable, queue.exclusive, queue.auto_delete, queue.arguments_for(version))


def _declare(declaration: Declaration, version: tuple[int, ...]) -> DeclareQueue | DeclareExchange | Bind:
    if isinstance(declaration, Queue):
        return _declare_queue(declaration, version)
    if isinstance(declaration, Exchange):
        return DeclareExchange(
            declaration.name,
            declaration.type,
            declaration.durable,
            declaration.auto_delete,
            declaration.internal,
            declaration.arguments_for(version),
        )
    destination, source = declaration.destination, declaration.source
    return Bind(
        "exchange" if isinstance(destination, Exchange) else "queue",
        destination if isinstance(destination, str) else destination.name,
        source if isinstance(source, str) else source.name,
        declaration.routing_key,
        declaration.arguments,
    )


def _carry_out_all(steps: tuple[DeclareQueue | DeclareExchange | Bind, ...]) -> SetupGenerator:
    try:
        yield Pipeline(steps)
    except StepRefused as refused:
        step = steps[len(refused.answered)]
        mismatch = None
        if not isinstance(step, Bind):
            comparison = yield from compare(step, refused)
            mismatch = _mismatch(comparison, *_subject(step))
        raise mismatch or refusal(step, refused) from refused


def _mismatch(comparison: Comparison, kind: str, name: str) -> TopologyMismatch | None:
    if not comparison.differences:
        return None
    return mismatch_from_differences(kind, name, comparison.differences, more=comparison.ended_by)


def _subject(step: Step) -> tuple[str, str]:
    """Return the kind and name of a step's subject, both empty for the channel."""
    match step:
        case DeclareQueue(name=name) | CheckQueue(name=name) | DeleteQueue(name=name) | Consume(queue=name):
            return "queue", name
        case DeclareExchange(name=name) | CheckExchange(name=name):
            return "exchange", name
        case Bind(destination=name):
            return "binding", name
        case _:
            return "", ""


def _describe(step: Step) -> str:
    kind, name = _subject(step)
    match step:
        case DeclareQueue() | DeclareExchange():
            return f"declare {kind} {name!r}"
        case CheckQueue() | CheckExchange():
            return f"find {kind} {name!r}"
        case DeleteQueue():
            return f"delete {kind} {name!r}"
        case Bind():
            return f"bind {step.kind} {name!r} to exchange {step.source!r} with routing key {step.routing_key!r}"
        case ConfirmSelect():
            return "confirm publishes on this channel"
        case SetPrefetch(count=count):
            return f"set the prefetch to {count}"
        case Consume():
            return f"let us consume from {kind} {name!r}"
        case _:
            return f"cancel consumer {step.consumer_tag!r}"
