"""The headers that this package writes, and the ids in a trace header.

The names begin with ``x-reliable-mq-`` and are reserved for this package. The headers travel in the header table of a
message. Times are AMQP timestamps (whole seconds, UTC).

====================== ========== =====================================================================================
constant               type       meaning
====================== ========== =====================================================================================
POSSIBLE_DUPLICATE     bool       published again after an unknown outcome: the broker may have the message twice
FORMAT                 int        version of the headers below, now `FORMAT_VERSION`
ATTEMPT                int        which attempt the next delivery of this message is, from 1
RETRY                  table      of a message that waits for its next attempt: how to restore it, see
                                  :mod:`reliable_mq.core.retry.retry_headers`
ATTEMPTS               int        of a dead letter: how many attempts were made at it
DEAD_LETTER_REASON     str        why it was dead-lettered
EXCEPTION_TYPE         str        class of the exception that the last attempt raised, with its module
EXCEPTION_MESSAGE      str        its text, cut
ORIGINAL_QUEUE         str        the queue that it was consumed from when it died, or that Spark's sink meant it for
ORIGINAL_EXCHANGE      str        the exchange that it was first published to
ORIGINAL_ROUTING_KEY   str        with which routing key
FIRST_FAILURE          timestamp  when an attempt first failed
LAST_FAILURE           timestamp  when an attempt last failed
CONSUMER               str        the consumer that moved it
PACKAGE_VERSION        str        the version of this package that moved it
TRACE_CONTEXT          str        the trace context of the last attempt, if that is sampled, as in W3C's ``traceparent``
ORIGINAL_CC            list[str]  its ``CC``, which would route a re-published message to those queues again
ORIGINAL_BCC           list[str]  its ``BCC``, for the same reason
ORIGINAL_USER_ID       str        its ``user_id``, which RabbitMQ accepts from its owner only
ORIGINAL_EXPIRATION    str        its ``expiration`` (milliseconds, as on the wire), which would cut a delay short
ORIGINAL_PROPERTIES    bytes      its properties, as on the wire, where they cannot be sent as such; cut to fit a frame
ORIGINAL_COLUMNS       table      of a row of Spark's that could not be sent: columns that no message can carry, as text
ORIGINAL_SIZE          int        bytes of its body, which was too large to be sent, and is cut here
====================== ========== =====================================================================================
"""

from __future__ import annotations

import re
from typing import Final

from reliable_mq.errors import ConfigurationError

PREFIX: Final = "x-reliable-mq-"

POSSIBLE_DUPLICATE: Final = "x-reliable-mq-possible-duplicate"
FORMAT: Final = "x-reliable-mq-format"
ATTEMPT: Final = "x-reliable-mq-attempt"
RETRY: Final = "x-reliable-mq-retry"
ATTEMPTS: Final = "x-reliable-mq-attempts"
DEAD_LETTER_REASON: Final = "x-reliable-mq-dead-letter-reason"
EXCEPTION_TYPE: Final = "x-reliable-mq-exception-type"
EXCEPTION_MESSAGE: Final = "x-reliable-mq-exception-message"
ORIGINAL_QUEUE: Final = "x-reliable-mq-original-queue"
ORIGINAL_EXCHANGE: Final = "x-reliable-mq-original-exchange"
ORIGINAL_ROUTING_KEY: Final = "x-reliable-mq-original-routing-key"
FIRST_FAILURE: Final = "x-reliable-mq-first-failure"
LAST_FAILURE: Final = "x-reliable-mq-last-failure"
CONSUMER: Final = "x-reliable-mq-consumer"
PACKAGE_VERSION: Final = "x-reliable-mq-package-version"
TRACE_CONTEXT: Final = "x-reliable-mq-trace-context"
ORIGINAL_CC: Final = "x-reliable-mq-original-cc"
ORIGINAL_BCC: Final = "x-reliable-mq-original-bcc"
ORIGINAL_USER_ID: Final = "x-reliable-mq-original-user-id"
ORIGINAL_EXPIRATION: Final = "x-reliable-mq-original-expiration"
ORIGINAL_PROPERTIES: Final = "x-reliable-mq-original-properties"
ORIGINAL_COLUMNS: Final = "x-reliable-mq-original-columns"
ORIGINAL_SIZE: Final = "x-reliable-mq-original-size"

#: The prefix of a header that is renamed until the message is dispatched again. The name after it is in lower case.
ORIGINAL: Final = "x-reliable-mq-original-"

#: The value of FORMAT.
FORMAT_VERSION: Final = 1


#: The trace header of W3C, ``traceparent``. As in the recommendation, an all-zero id and version ff are invalid, and
#: only versions after 00 may have more fields.
_TRACEPARENT: Final = re.compile(
    "(?!ff|00.{54})[0-9a-f]{2}-(?P<trace_id>(?!0{32})[0-9a-f]{32})-(?P<span_id>(?!0{16})[0-9a-f]{16})-[0-9a-f]{2}"
    "(?:-[!-~]{0,64})?"
)


def trace_ids(traceparent: str) -> dict[str, str] | None:
    """Return ``trace_id`` and ``span_id`` of a ``traceparent``, None if invalid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return None if found is None else found.groupdict()


def checked_traceparent(name: str, text: str) -> str:
    """Return a ``traceparent`` unchanged.

    Raises:
        ConfigurationError: If it is invalid. The message begins with ``name``.
    """
    if trace_ids(text) is None:
        raise ConfigurationError(
            f"{name} must be a W3C trace context, such as 00-TRACE-SPAN-01, not {text[:80]!r}: correct it, or give none"
        )
    return text


def wire_text(value: str) -> str | bytes:
    """Restore the bytes of text that was decoded with surrogate escapes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape")
    return value


def may_copy(properties: bytes) -> bool:
    """Return whether encoded properties, even broken ones, may have a CC or BCC."""
    return b"\x02CC" in properties or b"\x03BCC" in properties
