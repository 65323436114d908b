"""``reliable-mq publish`` and ``consume`` as a shell uses them, on real brokers."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from integration.support.command_line import run_cli, start_cli
from integration.support.new_queues import let_new_queues_age
from integration.support.processes import run
from integration.support.spark import bodies_of, drain
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.codec import encode_properties, join_properties
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.testing import RabbitMQ, VirtualHost

SECRET = "canary-password"


def declare(vhost: VirtualHost, name: str = "orders", **arguments: object) -> None:
    with vhost.connect() as connection:
        connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "quorum", **arguments})


def ready(vhost: VirtualHost, queue: str = "orders") -> int:
    with vhost.connect() as connection:
        count: int = connection.channel().queue_declare(queue, passive=True).method.message_count
        return count


def test_lines_go_through_a_queue_in_their_order(any_vhost: VirtualHost) -> None:
    text = b"".join(b"line %d \xff\n" % number for number in range(2000))
    published = run_cli("publish", any_vhost.url, "--queue", "orders", "--declare", stdin=text)
    assert (published.returncode, published.stdout, published.stderr) == (0, b"", b"")
    consumed = run_cli("consume", any_vhost.url, "orders", "--ack", "--count", "2000")
    assert (consumed.returncode, consumed.stderr) == (0, b"")
    assert consumed.stdout == text
    assert ready(any_vhost) == 0
    assert any_vhost.queue("orders.dead") is not None


def test_files_are_messages_or_lines(vhost: VirtualHost, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"a\nb\n")
    (tmp_path / "two").write_bytes(b"c")
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    declare(vhost)
    run_cli("publish", vhost.url, *files, "--queue", "orders", "--header", "source=test")
    run_cli("publish", vhost.url, *files, "--queue", "orders", "--lines", "--content-type", "text/plain")
    taken = run_cli("consume", vhost.url, "orders", "--ack", "--json", "--count", "5")
    lines = [json.loads(line) for line in taken.stdout.splitlines()]
    assert [line["body"] for line in lines] == ["a\nb\n", "c", "a", "b", "c"]
    assert lines[0]["headers"] == {"source": "test"}
    assert lines[2]["content_type"] == "text/plain"


FOREIGN = [
    encode_properties(Message(b"", headers={"n": 1, "nested": {"list": [1, None, "é"]}}, priority=1, expiration=3600)),
    encode_properties(Message(b"", headers={"bytes": b"\xff\0", "f": 0.1}, persistent=False)),
    join_properties({}),
    join_properties({"timestamp": (1_700_000_000_000).to_bytes(8), "delivery_mode": b"\2"}),
    join_properties({"headers": b"\0\0\0\7\1ff\x3f\x40\0\0", "message_id": b"\2id", "cluster_id": b"\1c"}),
    join_properties({"message_id": b"\2\xff\xfe", "content_type": b"\1\xfe"}),
]


def test_json_lines_copy_messages_to_a_queue_byte_for_byte(any_vhost: VirtualHost) -> None:
    """Bodies are not text; properties have no JSON form, or come from other clients."""
    bodies = [b"text \xc3\xa9 \n", b"\xff\x00\n\x80", b""]
    sent = [(body, raw) for raw in FOREIGN for body in bodies]
    with Publisher(any_vhost.url, topology=[Queue("orders", dead_letter=None)]) as publisher:
        for body, raw in sent:
            publisher.publish(Message.from_wire(body, raw), routing_key="orders")
    declare(any_vhost, "copies")
    lines = run_cli("consume", any_vhost.url, "orders", "--ack", "--json", "--count", str(len(sent)))
    assert lines.returncode == 0
    copied = run_cli("publish", any_vhost.url, "--json", "--queue", "copies", stdin=lines.stdout)
    assert (copied.returncode, copied.stderr) == (0, b"")
    with (
        Consumer(any_vhost.url, "copies", None, prefetch=100) as consumer,
        consumer.get(len(sent), timeout=10) as deliveries,
    ):
        # Of messages with the same id or none, only one is outstanding at a time, so the order may change.
        assert sorted((each.body, each.properties) for each in deliveries) == sorted(sent)


def test_input_that_breaks_off_is_named_and_confirms_are_counted(vhost: VirtualHost, tmp_path: Path) -> None:
    """The file can be opened but not read."""
    good, bad = tmp_path / "good", "/proc/self/mem"
    good.write_text('{"body": "a"}\n' * 300)
    declare(vhost)
    done = run_cli("publish", vhost.url, str(good), bad, "--queue", "orders", "--json")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().splitlines() == [
        "the input ended early: 300 of 300 messages are confirmed",
        "reliable-mq: /proc/self/mem: Input/output error",
    ]
    done = run_cli("dlq", "import", vhost.url, "orders", str(good), bad)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().splitlines() == [
        "300 of 300 messages confirmed",
        "reliable-mq: /proc/self/mem: Input/output error",
    ]
    assert ready(vhost) == 600


def test_json_lines_say_where_they_go(vhost: VirtualHost) -> None:
    declare(vhost, "a")
    declare(vhost, "b")
    lines = b'{"body": "1", "routing_key": "a"}\n{"body": "2", "routing_key": "b", "exchange": "amq.direct"}\n'
    with vhost.connect() as connection:
        connection.channel().queue_bind("b", "amq.direct", "b")
    assert run_cli("publish", vhost.url, "--json", stdin=lines).returncode == 0
    assert (ready(vhost, "a"), ready(vhost, "b")) == (1, 1)


def test_what_is_known_before_the_command_asks_is_reported_once(vhost: VirtualHost, tmp_path: Path) -> None:
    """The log does not repeat it."""
    program = tmp_path / "settled.py"
    program.write_text(
        "import sys, time\n"
        "from reliable_mq.cli import main\n"
        "from reliable_mq.sync.publisher import Publisher\n"
        "submit = Publisher.submit\n"
        "def settled(*arguments, **options):\n"
        "    confirmation = submit(*arguments, **options)\n"
        "    while not confirmation.done():\n"
        "        time.sleep(0.001)\n"
        "    return confirmation\n"
        "Publisher.submit = settled\n"
        "sys.exit(main())\n"
    )
    done = run(str(program), "publish", vhost.url, "--queue", "nowhere", given=b"x\nx\n")
    assert done.returncode == 1
    first, second, total = done.stderr.decode().splitlines()
    assert "NO_ROUTE" in first
    assert "NO_ROUTE" in second
    assert total == "2 of 2 messages were not confirmed"


def test_what_is_not_confirmed_is_reported_by_its_line(vhost: VirtualHost) -> None:
    declare(vhost)
    lines = [
        '{"body": "1", "routing_key": "orders"}',
        "\r",
        '{"body": 2}',
        '{"body": "3", "routing_key": "nowhere"}',
        '{"body": "4", "exchange": "missing"}',
        '{"body": "5", "routing_key": "' + "k" * 256 + '"}',
        '{"body": "6", "routing_key": "orders"}',
    ]
    done = run_cli("publish", vhost.url, "--json", stdin="\n".join(lines).encode())
    assert done.returncode == 1
    report = done.stderr.decode()
    for expected in (
        "line 3: body must be text",
        "line 4: message ",
        "was returned: 312 NO_ROUTE",
        "line 5: message ",
        "404 NOT_FOUND",
        "line 6: ",
        "4 of 6 messages were not confirmed",
    ):
        assert expected in report
    assert "no caller waits" not in report
    assert "line 1:" not in report
    assert "line 2:" not in report  # it is blank
    assert "line 7:" not in report
    stored = bodies_of(drain(vhost, "orders"))
    assert set(stored) == {b"1", b"6"}  # perhaps twice: line 5 closed the channel


@pytest.mark.parametrize("command", ["publish", "consume"])
def test_a_broker_that_refuses_is_one_line_without_a_password(vhost: VirtualHost, command: str) -> None:
    url = vhost.url.replace("guest:guest", f"guest:{SECRET}")
    rest = ["--queue", "q"] if command == "publish" else ["q", "--ack"]
    done = run_cli(command, url, *rest, stdin=b"x\n")
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1].startswith("reliable-mq: ")
    assert b"403 ACCESS_REFUSED" in done.stderr
    assert SECRET.encode() not in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_queue_that_does_not_exist_is_said(vhost: VirtualHost) -> None:
    done = run_cli("consume", vhost.url, "missing", "--ack")
    assert done.returncode == 1
    assert b"no queue 'missing'" in done.stderr


def test_peeking_takes_nothing(any_vhost: VirtualHost) -> None:
    declare(any_vhost)
    run_cli("publish", any_vhost.url, "--queue", "orders", stdin=b"1\n2\n3\n")
    patient = ("--timeout", "30")  # the default is one second, for which the broker may stall
    assert run_cli("consume", any_vhost.url, "orders", "--peek", "--count", "2", *patient).stdout == b"1\n2\n"
    everything = run_cli("consume", any_vhost.url, "orders", "--peek", "--count", "3", *patient)
    assert sorted(everything.stdout.split()) == [b"1", b"2", b"3"]
    by_itself = run_cli("consume", any_vhost.url, "orders", "--peek")
    assert by_itself.returncode == 0
    assert {*by_itself.stdout.split()} <= {b"1", b"2", b"3"}
    any_vhost.wait_for_messages("orders", 3)  # the broker requeues once it notices the end of the connection


def test_no_more_is_taken_than_asked_for(any_vhost: VirtualHost) -> None:
    declare(any_vhost)
    run_cli("publish", any_vhost.url, "--queue", "orders", stdin=b"x\n" * 1000)
    taken = run_cli("consume", any_vhost.url, "orders", "--ack", "--count", "300")
    assert (taken.returncode, taken.stdout) == (0, b"x\n" * 300)
    any_vhost.wait_for_messages("orders", 700)
    began = time.monotonic()
    fewer = run_cli("consume", any_vhost.url, "orders", "--ack", "--count", "701", "--timeout", "3")
    written = fewer.stdout.count(b"\n")  # not all of them if the broker stalls for the timeout
    assert (fewer.returncode, fewer.stdout) == (1, b"x\n" * written)
    assert time.monotonic() - began > 3, "it ended before the timeout"
    any_vhost.wait_for_messages("orders", 700 - written)


def test_what_nobody_reads_stays_in_the_queue(vhost: VirtualHost) -> None:
    """The pipe is closed before the first line.

    Nothing is acked, and the command does not fail.
    """
    declare(vhost)
    run_cli("publish", vhost.url, "--queue", "orders", stdin=b"x\n" * 500)
    reading, writing = os.pipe()
    os.close(reading)
    with start_cli("consume", vhost.url, "orders", "--ack", stdout=writing) as process:
        os.close(writing)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    vhost.wait_for_messages("orders", 500)


def test_head_ends_it_and_what_was_not_written_comes_back(vhost: VirtualHost) -> None:
    declare(vhost)
    line = b"x" * 1000
    run_cli("publish", vhost.url, "--queue", "orders", stdin=(line + b"\n") * 1000)
    with start_cli("consume", vhost.url, "orders", "--ack") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == line + b"\n"
        process.stdout.close()
        assert process.wait(30) == 0
    # Lost lines are those in the pipe (64 KiB) and in the command's buffer.
    wait_until(lambda: ready(vhost) >= 900, timeout=30, what="messages that came back")


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_consumer_with_all_it_wrote_acked(vhost: VirtualHost, sent: int, status: int) -> None:
    declare(vhost)
    run_cli("publish", vhost.url, "--queue", "orders", stdin=b"x\n" * 100)
    with start_cli("consume", vhost.url, "orders", "--ack") as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(100)] == [b"x\n"] * 100
        process.send_signal(sent)
        assert process.wait(30) == status
    vhost.wait_for_messages("orders", 0)


def test_ctrl_c_ends_a_publisher_and_says_how_far_it_came(vhost: VirtualHost) -> None:
    declare(vhost)
    with start_cli("publish", vhost.url, "--queue", "orders") as process:
        assert process.stdin is not None
        process.stdin.write(b"x\n" * 100)
        process.stdin.flush()
        vhost.wait_for_messages("orders", 100)
        process.send_signal(signal.SIGINT)
        _, report = process.communicate(timeout=30)
        assert process.returncode == 130
        assert report == b"interrupted: 100 of 100 messages are confirmed\n"


@pytest.mark.soak
def test_lines_ride_over_a_kill_of_the_broker(private_broker: RabbitMQ, private_vhost: VirtualHost) -> None:
    """All piped messages arrive at least once, although the broker was killed."""
    declare(private_vhost)
    let_new_queues_age()
    with start_cli("publish", private_vhost.url, "--queue", "orders") as process:
        assert process.stdin is not None
        process.stdin.writelines(b"%d\n" % number for number in range(5000))
        process.stdin.flush()
        wait_until(lambda: ready(private_vhost) > 1000, timeout=30, what="the first lines")
        private_broker.kill()
        private_broker.start()
        process.stdin.writelines(b"%d\n" % number for number in range(5000, 10000))
        _, report = process.communicate(timeout=90)
    assert process.returncode == 0, report
    assert {int(body) for body in bodies_of(drain(private_vhost, "orders"))} == set(range(10000))


def test_output_comes_as_messages_come(vhost: VirtualHost) -> None:
    """Output is not buffered: a line appears with its message."""
    declare(vhost)
    with start_cli("consume", vhost.url, "orders", "--ack") as process:
        assert process.stdout is not None
        for number in range(3):
            run_cli("publish", vhost.url, "--queue", "orders", stdin=b"%d\n" % number)
            began = time.monotonic()
            assert process.stdout.readline() == b"%d\n" % number
            assert time.monotonic() - began < 10
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
