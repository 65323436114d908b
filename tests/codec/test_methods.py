"""The methods of a channel on the wire, compared with pika's encoder and decoder."""

from __future__ import annotations

from typing import Any

import pytest
from pamqp import commands
from pamqp import frame as pamqp_frame
from pika import frame as pika_frame
from pika import spec

from reliable_mq.codec import CodecError, methods
from reliable_mq.errors import ConfigurationError

CHANNEL = 7
ARGUMENTS = {"x-queue-type": "quorum", "x-delivery-limit": -1, "x-raw": b"\xff"}


def decoded(data: bytes) -> Any:
    size, frame = pika_frame.decode_frame(data)
    assert size == len(data)
    assert frame.channel_number == CHANNEL
    return frame.method


def encoded(method: Any) -> bytes:
    return bytes(pika_frame.Method(CHANNEL, method).marshal())


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (
            methods.DeclareQueue("naïve (queue)", arguments=ARGUMENTS),
            spec.Queue.Declare(queue="naïve (queue)", durable=True, arguments=ARGUMENTS),
        ),
        (
            methods.DeclareQueue("q", durable=False, exclusive=True, auto_delete=True),
            spec.Queue.Declare(queue="q", exclusive=True, auto_delete=True, arguments={}),
        ),
        (methods.CheckExchange("e"), spec.Exchange.Declare(exchange="e", passive=True, arguments={})),
        (methods.CheckQueue("q"), spec.Queue.Declare(queue="q", passive=True, arguments={})),
        (methods.DeleteQueue("q"), spec.Queue.Delete(queue="q")),
        (
            methods.DeclareExchange(
                "e", "topic", auto_delete=True, internal=True, arguments={"alternate-exchange": "a"}
            ),
            spec.Exchange.Declare(
                exchange="e",
                type="topic",
                durable=True,
                auto_delete=True,
                internal=True,
                arguments={"alternate-exchange": "a"},
            ),
        ),
        (
            methods.Bind("queue", "q", "e", "key", {"x-match": "all"}),
            spec.Queue.Bind(queue="q", exchange="e", routing_key="key", arguments={"x-match": "all"}),
        ),
        (
            methods.Bind("exchange", "to", "from"),
            spec.Exchange.Bind(destination="to", source="from", routing_key="", arguments={}),
        ),
        (methods.ConfirmSelect(), spec.Confirm.Select()),
        (methods.SetPrefetch(300), spec.Basic.Qos(prefetch_count=300)),
        (
            methods.Consume("q", "tag", automatic_ack=True, exclusive=True, arguments={"x-priority": 3}),
            spec.Basic.Consume(queue="q", consumer_tag="tag", no_ack=True, exclusive=True, arguments={"x-priority": 3}),
        ),
        (methods.Cancel("tag"), spec.Basic.Cancel(consumer_tag="tag")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_is_encoded_so_that_pika_reads_it(step: methods.Step, expected: Any) -> None:
    data, (answer,) = methods.encode_steps(CHANNEL, [step])
    found = decoded(data)
    assert type(found) is type(expected)
    assert vars(found) == vars(expected)
    assert answer == methods.method_of(
        encoded(
            {  # pika's reply for each step
                "Declare": spec.Queue.DeclareOk
                if isinstance(expected, spec.Queue.Declare)
                else spec.Exchange.DeclareOk,
                "Delete": spec.Queue.DeleteOk,
                "Bind": spec.Queue.BindOk if isinstance(expected, spec.Queue.Bind) else spec.Exchange.BindOk,
                "Select": spec.Confirm.SelectOk,
                "Qos": spec.Basic.QosOk,
                "Consume": spec.Basic.ConsumeOk,
                "Cancel": spec.Basic.CancelOk,
            }[type(expected).__name__](**_arguments_of_reply(expected))
        )
    )


def _arguments_of_reply(method: Any) -> dict[str, object]:
    if isinstance(method, spec.Queue.Declare):
        return {"queue": "q", "message_count": 0, "consumer_count": 0}
    if isinstance(method, spec.Queue.Delete):
        return {"message_count": 0}
    return {"consumer_tag": "t"} if isinstance(method, spec.Basic.Consume | spec.Basic.Cancel) else {}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (methods.DeclareQueue("q" * 256), "queue"),
        (methods.DeclareQueue("q", arguments={"x": object()}), "x"),
        (methods.SetPrefetch(65536), "prefetch"),
        (methods.SetPrefetch(-1), "prefetch"),
        (methods.Cancel("t\0"), "consumer_tag"),
    ],
)
def test_what_cannot_be_encoded_is_named(step: methods.Step, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        methods.encode_steps(CHANNEL, [step])


def test_replies_are_what_steps_are_answered_with() -> None:
    state = methods.decode_reply(encoded(spec.Queue.DeclareOk(queue="é(", message_count=5, consumer_count=2)))
    assert state == methods.QueueState("é(", 5, 2)
    assert methods.decode_reply(encoded(spec.Basic.ConsumeOk(consumer_tag="tag"))) == "tag"
    assert methods.decode_reply(encoded(spec.Confirm.SelectOk())) is None


def test_what_the_broker_says_by_itself() -> None:
    assert methods.decode_text(encoded(spec.Connection.Blocked(reason="low on memory"))) == "low on memory"
    assert methods.decode_text(encoded(spec.Basic.Cancel(consumer_tag="tag", nowait=True))) == "tag"
    close = spec.Channel.Close(reply_code=404, reply_text="NOT_FOUND", class_id=60, method_id=40)
    assert methods.method_of(encoded(close)) == methods.CHANNEL_CLOSED
    assert methods.decode_close(encoded(close)) == (404, "NOT_FOUND", (60, 40))


def test_opening_and_closing() -> None:
    assert isinstance(decoded(methods.encode_channel_open(CHANNEL)), spec.Channel.Open)
    close = decoded(methods.encode_channel_close(CHANNEL))
    assert (type(close), close.reply_code) == (spec.Channel.Close, 200)
    assert isinstance(decoded(methods.encode_channel_close_ok(CHANNEL)), spec.Channel.CloseOk)


def test_another_token_is_sent_on_channel_0() -> None:
    """pika does not know this method, but pamqp reads it.

    A token may be longer than a short string.
    """
    token = "häder." + "x" * 5000
    _, channel, method = pamqp_frame.unmarshal(methods.encode_update_secret(token, "the token expires"))
    assert channel == 0
    assert isinstance(method, commands.Connection.UpdateSecret)
    assert (method.new_secret, method.reason) == (token, "the token expires")
    answer = pamqp_frame.marshal(commands.Connection.UpdateSecretOk(), 0)
    assert methods.method_of(answer) == methods.CONNECTION_SECRET_UPDATED


def test_a_frame_without_a_method_has_none() -> None:
    assert methods.method_of(b"\x08\0\0\0\0\0\0\xce") is None
    assert methods.method_of(b"\x01\0\0\0\0\0\0\xce") is None


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        ((2047, 131072, 60), (100, 8192, 60)),
        ((0, 0, 0), (100, 8192, 0)),
        ((50, 4096, 1), (50, 4096, 1)),
    ],
)
def test_limits_are_lowered_to_ours(offered: tuple[int, int, int], expected: tuple[int, int, int]) -> None:
    channel_max, frame_max, heartbeat = offered
    tune = spec.Connection.Tune(channel_max=channel_max, frame_max=frame_max, heartbeat=heartbeat)
    data, found = methods.negotiated(encoded(tune), channel_max=100, frame_max=8192)
    assert found == expected
    read = decoded(data)
    assert (read.channel_max, read.frame_max, read.heartbeat) == expected


def truncated(method: Any, size: int) -> bytes:
    data = encoded(method)[: 7 + size]
    return data[:3] + size.to_bytes(4, "big") + data[7:] + b"\xce"


@pytest.mark.parametrize("size", range(4, 14))
def test_a_truncated_method_is_an_error_and_no_crash(size: int) -> None:
    with pytest.raises(CodecError):
        methods.decode_reply(truncated(spec.Queue.DeclareOk(queue="queue", message_count=1, consumer_count=1), size))
    with pytest.raises(CodecError):
        methods.decode_close(
            truncated(spec.Channel.Close(reply_code=404, reply_text="NOT_FOUND", class_id=0, method_id=0), size)
        )
    with pytest.raises(CodecError):
        methods.decode_close(
            truncated(spec.Channel.Close(reply_code=404, reply_text="", class_id=60, method_id=40), size - 3)
        )
    if size < 12:
        with pytest.raises(CodecError):
            methods.negotiated(
                truncated(spec.Connection.Tune(channel_max=1, frame_max=1, heartbeat=1), size),
                channel_max=1,
                frame_max=1,
            )


def test_steps_are_encoded_in_one_piece() -> None:
    steps = [methods.CheckQueue("one"), methods.DeclareExchange("two")]
    frames, answers = methods.encode_steps(CHANNEL, steps)
    each = [methods.encode_steps(CHANNEL, [step]) for step in steps]
    assert frames == b"".join(frame for frame, _ in each)
    assert answers == [answer for _, (answer,) in each]


def test_a_step_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(ConfigurationError, match="CheckQueue cannot be sent: queue"):
        methods.encode_steps(CHANNEL, [methods.CheckQueue("one"), methods.CheckQueue("q" * 256)])
