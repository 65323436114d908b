"""Damaged inputs for the decoders: the reader, properties, header tables.

Inputs are valid ones that are damaged at random: bytes are changed, cut out, doubled, or inserted from another input. A
plain run takes some thousand inputs, the same every time. A soak takes a million, from a separate seed. The figures are
printed at the end. `RELIABLE_MQ_FUZZ_INPUTS` sets another number. An input that fails is printed, to be added to
`FOUND`.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pika
import pytest
from pika import spec

from integration.support.seeds import seeds, soaking
from reliable_mq.codec import (
    CodecError,
    Properties,
    decode_table,
    encode_table,
    join_properties,
    plain_message_id,
    rewrite_properties,
    split_properties,
)
from tests.codec.test_reader import HEARTBEAT, PROTOCOL_HEADER, Recorder, Sink, ack, content, deliver, method

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS: Final = int(os.environ.get("RELIABLE_MQ_FUZZ_INPUTS", "1000000" if soaking() else "3000"))
SEED: Final = seeds()[0]

TABLES = [
    encode_table(table)
    for table in (
        {},
        {"a": 1, "b": "text", "c": True, "d": None},
        {"x-death": [{"count": 3, "queue": "orders", "reason": "rejected"}], "CC": ["a", "b"]},
        {"nested": {"deep": {"deeper": [1.5, b"bytes", {"k": -(2**40)}]}}},
        {"x-reliable-mq-format": 1, "x-reliable-mq-attempt": 2, "x-delivery-count": 19},
    )
]
PROPERTIES = [
    b"".join(pika.BasicProperties(**given).encode())
    for given in (
        {},
        {"message_id": "m1", "delivery_mode": 2, "headers": {"a": 1}},
        {"content_type": "text/plain", "correlation_id": "c", "priority": 9, "timestamp": 1_700_000_000, "app_id": "é"},
        {"headers": {"t": [1, {"n": "x"}]}, "expiration": "1000", "reply_to": "r", "type": "t", "user_id": "guest"},
    )
]
STREAMS = [
    deliver(1, b"body") + ack(1) + deliver(2, b"a", b"", b"b"),
    ack(5, multiple=True) + HEARTBEAT + method(1, spec.Basic.Nack(3)) + method(2, spec.Channel.OpenOk()),
    b"".join(content(1, spec.Basic.Return(312, "NO_ROUTE", "e", "k"), pika.BasicProperties(message_id="m"), [b"ab"])),
    b"".join(content(1, spec.Basic.GetOk(4, False, "e", "k", 7), pika.BasicProperties(headers={"a": 1}), [b"a", b"b"])),
    deliver(1, b"x" * 60, channel=2) + method(1, spec.Channel.CloseOk()) + method(1, spec.Basic.GetEmpty()),
    PROTOCOL_HEADER + method(1, spec.Channel.Close(406, "PRECONDITION_FAILED", 60, 40)),
]
READ: Final = (
    "headers",
    "message_id",
    "content_type",
    "correlation_id",
    "priority",
    "timestamp",
    "expiration",
    "delivery_mode",
    "app_id",
)
# Inputs that have failed before, by target. Every run includes them.
FOUND: dict[str, list[bytes]] = {"reader": [], "properties": [], "table": []}
INTERESTING = [
    b"\x00",
    b"\xff",
    b"\xce",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"AMQP",
    b"F",
    b"A",
]


def damaged(rng: random.Random, inputs: list[bytes]) -> bytes:
    """Return one of the inputs, damaged in one to four places."""
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 30)]
            case 3:
                some = rng.choice(INTERESTING)
                data[at : at + len(some)] = some
            case 4:
                data[at:at] = rng.randbytes(rng.randint(1, 6))
            case _:
                other = rng.choice(inputs)
                start = rng.randint(0, len(other))
                data[at : at + rng.randint(0, 8)] = other[start : start + rng.randint(1, 40)]
    return bytes(data)


def read_table(data: bytes, _rng: random.Random) -> str:
    """Return whether a table was read or refused."""
    data = struct.pack(">I", max(0, len(data) - 4)) + data[4:]
    try:
        decode_table(data)
    except CodecError:
        return "refused"
    return "read"


def read_properties(data: bytes, _rng: random.Random) -> str:
    """Return whether properties were read or refused.

    Segments are joined to the same bytes.
    """
    view = Properties(data)
    for name in READ:
        with suppress(CodecError):
            getattr(view, name)
    plain_message_id(data)
    try:
        segments = split_properties(data)
    except CodecError:
        return "refused"
    assert join_properties(segments) == data
    assert rewrite_properties(data) == data
    return "read"


def events_of(chunks: list[bytes]) -> tuple[list[Any], bool]:
    recorder = Recorder()
    recorder.reader.agree(4096)
    recorder.reader.attach(1, Sink(recorder, 1))
    recorder.reader.attach(2, Sink(recorder, 2, 50))
    for chunk in chunks:
        try:
            recorder.reader.feed(chunk)
        except CodecError:
            return recorder.events, True
    return recorder.events, False


def read_stream(data: bytes, rng: random.Random) -> str:
    """Return whether a stream was read or refused.

    The chunks of the stream change nothing.
    """
    whole = events_of([data])
    first, second = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    assert events_of([data[:first], data[first:second], data[second:]]) == whole
    return "refused" if whole[1] else "read"


TARGETS: dict[str, tuple[Callable[[bytes, random.Random], str], list[bytes]]] = {
    "reader": (read_stream, STREAMS),
    "properties": (read_properties, PROPERTIES),
    "table": (read_table, TABLES),
}


@pytest.mark.timeout(60 + INPUTS // 500)
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_read_or_refused(target: str, report: Callable[[str], None]) -> None:
    """Decoding raises nothing but a codec error, and is fast."""
    read, inputs = TARGETS[target]
    rng = random.Random(f"{SEED} {target}")
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    began = time.monotonic()
    data = b""
    try:
        for data in FOUND[target]:
            outcomes[read(data, rng)] += 1
        for _ in range(INPUTS):
            data = damaged(rng, inputs)
            since = time.process_time()
            outcomes[read(data, rng)] += 1
            slowest = max(slowest, time.process_time() - since)
    except Exception:
        print(f"seed {SEED}; to be kept among FOUND[{target!r}]: {data!r}")
        raise
    took = time.monotonic() - began
    report(f"seed {SEED}, {INPUTS} inputs in {took:.0f} s, {dict(outcomes)}, slowest {slowest * 1000:.1f} ms")
    assert min(outcomes["read"], outcomes["refused"]) > INPUTS / 100, "both are met with often"
    assert slowest < 1
