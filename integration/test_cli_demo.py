"""``reliable-mq demo`` on a real broker: with and without a kill, and interrupted."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from integration.support.command_line import run_cli, start_cli

if TYPE_CHECKING:
    from reliable_mq.testing import RabbitMQ, VirtualHost


def queues(vhost: VirtualHost) -> list[str]:
    return [queue["name"] for queue in vhost.broker.management.call("GET", "queues", vhost.name)]


def test_on_a_users_own_broker_it_adds_up_and_leaves_nothing(any_vhost: VirtualHost) -> None:
    done = run_cli("demo", "--url", any_vhost.url, "--messages", "1000", "--rate", "0")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done
    assert lines[0].startswith(f"1,000 orders through RabbitMQ {any_vhost.broker.version} at ")
    assert lines[-1] == "✔ confirmed 1,000 = handled 998 + dead-lettered 2, lost 0"
    assert done.stderr == b""
    assert queues(any_vhost) == []


@pytest.mark.timeout(180)
def test_it_adds_up_though_the_broker_is_killed(private_broker: RabbitMQ, private_vhost: VirtualHost) -> None:
    done = run_cli(
        "demo",
        *("--url", private_vhost.url, "--messages", "2000", "--rate", "1000", "--kills", "1"),
        *("--kill-command", f"docker kill {private_broker.container.id}"),
        *("--restart-command", f"docker start {private_broker.container.id}"),
        timeout=150,
    )
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done
    assert any("the broker is killed, with " in line for line in lines)
    assert any("connected again after " in line for line in lines)
    assert "The broker was killed once." in done.stdout.decode()
    assert lines[-1] == "✔ confirmed 2,000 = handled 1,996 + dead-lettered 4, lost 0"
    assert done.stderr == b""  # the display shows reconnects, not the log
    assert queues(private_vhost) == []


def test_a_kill_command_that_fails_is_said(vhost: VirtualHost) -> None:
    hooks = ["--kill-command", "false", "--restart-command", "true"]
    done = run_cli("demo", "--url", vhost.url, "--messages", "2000", "--rate", "1000", *hooks)
    assert done.returncode == 1
    assert "'false' failed with status 1" in done.stderr.decode()
    assert "ended early: of " in done.stderr.decode()
    assert "The broker was killed" not in done.stdout.decode()
    assert queues(vhost) == []


def test_ctrl_c_ends_it_and_leaves_nothing(vhost: VirtualHost) -> None:
    with start_cli("demo", "--url", vhost.url, "--messages", "1000000", "--rate", "500") as process:
        assert process.stdout is not None
        # A line every two seconds, or later.
        while (line := process.stdout.readline()).startswith(b"00:00") or not line.startswith(b"00:"):
            assert line, "it ended by itself"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)  # it takes the orders that are left, some hundreds after a pause
        assert process.returncode == 130
    assert b"interrupted: of " in errors
    assert b"lost 0" in errors
    assert b"Traceback" not in errors
    assert queues(vhost) == []


def test_a_broker_that_is_not_there_is_one_line() -> None:
    done = run_cli("demo", "--url", "amqp://guest:guest@127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr == b"reliable-mq: 127.0.0.1:1: Connection refused\n"
