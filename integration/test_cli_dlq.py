"""``reliable-mq dlq`` as a shell uses it, on both lines, and killed replays."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest

from integration.support.command_line import run_cli, start_cli
from reliable_mq import Message, Publisher, Queue
from reliable_mq.core import headers
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.testing import Audit, FaultProxy, FaultProxyFactory, VirtualHost

ORDERS = Queue("orders")
DEAD = "orders.dead"


def publish(vhost: VirtualHost, count: int) -> list[Message]:
    """Publish dead letters as a consumer would, every tenth with a timeout.

    The others have an error.
    """
    letters = [
        Message(
            f"order {number}".encode(),
            message_id=f"id-{number}",
            headers={
                headers.FORMAT: 1,
                headers.ORIGINAL_QUEUE: "orders",
                headers.DEAD_LETTER_REASON: "5 of 5 attempts failed",
                headers.EXCEPTION_TYPE: "shop.PaymentTimeout" if number % 10 == 0 else "ValueError",
                headers.EXCEPTION_MESSAGE: f"[red]no\\n {number}",
                headers.ATTEMPTS: 5,
                "shop": "north",
                "[/evil]": 0,
                "\x1b]0;evil\x07": False,
            },
        )
        for number in range(count)
    ]
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        assert publisher.publish_many(letters, routing_key=DEAD).ok
    return letters


def dlq(command: str, vhost: VirtualHost, *arguments: str, status: int = 0, stdin: bytes = b"") -> tuple[str, str]:
    done = run_cli("dlq", command, vhost.url, *arguments, stdin=stdin)
    assert done.returncode == status, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def ready(vhost: VirtualHost, queue: str) -> int:
    with vhost.connect() as connection:
        count: int = connection.channel().queue_declare(queue, passive=True).method.message_count
        return count


def hold_after(count: int, proxy: FaultProxy) -> None:
    """Hold confirms once more than `count` messages were sent to their queue.

    The proxy wakes this call. A poll of the queue would take a busy machine longer than the replay takes for the rest.
    """
    proxy.wait_for(
        lambda: proxy.seen("basic.publish", "to_broker") > count, timeout=60, what=f"more than {count} replayed"
    )
    proxy.hold_confirms()


def test_dead_letters_are_listed_shown_and_counted(any_vhost: VirtualHost) -> None:
    publish(any_vhost, 30)
    listed, progress = dlq("list", any_vhost, DEAD, "--limit", "12")
    assert progress == ""
    assert "12 shown; 30 messages in orders.dead" in listed
    assert "shop.PaymentTimeout: [red]no\\n 0" in listed  # no markup, and no character that moves a cursor
    rows = [
        json.loads(line) for line in dlq("list", any_vhost, DEAD, "--json", "--exception", "*Timeout")[0].splitlines()
    ]
    assert sorted(row["message_id"] for row in rows) == ["id-0", "id-10", "id-20"]
    assert rows[0]["queue"] == "orders"
    shown, _ = dlq("show", any_vhost, DEAD, "--message-id", "id-7")
    for expected in (
        "id-7",
        "ValueError",
        "5 of 5 attempts failed",
        "header shop",
        "north",
        "order 7",
        "header [/evil]",
    ):
        assert expected in shown
    assert "\x1b" not in shown
    assert dlq("show", any_vhost, DEAD, "--message-id", "no", status=1)[0] == "no such message in orders.dead\n"
    counted = json.loads(dlq("stats", any_vhost, DEAD, "--json")[0])
    assert (counted["messages"], counted["by_cause"]) == (30, {"ValueError": 27, "shop.PaymentTimeout": 3})
    assert counted["by_age"]["unknown"] == 30
    table, _ = dlq("stats", any_vhost, DEAD, "--header", "shop=north")
    assert "30 dead letters" in table
    assert any_vhost.live_counts()[DEAD] == 30


def test_chosen_dead_letters_are_replayed(any_vhost: VirtualHost) -> None:
    publish(any_vhost, 30)
    _, dry = dlq("replay", any_vhost, DEAD, "--exception", "PaymentTimeout", "--dry-run")
    assert dry == "3 of 30 would be replayed\n"
    _, told = dlq("replay", any_vhost, DEAD, "--exception", "PaymentTimeout")
    if any_vhost.broker.version.startswith("4.0."):
        assert told.startswith("3 of 30 replayed; 3 had been delivered before, by a browse or a replay")
    else:
        assert told == "3 of 30 replayed\n"
    _, told = dlq("replay", any_vhost, DEAD, "--limit", "1", "--to", "nowhere", status=1)
    assert "312 NO_ROUTE" in told
    assert "failed, and stay" in told
    counts = any_vhost.live_counts()
    assert (counts["orders"], counts[DEAD]) == (3, 27)


def test_a_purge_asks(vhost: VirtualHost) -> None:
    publish(vhost, 5)
    _, asked = dlq("purge", vhost, DEAD, stdin=b"n\n", status=1)
    assert "orders.dead holds 5 messages. Delete all permanently? [y/N]" in asked
    assert dlq("purge", vhost, DEAD, "--message-id", "id-3", stdin=b"y\n")[1].endswith("1 deleted\n")
    assert dlq("purge", vhost, DEAD, "--yes")[1] == "4 deleted\n"
    assert vhost.live_counts()[DEAD] == 0


def test_an_export_to_a_file_is_imported_elsewhere(vhost: VirtualHost, tmp_path: Path) -> None:
    publish(vhost, 5)
    file = tmp_path / "dead.jsonl"
    dlq("export", vhost, DEAD, str(file))
    to_stdout, _ = dlq("export", vhost, DEAD, "--limit", "2")
    assert len(to_stdout.splitlines()) == 2
    _, told = dlq("import", vhost, "orders", str(file))
    assert told == "5 of 5 messages confirmed\n"
    _, told = dlq("import", vhost, "orders", status=1, stdin=b'{"body": "x"}\nnothing\n')
    assert told == "line 2: not JSON: Expecting value: line 1 column 1 (char 0)\n1 of 2 messages confirmed\n"
    counts = vhost.live_counts()
    assert (counts["orders"], counts[DEAD]) == (6, 5)


def test_an_export_that_fails_leaves_the_file_of_an_earlier_one(vhost: VirtualHost, tmp_path: Path) -> None:
    """The file may be the only copy. The export fails without a broker, or without the queue."""
    publish(vhost, 3)
    file = tmp_path / "dead.jsonl"
    dlq("export", vhost, DEAD, str(file))
    before = file.read_bytes()
    assert before.count(b"\n") == 3
    assert run_cli("dlq", "export", "amqp://guest:guest@127.0.0.1:1", DEAD, str(file)).returncode == 1
    dlq("export", vhost, "missing", str(file), status=1)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["dead.jsonl"]
    dlq("export", vhost, DEAD, str(file), "--limit", "2")
    assert file.read_bytes().count(b"\n") == 2
    assert dlq("export", vhost, DEAD, "-")[0].count("\n") == 3
    assert "is a directory" in dlq("export", vhost, DEAD, str(tmp_path), status=2)[1]


def test_an_export_that_fails_in_the_middle_leaves_the_file(
    vhost: VirtualHost, tmp_path: Path, fault_proxy: FaultProxyFactory
) -> None:
    """The queue is deleted while its messages arrive."""
    proxy = fault_proxy(vhost.url)
    publish(vhost, 1000)
    file = tmp_path / "dead.jsonl"
    file.write_bytes(b"earlier\n")
    proxy.throttle(50_000)
    exporting = start_cli("dlq", "export", proxy.url, DEAD, str(file))
    try:
        wait_until(lambda: any(part.stat().st_size for part in tmp_path.glob(".*")), timeout=60, what="a first part")
        with vhost.connect() as connection:
            connection.channel().queue_delete(DEAD)
        proxy.heal()
        _, errors = exporting.communicate(timeout=60)
    finally:
        exporting.kill()
    assert exporting.returncode == 1, errors
    assert DEAD.encode() in errors
    assert file.read_bytes() == b"earlier\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_cut_off_dlq_export_is_quiet_and_keeps_every_message(vhost: VirtualHost) -> None:
    """`dlq export | head -1`: the status is that of a tool ended by SIGPIPE."""
    publish(vhost, 1000)
    with start_cli("dlq", "export", vhost.url, DEAD) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr.read() == b""
    wait_until(lambda: ready(vhost, DEAD) == 1000, timeout=30, what="everything requeued")


def test_a_wrong_command_line_says_what_is_wrong(vhost: VirtualHost) -> None:
    for arguments, expected in (
        (["--older-than", "soon"], "must be a number followed by s, m, h, d or w"),
        (["--header", "x"], "takes NAME=VALUE"),
        (["--exchange", "x"], "go together"),
        (["--idempotency", "nothing:at-all"], "No module named 'nothing'"),
    ):
        assert expected in " ".join(dlq("replay", vhost, DEAD, *arguments, status=2)[1].replace("│", " ").split())
    assert "no queue 'missing'" in dlq("list", vhost, "missing", status=1)[1]


def test_the_attempts_that_a_store_counts_are_reset(
    vhost: VirtualHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is given by its Python name, relative to the working directory."""
    publish(vhost, 1)
    (tmp_path / "shopstore.py").write_text(
        "class Store:\n"
        "    def reset_many(self, keys):\n"
        "        print('reset', *keys, flush=True)\n"
        "        return [True for _ in keys]\n"
        "store = Store()\n"
    )
    monkeypatch.chdir(tmp_path)
    given = ("--idempotency", "shopstore:store")
    done, told = dlq("replay", vhost, DEAD, *given)
    assert done == f"reset /{vhost.name}|orders|id-0\n"
    assert told == "1 of 1 replayed\n"
    publish(vhost, 1)
    done, _ = dlq("replay", vhost, DEAD, *given, "--idempotency-namespace", "shop")
    assert done == "reset shop|orders|id-0\n"


def test_a_replay_that_is_killed_goes_on_with_the_next(
    any_vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """After two SIGKILLs nothing is lost.

    Messages published and not acked are duplicated, at most a batch per kill.
    """
    proxy = fault_proxy(any_vhost.url)
    letters = publish(any_vhost, 800)
    for letter in letters:
        checker.attempted(letter.message_id)
        checker.confirmed(letter.message_id)
    for already in (50, 250):
        # At this rate, each kill happens before all delivered messages are replayed.
        replaying = start_cli("dlq", "replay", proxy.url, DEAD, "--rate", "300")
        try:
            hold_after(already, proxy)  # so that no kill happens between two batches, without a possible duplicate
            proxy.wait_for(lambda: proxy.held_confirms > 0, timeout=30)
        finally:
            replaying.send_signal(signal.SIGKILL)
            replaying.communicate()
        proxy.release_confirms()
    wait_until(lambda: ready(any_vhost, DEAD) == any_vhost.live_counts()[DEAD], timeout=30, what="the rest requeued")
    _, told = dlq("replay", any_vhost, DEAD)
    assert "replayed" in told
    assert any_vhost.live_counts()[DEAD] == 0
    checker.drain(any_vhost, ["orders"])
    balance = checker.close()
    assert len(balance.duplicated) <= 2 * 200
    assert ("delivered before" if any_vhost.broker.version.startswith("4.0.") else "possible duplicates") in told


def test_a_replay_whose_connections_are_closed_goes_on_by_itself(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """Both connections are closed repeatedly, and the result is the same. Duplicates are reported."""
    proxy = fault_proxy(vhost.url)
    letters = publish(vhost, 500)
    for letter in letters:
        checker.attempted(letter.message_id)
        checker.confirmed(letter.message_id)
    replaying = start_cli("dlq", "replay", proxy.url, DEAD, "--rate", "150")
    closed = 0
    for already in (50, 250):
        hold_after(already, proxy)  # the replay cannot end before its connections are found
        closed += vhost.close_connections()
        proxy.release_confirms()
    _, errors = replaying.communicate(timeout=60)
    assert replaying.returncode == 0, errors
    assert closed >= 2
    assert vhost.live_counts()[DEAD] == 0
    checker.drain(vhost, ["orders"])
    duplicated = checker.close().duplicated
    sent_again = re.search(rb"perhaps at the target twice: (\d+)", errors)
    assert sent_again, errors
    assert 0 < len(duplicated) <= int(sent_again[1])
