"""The alert rules for Prometheus.

Each alert is declared once in this module. `rules` writes all alerts as a rule file. An alert has one of three kinds of
conditions:

- an age above ``max_age``: the alert fires at once, because an age already measures a duration;
- a state (blocked, not connected): the alert fires after the state has lasted for ``hold``;
- an event (a rejected message, a dead letter), shown by a counter that grew within ``window``, or that is new and above
  0: the alert fires at once, and ends when ``window`` has passed without another event.

Invariant: the name of an alert is a heading of the runbook, ``docs/guides/runbook.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from reliable_mq.errors import ConfigurationError

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_DURATION: Final = re.compile(
    r"(?:(\d+)y)?(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?", re.ASCII
)
_LONGEST: Final = 292 * _UNITS["y"]  # Prometheus counts nanoseconds in 63 bits
_IN_URL: Final = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]*")  # the characters of RFC 3986
_REMEMBERED: Final = "1h"  # before the window, so that a gap in the samples is no event; a day is costly to evaluate
_LONG_HOLD: Final = "2m"  # deliveries that wait for the idempotency store fail again after a minute at most
_HANGS_AFTER: Final = 10  # seconds without an answer
_OPTIONS: Final = {"hold": "--for", "window": "--window", "max_age": "--max-age"}  # the command-line options


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """The options of ``reliable-mq alerts``, with times like ``1h30m``.

    Raises:
        ConfigurationError: If one of the times is not a positive duration that Prometheus accepts, or the URL holds a
            character that no URL has.
    """

    hold: str = "2m"  # for which a state must last before its alert fires
    window: str = "15m"  # in which events count
    max_age: str = "1m"  # of the oldest outstanding message, and of the oldest message in an outbox
    manual_url: str = ""  # where this manual is served; links to the runbook begin with it

    def __post_init__(self) -> None:
        for name in ("hold", "window", "max_age"):
            _seconds(name, getattr(self, name))
        if not _IN_URL.fullmatch(self.manual_url):  # in the rules, it may be a template, or no YAML
            raise ConfigurationError(
                f"manual_url (--manual-url) holds a character that no URL has: percent-encode it in {self.manual_url!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert rule.

    Attributes:
        name: The name of the alert and of its section in the runbook.
        severity: ``"critical"`` if messages wait or are lost, else ``"warning"``.
        expression: The condition in PromQL. ``HOLD``, ``WINDOW`` and ``MAX_AGE`` stand for the settings, ``LONG_HOLD``
            for ``hold`` or two minutes, whichever is longer.
        lasting: Whether the condition must last for ``hold``.
        summary: A summary of one line.
        description: The explanation of the alert.
    """

    name: str
    severity: Literal["critical", "warning"]
    expression: str
    lasting: bool = False
    summary: str
    description: str

    def expression_for(self, settings: AlertSettings) -> str:
        values = {
            "HOLD": settings.hold,
            "LONG_HOLD": max(settings.hold, _LONG_HOLD, key=partial(_seconds, "hold")),
            "WINDOW": settings.window,
            "MAX_AGE": f"{_seconds('max_age', settings.max_age):g}",
        }
        return re.sub(r"\b(HOLD|LONG_HOLD|WINDOW|MAX_AGE)\b", lambda found: values[found[1]], self.expression)

    def runbook_url(self, settings: AlertSettings) -> str:
        base = settings.manual_url and settings.manual_url.rstrip("/") + "/"
        return f"{base}guides/runbook.html#{self.name.lower()}"


def _grew(*counters: str) -> str:
    """Return the condition that one of the counters grew within the window.

    ``increase`` needs two samples, and does not see events before the first scrape of an instance. So the counter is
    also compared with its last value before the window.
    """
    return "\nor\n".join(
        f"increase({counter}[WINDOW]) > 0\n"
        f"or\n"
        f"{counter} > 0 unless {counter} == last_over_time({counter}[{_REMEMBERED}] offset WINDOW)"
        for counter in counters
    )


_PUBLISHER: Final = "publisher {{ $labels.publisher }} of {{ $labels.job }} ({{ $labels.instance }})"
_CONSUMER: Final = (
    "consumer {{ $labels.consumer }} of queue {{ $labels.queue }}, {{ $labels.job }} ({{ $labels.instance }})"
)

ALERTS: Final = (
    Alert(
        name="ReliableMQOldestOutstanding",
        severity="critical",
        expression="reliable_mq_publisher_outstanding_oldest_age_seconds > MAX_AGE",
        summary=f"A message has been unconfirmed for {{{{ $value | humanizeDuration }}}}: {_PUBLISHER}",
        description="The broker does not confirm this message, and the publisher keeps trying.",
    ),
    Alert(
        name="ReliableMQNothingConfirmed",
        severity="critical",
        expression=(
            "min_over_time(reliable_mq_publisher_outstanding[HOLD]) > 0\n"
            "and on (job, instance, publisher)\n"
            'increase(reliable_mq_publisher_settled_total{outcome="confirmed"}[HOLD]) == 0'
        ),
        lasting=True,
        summary=f"Messages are outstanding and none is confirmed: {_PUBLISHER}",
        description="The broker takes no messages of this publisher, or does not confirm them.",
    ),
    Alert(
        name="ReliableMQMessagesNotConfirmed",
        severity="warning",
        expression=_grew('reliable_mq_publisher_settled_total{outcome!="confirmed"}'),
        summary=f"About {{{{ $value | humanize }}}} messages were {{{{ $labels.outcome }}}}: {_PUBLISHER}",
        description="The publisher has given these messages up and has raised an error to its caller for each.",
    ),
    Alert(
        name="ReliableMQPublishingBlocked",
        severity="warning",
        expression="reliable_mq_publisher_blocked > 0",
        lasting=True,
        summary=f"The broker blocks publishing: {_PUBLISHER}",
        description="The broker has a memory or disk alarm. Messages wait in the publisher.",
    ),
    Alert(
        name="ReliableMQPublisherDisconnected",
        severity="warning",
        expression="reliable_mq_publisher_connected == 0",
        lasting=True,
        summary=f"Not connected: {_PUBLISHER}",
        description="The publisher cannot reach a broker, and keeps trying. Its log names the reason.",
    ),
    Alert(
        name="ReliableMQOldestInOutbox",
        severity="critical",
        expression="reliable_mq_outbox_oldest_age_seconds > MAX_AGE",
        summary=f"A message has been in the outbox for {{{{ $value | humanizeDuration }}}}: {_PUBLISHER}",
        description="The relay does not publish its rows: no broker, no relay, or too few of them.",
    ),
    Alert(
        name="ReliableMQOutboxFailing",
        severity="critical",
        expression=_grew('reliable_mq_outbox_failures_total{what="store"}'),
        summary=f"About {{{{ $value | humanize }}}} messages were not stored in the outbox: {_PUBLISHER}",
        description="The outbox fails or hangs. The publisher has raised an error to its caller for each message.",
    ),
    Alert(
        name="ReliableMQRelayFailing",
        severity="critical",
        expression=(
            'max without (what) (increase(reliable_mq_outbox_failures_total{what="relay"}[HOLD])) > 0\n'
            "or\n"
            f"reliable_mq_outbox_unanswered_seconds > {_HANGS_AFTER}"
        ),
        lasting=True,
        summary=f"The relay of the outbox fails or hangs: {_PUBLISHER}",
        description=(
            "It cannot read the outbox or publish its rows, and keeps trying. Its log names the reason. If it logs "
            "nothing, the outbox does not answer."
        ),
    ),
    Alert(
        name="ReliableMQOutboxSetAside",
        severity="warning",
        expression="reliable_mq_outbox_set_aside > 0",
        summary=f"{{{{ $value }}}} messages in the outbox are set aside: {_PUBLISHER}",
        description="The broker returned or refused these messages. They stay unpublished until an operator decides.",
    ),
    Alert(
        name="ReliableMQRejected",
        severity="critical",
        expression=_grew("reliable_mq_consumer_rejected_total"),
        summary=f"About {{{{ $value | humanize }}}} messages were rejected: {_CONSUMER}",
        description="Their stream or a dead-letter exchange keeps them, or the broker has dropped them.",
    ),
    Alert(
        name="ReliableMQDeadLetters",
        severity="warning",
        expression=_grew("reliable_mq_consumer_dead_lettered_total"),
        summary=f"About {{{{ $value | humanize }}}} messages were dead-lettered: {_CONSUMER}",
        description="Handlers have given these messages up.",
    ),
    Alert(
        name="ReliableMQDeadLetterQueueGrows",
        severity="warning",
        expression=(  # of several pods, the lowest count is the latest one of a queue that shrinks
            'min by (job, queue) (reliable_mq_queue_messages{role="dead_letters"})\n'
            '> min by (job, queue) (min_over_time(reliable_mq_queue_messages{role="dead_letters"}[WINDOW]))\n'
            "or\n"  # several virtual hosts have a queue of this name
            "max by (job, queue) (\n"
            '  reliable_mq_queue_messages{role="dead_letters"}\n'
            '  > min_over_time(reliable_mq_queue_messages{role="dead_letters"}[WINDOW])\n'
            ")"
        ),
        summary="{{ $value }} messages are in dead-letter queue {{ $labels.queue }}, of {{ $labels.job }}",
        description="More than before: RabbitMQ or a consumer has dead-lettered messages. Needs QueueDepths.",
    ),
    Alert(
        name="ReliableMQConsumerPaused",
        severity="critical",
        expression="reliable_mq_consumer_paused > 0\nor\n" + _grew("reliable_mq_consumer_pauses_total"),
        summary=f"The kill switch has paused a consumer: {_CONSUMER}",
        description="Nearly all handlers fail. Messages stay in the queue.",
    ),
    Alert(
        name="ReliableMQConsumerDisconnected",
        severity="warning",
        expression="reliable_mq_consumer_connected == 0",
        lasting=True,
        summary=f"Not subscribed: {_CONSUMER}",
        description="The consumer cannot reach a broker or its queue, and keeps trying. Its log names the reason.",
    ),
    Alert(
        name="ReliableMQHandlersOverdue",
        severity="warning",
        expression=_grew("reliable_mq_consumer_overdue_total"),
        summary=f"Handlers come close to the consumer timeout of the broker: {_CONSUMER}",
        description="A delivery that is unacked for longer is taken back and delivered again.",
    ),
    Alert(
        name="ReliableMQStoreFailing",
        severity="warning",
        expression="increase(reliable_mq_consumer_store_failures_total[LONG_HOLD]) > 0",
        lasting=True,
        summary=f"The idempotency store fails: {_CONSUMER}",
        description="Deliveries that the store cannot claim or complete are not acked, and come again.",
    ),
    Alert(
        name="ReliableMQTokensNotRenewed",
        severity="warning",
        expression=(
            _grew(
                'reliable_mq_publisher_token_renewals_total{outcome!="accepted"}',
                'reliable_mq_consumer_token_renewals_total{outcome!="accepted"}',
            )
        ),
        summary=(
            "A token was not renewed ({{ $labels.outcome }}): "
            "{{ $labels.publisher }}{{ $labels.consumer }} of {{ $labels.job }} ({{ $labels.instance }})"
        ),
        description="The broker has refused the next token, or the credentials callback has failed.",
    ),
    Alert(
        name="ReliableMQEventLoopStalled",
        severity="warning",
        expression=(
            _grew(
                "reliable_mq_publisher_event_loop_stalled_seconds_total",
                "reliable_mq_consumer_event_loop_stalled_seconds_total",
            )
        ),
        summary=(
            "The event loop stalled for {{ $value | humanizeDuration }}: "
            "{{ $labels.publisher }}{{ $labels.consumer }} of {{ $labels.job }} ({{ $labels.instance }})"
        ),
        description="Something that blocks runs on the event loop. No heartbeat is sent meanwhile.",
    ),
)
"""Every alert, in the order of the runbook."""


def rules(settings: AlertSettings | None = None) -> str:
    """Return a Prometheus rule file with all alerts, as YAML."""
    return "\n".join(_lines(settings or AlertSettings())) + "\n"


def _lines(settings: AlertSettings) -> Iterator[str]:
    yield "groups:"
    yield "  - name: reliable_mq"
    yield "    rules:"
    for alert in ALERTS:
        yield f"      - alert: {alert.name}"
        yield "        expr: |-"
        yield from (f"          {line}" for line in alert.expression_for(settings).splitlines())
        if alert.lasting:
            yield f"        for: {settings.hold}"
        yield "        labels:"
        yield f"          severity: {alert.severity}"
        yield "        annotations:"
        for name, text in (
            ("summary", alert.summary),
            ("description", alert.description),
            ("runbook_url", alert.runbook_url(settings)),
        ):
            yield f"          {name}: {json.dumps(text)}"  # a JSON string is also a YAML string


def _seconds(name: str, duration: str) -> float:
    found = _DURATION.fullmatch(duration)
    total = sum(
        int(count) * _UNITS[unit]
        for count, unit in zip(found.groups("0") if found else (), reversed(_UNITS), strict=False)
    )
    if not 0 < total <= _LONGEST:
        raise ConfigurationError(
            f"{name} ({_OPTIONS[name]}) must be a duration of Prometheus above zero, up to 292y, such as 90s, "
            f"not {duration!r}"
        )
    return total
