"""A queue to declare, with its arguments for each version of the broker."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, get_args

from reliable_mq._util.validation import SHORT_STRING_BYTES, Duration, check_flag, seconds, whole_number
from reliable_mq.errors import ConfigurationError
from reliable_mq.topology.arguments import (
    ARGUMENTS,
    DEAD_LETTER_STRATEGY,
    DLX,
    DLX_KEY,
    Arguments,
    QueueType,
    TopologyWarning,
    check_name,
    check_new_name,
    lint_arguments,
)


class DefaultDeadLetter(enum.Enum):
    """The type of `DEFAULT`, the default of `Queue.dead_letter`."""

    DEFAULT = "own"

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = DefaultDeadLetter.DEFAULT
"""A quorum queue called ``<name>.dead``, declared before the queue.

None for a stream, which has no dead letters; for a queue that goes away by itself (exclusive, auto-delete), which would
leave one behind at every run; and if the `arguments` of the user route dead letters.
"""

DEAD_SUFFIX: Final = ".dead"

_NEWEST: Final = (99,)
_OF_FIELDS: Final = tuple(argument for argument in ARGUMENTS.values() if argument.field)
_LONGEST_TTL: Final = 315_360_000  # seconds (ten years), the most that RabbitMQ accepts
_LONGEST_AGE: Final = 2**53


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue to declare.

    Args:
        name: The name, up to 255 bytes (250 with a default dead-letter queue). It must not begin with ``amq.``, which
            is reserved.
        type: The type: ``"quorum"`` (replicated, the default), ``"classic"`` or ``"stream"``.
        durable: Whether the queue survives a restart of the broker. False is only for classic queues.
        exclusive: Whether only this connection can use the queue, which is deleted with it. Only for classic queues.
        auto_delete: Whether the queue is deleted with its last consumer. Only for classic queues.
        dead_letter: The queue for messages that are rejected or expire. The default is a quorum queue named
            ``<name>.dead``, which is declared first. For a stream, for an exclusive or auto-delete queue, and if
            ``arguments`` route dead letters, there is none. Give a `Queue` to declare, the name of an existing queue,
            or None to drop the messages. A `Queue` given here is declared unchanged, with a default dead-letter queue
            unless it has ``dead_letter=None``.
        max_length: The maximum number of messages. A full queue refuses publishes (they are nacked) instead of dropping
            the oldest messages.
        max_length_bytes: The maximum total size of the bodies in bytes, with the same effect. On a stream, the oldest
            segments are dropped above this size.
        message_ttl: The time after which a message is dead-lettered, or dropped if there is no dead-letter queue, in
            seconds or as a timedelta, up to ten years. Rounded to milliseconds.
        max_age: The time after which a stream drops messages, by segments, in whole seconds or as a timedelta.
        max_priority: The highest priority, 1 to 255. Only for classic queues. A quorum queue has priorities without it:
            32 levels on RabbitMQ 4.3 and newer, two before.
        single_active_consumer: Whether only one consumer at a time gets messages.
        delayed_retry: The shortest and the longest delay of the broker's delayed retry, in seconds or as timedeltas.
            Only for quorum queues on RabbitMQ 4.3 and newer. A message whose handler failed then waits in the queue
            itself, for the shortest delay times the number of its failures so far, up to the longest delay. The delays
            of the policy and of ``RetryLater`` have no effect. The policy's cap counts failures and lost connections
            together.
        arguments: Further arguments by RabbitMQ's names. They take precedence over our defaults; None omits a default.

    Raises:
        ConfigurationError: If RabbitMQ would refuse the queue, an argument has no effect (for example because it is
            misspelt), or the options are contradictory. The message names the field. An argument that loses messages
            but may be intended causes a `TopologyWarning`.
    """

    name: str
    _: KW_ONLY
    type: QueueType = "quorum"
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    dead_letter: Queue | str | DefaultDeadLetter | None = DEFAULT
    max_length: int | None = None
    max_length_bytes: int | None = None
    message_ttl: Duration | None = None
    max_age: Duration | None = None
    max_priority: int | None = None
    single_active_consumer: bool = False
    delayed_retry: tuple[Duration, Duration] | None = None
    arguments: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_new_name("the name of a queue", self.name))
        if self.type not in get_args(QueueType):
            raise self._error("type", f"must be quorum, classic or stream, not {self.type!r}")
        object.__setattr__(self, "arguments", Arguments(f"queue {self.name!r}", self.arguments))
        self._check_flags()
        self._check_numbers()
        self._check_delayed_retry()
        self._check_dead_letter()
        self._check_arguments()
        self._lint()

    @property
    def dead_letter_queue(self) -> Queue | None:
        """The dead-letter queue that is declared before this one, if any."""
        if isinstance(self.dead_letter, Queue):
            return self.dead_letter
        return Queue(self.name + DEAD_SUFFIX, dead_letter=None) if self._has_its_own() else None

    @property
    def dead_letter_name(self) -> str | None:
        """The name of the queue that dead letters go to, whether declared here or not.

        None if there is no such queue, or if the user's `arguments` route dead letters.
        """
        if isinstance(self.dead_letter, str):
            return self.dead_letter
        queue = self.dead_letter_queue
        return None if queue is None else queue.name

    def arguments_for(self, version: tuple[int, ...]) -> dict[str, object]:
        """Return the arguments of the declaration for a broker of `version`.

        A default that the version does not know is omitted. A user's argument is always sent.
        """
        ours = {name: value for name, value in self._defaults().items() if ARGUMENTS[name].is_sent_to(version)}
        every = {**ours, **self._fields(), **self.arguments}
        return {name: value for name, value in every.items() if value is not None}

    def _defaults(self) -> dict[str, object]:
        defaults: dict[str, object] = {"x-queue-type": self.type}
        if self.type == "quorum":
            # The broker's default of 20 also counts reconnects. The retry policy limits the attempts instead.
            defaults["x-delivery-limit"] = -1
        name = self.dead_letter_name
        if name is not None:
            defaults |= {DLX: "", DLX_KEY: name}
        at_least_once = self.type == "quorum" and (name is not None or self.arguments.get(DLX) is not None)
        if at_least_once:
            defaults[DEAD_LETTER_STRATEGY] = "at-least-once"
        limited = self.type != "stream" and (self.max_length, self.max_length_bytes) != (None, None)
        if at_least_once or limited:
            # Dead-lettering at least once needs this. By default, a full queue would also drop confirmed messages.
            defaults["x-overflow"] = "reject-publish"
        return defaults

    def _fields(self) -> dict[str, object]:
        """Return the arguments of the fields that were given."""
        given: dict[str, object] = {}
        for argument in _OF_FIELDS:
            value = getattr(self, argument.field)
            if value is not None and value is not False:
                given[argument.name] = argument.encode(argument.field, value) if argument.encode else value
        return given

    def _has_its_own(self) -> bool:
        routed = DLX in self.arguments or DLX_KEY in self.arguments
        passing = self.type == "stream" or self.exclusive or self.auto_delete
        return self.dead_letter is DEFAULT and not passing and not routed

    def _check_flags(self) -> None:
        for flag in ("durable", "exclusive", "auto_delete", "single_active_consumer"):
            check_flag(f"{flag} of queue {self.name!r}", getattr(self, flag))
        for flag, needed in (("durable", True), ("exclusive", False), ("auto_delete", False)):
            if self.type != "classic" and getattr(self, flag) is not needed:
                raise self._error(flag, f'must be {needed} on a {self.type} queue; or give type="classic"')

    def _check_numbers(self) -> None:
        for argument in _OF_FIELDS:
            value = getattr(self, argument.field)
            if argument.field_range is not None and value is not None:
                whole_number(f"{argument.field} of queue {self.name!r}", value, *argument.field_range)
        if self.message_ttl is not None:
            lifetime = seconds("message_ttl", self.message_ttl)
            if lifetime > _LONGEST_TTL:
                raise self._error("message_ttl", f"must be at most {_LONGEST_TTL} seconds (ten years)")
            object.__setattr__(self, "message_ttl", lifetime)
        if self.max_age is not None:
            age = seconds("max_age", self.max_age, positive=True)
            if age != int(age) or age > _LONGEST_AGE:
                raise self._error("max_age", f"must be whole seconds, not {self.max_age!r}")
            object.__setattr__(self, "max_age", age)

    def _check_delayed_retry(self) -> None:
        given: object = self.delayed_retry
        if given is None:
            return
        if self.type != "quorum":
            raise self._error("delayed_retry", "is for quorum queues")
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise self._error("delayed_retry", f"must be the shortest and the longest delay, not {given!r}")
        shortest, longest = (seconds("delayed_retry", delay, positive=True) for delay in given)
        if shortest > longest:
            raise self._error("delayed_retry", f"has a shortest delay above its longest: {given!r}")
        object.__setattr__(self, "delayed_retry", (shortest, longest))

    def _check_dead_letter(self) -> None:
        dead_letter: object = self.dead_letter
        if isinstance(dead_letter, str):
            object.__setattr__(self, "dead_letter", check_name(f"dead_letter of queue {self.name!r}", dead_letter))
        elif dead_letter is not None and not isinstance(dead_letter, Queue | DefaultDeadLetter):
            raise self._error("dead_letter", f"must be a Queue, a name or None, not {type(dead_letter).__name__}")
        if self._has_its_own() and len(self.name.encode()) + len(DEAD_SUFFIX) > SHORT_STRING_BYTES:
            raise self._error("name", f"leaves no room for {DEAD_SUFFIX!r}: shorten it, or give dead_letter")
        if isinstance(dead_letter, Queue | str) and self.type == "stream":
            raise self._error("dead_letter", "must be left out on a stream, which has no dead letters")
        if self.dead_letter_name == self.name:
            raise self._error("dead_letter", "is the queue itself: what is rejected would come back forever")

    def _check_arguments(self) -> None:
        given = self._fields()
        for argument in sorted(given.keys() & self.arguments.keys()):
            raise self._error(f"argument {argument}", f"is given twice: also as {ARGUMENTS[argument].field}")
        sent = {argument for argument, value in {**given, **self.arguments}.items() if value is not None}
        for argument in sorted(sent & ARGUMENTS.keys()):
            if self.type not in ARGUMENTS[argument].kinds:
                field_name = ARGUMENTS[argument].field if argument in given else f"argument {argument}"
                raise self._error(field_name, f"is refused by RabbitMQ on a {self.type} queue")
        if self.arguments.get("x-queue-type", self.type) != self.type:
            raise self._error("argument x-queue-type", f"contradicts type={self.type!r}: give type alone")
        for argument in (DLX, DLX_KEY):
            if argument in self.arguments and self.dead_letter is not DEFAULT:
                raise self._error(f"argument {argument}", "is given beside dead_letter: leave one of them out")
        declared = self.arguments_for(_NEWEST)
        if DLX_KEY in declared and DLX not in declared:
            raise self._error(f"argument {DLX_KEY}", f"needs {DLX} beside it")
        if declared.get(DEAD_LETTER_STRATEGY) == "at-least-once" and declared.get("x-overflow") != "reject-publish":
            # In this case, RabbitMQ dead-letters at most once, and only its log reports that.
            raise self._error(
                "argument x-overflow",
                f"must be reject-publish, or dead-lettering is not at least once; if that is meant, also give "
                f"{DEAD_LETTER_STRATEGY}=at-most-once",
            )

    def _lint(self) -> None:
        for problem in lint_arguments(self.arguments_for(_NEWEST), self.type):
            if problem.certain:
                raise self._error(f"argument {problem.argument}", f"{problem.text} ({problem.fix})")
            text = f"argument {problem.argument} of queue {self.name!r} {problem.text}: {problem.fix}"
            warnings.warn(text, TopologyWarning, stacklevel=4)  # the line that makes the queue

    def _error(self, what: str, text: str) -> ConfigurationError:
        return ConfigurationError(f"{what} of queue {self.name!r} {text}")
