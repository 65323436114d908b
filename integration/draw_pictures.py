"""``make pictures``: draw the pictures in the manual from real runs.

They show a trace, probes, tokens, failing fast, alerts and dead letters. Each run has a broker in a container. The
trace is drawn from the exported spans, the answers of the probes from the output of the command line, the tokens and
publishes from the measured times. The alerts are a page of Prometheus. The dead letters are on the page for them;
they are published with the headers of consumers, because they have to be days old.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import tenacity

mpl.use("agg")

from matplotlib import pyplot as plt
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from PIL import Image
from prometheus_client import CollectorRegistry

from integration.support.browser import chromium, served
from integration.support.monitored import MonitoredShop
from integration.support.prometheus import Prometheus
from integration.support.tokens import CONF, Issuer
from reliable_mq import Consumer, Message, PublishDisconnected, Publisher, Queue, RetryPolicy, Tracing
from reliable_mq.core import headers
from reliable_mq.health import HealthServer
from reliable_mq.monitoring.alerts import AlertSettings, rules
from reliable_mq.testing import RabbitMQ, VirtualHost, remove_leftovers
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from opentelemetry.sdk.trace import ReadableSpan

    from reliable_mq import Delivery
    from reliable_mq.settings import Credentials

IMAGES = Path(__file__).parents[1] / "docs" / "_static"
ORDERS = Queue("orders")
GOOD, BAD, PLAIN, PALE = "#37872d", "#c4162a", "#3274d9", "#8e8e8e"
PALETTE = 64
COLUMNS = 110  # of a terminal
LIFETIME = 10.0  # seconds of a token
RENEWALS = 4
PAUSE = 0.1  # seconds between two publishes
ALL_FAILED = "5 of 5 attempts failed"
BEFORE, DEAD, AFTER = 4.0, 5.0, 4.0  # seconds before, during and after the outage


def main() -> int:
    """Run everything and draw the pictures."""
    remove_leftovers()
    with RabbitMQ() as broker:
        draw_trace(trace(broker.url))
        answers, calls = outage(broker)
    draw_answers(answers)
    draw_calls(calls)
    draw_tokens(*tokens())
    show_alerts()
    show_dead_letters()
    return 0


def save(figure: Any, name: str) -> None:
    """Write a figure into the manual."""
    file = IMAGES / f"{name}.png"
    figure.savefig(file, dpi=90)
    plt.close(figure)
    reduce(file)


def reduce(file: Path) -> None:
    """Reduce a picture to the colours that it needs."""
    Image.open(file).convert("RGB").quantize(PALETTE).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size // 1000} kB", file=sys.stderr)


def plain(axes: Axes) -> None:
    """Remove lines that carry no data."""
    axes.tick_params(labelsize=8, length=2)
    axes.grid(linewidth=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# The trace of an order


def trace(url: str) -> list[ReadableSpan]:
    """Return the spans of an order whose first attempt fails, and of its request."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(tracer_provider=provider)
    handled = threading.Event()

    def handle(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise ConnectionError("the payment service did not answer")
        handled.set()

    with (
        Publisher(url, topology=[ORDERS], tracing=tracing) as publisher,
        Consumer(url, ORDERS, handle, retry=RetryPolicy(3, delays=(0.1,)), tracing=tracing),
    ):
        publisher.connect()
        publisher.publish(Message.json({"order": 0}), routing_key=ORDERS.name)
        wait_until(handled.is_set, timeout=60, what="the first order")
        handled.clear()
        wait_until(lambda: len(exporter.get_finished_spans()) >= 6, timeout=60, what="its spans")
        exporter.clear()
        with provider.get_tracer("shop").start_as_current_span("POST /orders"):
            publisher.publish(Message.json({"order": 1}), routing_key=ORDERS.name)
        wait_until(handled.is_set, timeout=60, what="the second order")
    return sorted(exporter.get_finished_spans(), key=lambda span: (span.start_time or 0, span.name.startswith("send")))


def draw_trace(spans: Sequence[ReadableSpan]) -> None:
    """Draw each span as a bar below its parent, its events as marks."""
    figure, axes = plt.subplots(figsize=(10, 0.42 * len(spans) + 0.9))
    begin = min(span.start_time or 0 for span in spans)
    end = max(span.end_time or 0 for span in spans)
    full = (end - begin) / 1e6
    for row, span in enumerate(spans):
        at, long = ((span.start_time or 0) - begin) / 1e6, ((span.end_time or 0) - (span.start_time or 0)) / 1e6
        attributes = span.attributes or {}
        outcome = attributes.get("reliable_mq.outcome")
        color = BAD if outcome == "failed" else PALE if outcome is None else GOOD
        axes.barh(row, max(long, full / 400), left=at, height=0.55, color=color)
        for event in span.events:
            axes.plot((event.timestamp - begin) / 1e6, row, "|", color="black", markersize=9)
        told = [f"{long:.1f} ms", *([str(outcome)] if outcome else [])]
        told += [f"{name.removeprefix('reliable_mq.')} {attributes[name]!s}" for name in _TOLD if name in attributes]
        right = at + long > full * 0.6
        text = ", ".join(told)
        place = at - full * 0.008 if right else max(at + long, at + full / 400) + full * 0.008
        axes.text(place, row, text, fontsize=7.5, va="center", ha="right" if right else "left")
    axes.set_yticks(range(len(spans)), [span.name for span in spans])
    axes.invert_yaxis()
    axes.set_xlim(-full * 0.01, full * 1.02)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} ms")
    axes.set_title(f"trace {spans[0].context.trace_id:032x}" if spans[0].context else "", fontsize=9, loc="left")
    plain(axes)
    figure.tight_layout()
    save(figure, "trace")


_TOLD = ("reliable_mq.attempt", "reliable_mq.attempts", "error.type")


# The probes and the publishes of a program whose broker dies


@dataclass
class Call:
    """A publish: its times in seconds since the start."""

    began: float
    seconds: float = 0.0
    refused: bool = False


def outage(broker: RabbitMQ) -> tuple[list[str], dict[str, list[Call]]]:
    """Kill the broker for some seconds; return the probes' answers and the publishes.

    The publishes are by option.
    """
    answers: list[str] = []
    clock, over, began = threading.Event(), threading.Event(), time.monotonic()
    calls: dict[str, list[Call]] = {"wait": [], "raise": []}
    soon = tenacity.wait_exponential(multiplier=0.1, max=1.0)

    def publish(publisher: Publisher, into: list[Call]) -> None:
        while not over.wait(PAUSE):
            call = Call(time.monotonic() - began)
            try:
                publisher.submit(Message(b"{}"), routing_key=ORDERS.name).add_done_callback(partial(ended, call))
            except PublishDisconnected:
                call.refused = True
                ended(call)
            into.append(call)

    def ended(call: Call, _: object = None) -> None:
        call.seconds = time.monotonic() - began - call.began

    with (
        Publisher(broker.url, topology=[ORDERS], name="shop", reconnect_wait=soon) as waiting,
        Publisher(
            broker.url, topology=[ORDERS], name="checkout", on_disconnected="raise", reconnect_wait=soon
        ) as failing,
        Consumer(broker.url, ORDERS, lambda _: None, name="billing", reconnect_wait=soon) as consumer,
    ):
        for publisher in (waiting, failing):
            publisher.publish(Message(b"{}"), routing_key=ORDERS.name)
        with HealthServer(waiting, consumer, port=0) as server:
            wait_until(lambda: consumer.health().ready, timeout=60, what="the consumer")
            threads = [
                threading.Thread(target=publish, args=(publisher, calls[name]))
                for publisher, name in ((waiting, "wait"), (failing, "raise"))
            ]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            clock.wait(BEFORE)
            answers += asked(server.url, "/readyz")
            broker.kill()
            wait_until(lambda: not consumer.health().ready, timeout=60, what="the loss")
            clock.wait(DEAD / 2)
            answers += ["", "$ docker kill rabbitmq", *asked(server.url, "/readyz"), *asked(server.url, "/livez")]
            clock.wait(DEAD / 2)
            broker.start()
            wait_until(lambda: waiting.connected and consumer.health().ready, timeout=60, what="the return")
            clock.wait(AFTER)
            over.set()
            for thread in threads:
                thread.join()
            for publisher in (waiting, failing):
                publisher.flush()
    return answers, calls


def asked(url: str, path: str) -> list[str]:
    """Return a probe command and its output."""
    command = [sys.executable, "-m", "reliable_mq.cli", "health", f"{url}{path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    shown = url.rpartition(":")[2]
    told = (done.stdout + done.stderr).replace(shown, "8080").splitlines()
    folded = [part for line in told for part in textwrap.wrap(line, COLUMNS, subsequent_indent="    ")]
    return [f"$ reliable-mq health http://127.0.0.1:8080{path}; echo $?", *folded, str(done.returncode)]


def draw_answers(lines: Sequence[str]) -> None:
    """Draw the lines of a terminal."""
    tall = 0.19 * len(lines) + 0.3
    figure = plt.figure(figsize=(COLUMNS * 0.0685 + 0.3, tall), facecolor="#1c1f24")
    for number, line in enumerate(lines):
        color = "#f2f2f2" if line.startswith("$") else "#c9ced6"
        at = 1 - (0.25 + 0.19 * number) / tall
        if line in ("0", "1"):
            color = "#a8d89b" if line == "0" else "#ff9c8f"
        figure.text(0.012, at, line.replace("$", r"\$"), color=color, fontsize=8, family="monospace", va="center")
    save(figure, "probes")


def draw_calls(calls: dict[str, list[Call]]) -> None:
    """Draw the duration of each publish, with each option."""
    figure, both = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, sharey=True)
    for axes, (option, found) in zip(both, calls.items(), strict=True):
        for refused, color, label in ((False, GOOD, "confirmed"), (True, BAD, "PublishDisconnected")):
            points = [(call.began, call.seconds * 1000) for call in found if call.refused is refused]
            if points:
                axes.plot(*zip(*points, strict=True), ".", color=color, markersize=5, label=label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms")
        axes.set_title(f'on_disconnected="{option}": a publish takes', fontsize=9, loc="left")
        axes.legend(fontsize=8, frameon=False, loc="upper right")
        plain(axes)
    both[-1].xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    figure.tight_layout()
    save(figure, "on-disconnected")


# Tokens that expire


def tokens() -> tuple[list[float], list[float], float]:
    """Return issue times of tokens, confirm times of messages, and the reconnects."""
    issuer, registry = Issuer(LIFETIME), CollectorRegistry()
    issued: list[float] = []
    confirmed: list[float] = []

    def credentials() -> Credentials:
        issued.append(time.monotonic())
        return issuer.credentials()

    clock = threading.Event()
    with RabbitMQ(conf=CONF, files=issuer.files) as broker:
        url = broker.url.replace("guest:guest@", "")
        with Publisher(url, topology=[ORDERS], credentials=credentials, name="shop", registry=registry) as publisher:
            while len(issued) <= RENEWALS or time.monotonic() < issued[-1] + LIFETIME / 2:
                publisher.publish(Message(b"{}"), routing_key=ORDERS.name)
                confirmed.append(time.monotonic())
                clock.wait(PAUSE)
            reconnects = registry.get_sample_value("reliable_mq_publisher_reconnects_total", {"publisher": "shop"})
    begin = issued[0]
    return [at - begin for at in issued], [at - begin for at in confirmed], reconnects or 0.0


def draw_tokens(issued: Sequence[float], confirmed: Sequence[float], reconnects: float) -> None:
    """Draw the life of each token, and the messages confirmed during it."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 3.8), sharex=True, height_ratios=(2, 1))
    end = confirmed[-1]
    for number, at in enumerate(issued):
        until = issued[number + 1] if number + 1 < len(issued) else end
        above.barh(number, LIFETIME, left=at, height=0.6, color="#d5e3f7")
        above.barh(number, until - at, left=at, height=0.6, color=PLAIN)
        above.plot((at + LIFETIME,) * 2, (number - 0.3, number + 0.3), color=BAD)
    above.set_yticks(range(len(issued)), [f"token {number + 1}" for number in range(len(issued))])
    above.invert_yaxis()
    above.set_title(
        f"tokens of {LIFETIME:.0f} s: dark while in use, pale until they expire; one connection, "
        f"{reconnects:.0f} reconnects",
        fontsize=9,
        loc="left",
    )
    below.hist(confirmed, bins=range(int(end) + 1), color=GOOD, rwidth=0.9)
    below.set_title("messages confirmed in each second", fontsize=9, loc="left")
    below.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    for axes in (above, below):
        plain(axes)
    figure.tight_layout()
    save(figure, "tokens")


# Alerts of a shop whose broker dies


def show_alerts() -> None:
    """Take a picture of the Prometheus page while alerts fire."""
    settings = AlertSettings(hold="5s", window="2m", max_age="10s")  # short, because the broker is dead for seconds
    with (
        tempfile.TemporaryDirectory() as directory,
        RabbitMQ() as broker,
        MonitoredShop(broker.url, Path(directory), rate=50, failing=0.05) as shop,
        Prometheus(Path(directory), {"shop": [shop.address]}, rules=rules(settings)) as prometheus,
        chromium() as browser,
    ):
        wait_until(lambda: "ReliableMQDeadLetters" in prometheus.firing(), timeout=120, what="dead letters")
        broker.kill()
        wait_until(lambda: "ReliableMQPublisherDisconnected" in prometheus.firing(), timeout=120, what="the outage")
        page = browser.new_page(viewport={"width": 900, "height": 1000})
        page.goto(prometheus.page("alerts"))
        page.wait_for_load_state("networkidle")
        page.get_by_text(directory).first.evaluate(
            "(it, path) => it.innerText = it.innerText.replace(path, '')", f"{directory}/"
        )
        file = IMAGES / "alerts.png"
        page.screenshot(path=file, full_page=True)
        broker.start()
    reduce(file)


# The page for dead letters


class Cause(NamedTuple):
    """A cause of dead letters.

    Attributes:
        count: number of orders.
        exception: class and text of the last attempt's exception; empty for none.
        hours: the time until now in which the orders died.
    """

    count: int
    exception: tuple[str, str] | tuple[()]
    reason: str
    attempts: int
    hours: float


CAUSES = (
    Cause(142, ("shop.payment.GatewayTimeout", "no answer from https://pay.example within 30 s"), ALL_FAILED, 5, 48),
    Cause(40, ("shop.payment.CardDeclined", "the bank declined the card"), ALL_FAILED, 5, 66),
    Cause(17, ("sqlalchemy.exc.OperationalError", "the database is in recovery mode"), ALL_FAILED, 5, 70),
    Cause(15, (), "the customer is gone", 1, 24),
)


def show_dead_letters() -> None:
    """Take a picture of the page for dead letters in a browser."""
    dead = f"{ORDERS.name}.dead"
    file = IMAGES / "dead-letters.png"
    with RabbitMQ() as broker, chromium() as browser:
        virtual_host = VirtualHost(broker, "shop")
        virtual_host.create()
        with Publisher(virtual_host.url, topology=[ORDERS]) as publisher:
            assert publisher.publish_many(letters(), routing_key=dead).ok
        with served(virtual_host.url, [dead], allow_changes=True) as address:
            page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
            page.goto(f"{address}/letters?queue={dead}")
            page.locator("table.letters").wait_for()
            page.screenshot(path=file)
    reduce(file)


def letters() -> list[Message]:
    """Return the dead letters of all causes, the oldest first."""
    now = datetime.now(UTC)
    died = [
        (now - timedelta(hours=cause.hours * (number + 1) / cause.count), cause)
        for cause in CAUSES
        for number in range(cause.count)
    ]
    return [
        Message.json(
            {"order": 10_000 + number, "customer": f"customer-{number % 97}", "amount": "129.90", "currency": "EUR"},
            message_id=f"order-{10_000 + number}",
            headers={
                headers.FORMAT: headers.FORMAT_VERSION,
                headers.ORIGINAL_QUEUE: ORDERS.name,
                headers.ATTEMPTS: cause.attempts,
                headers.DEAD_LETTER_REASON: cause.reason,
                headers.LAST_FAILURE: at,
                **dict(zip((headers.EXCEPTION_TYPE, headers.EXCEPTION_MESSAGE), cause.exception, strict=False)),
            },
        )
        for number, (at, cause) in enumerate(sorted(died))
    ]


if __name__ == "__main__":
    sys.exit(main())
