"""The test harness: faults begin and end, and the checker finds real errors."""

from __future__ import annotations

import inspect
import io
import socket
import subprocess
import sys
import tarfile
import threading
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import docker
import pika
import pytest
from docker.errors import NotFound
from docker.models.containers import Container

from integration.support.baseline import back_to_baseline
from integration.support.leaders import suspend_leader
from integration.support.lossy import LossyProxy
from integration.support.seeds import soaking
from reliable_mq.errors import LabError
from reliable_mq.testing import Audit, RabbitMQ, VirtualHost, containers, fixtures
from reliable_mq.testing.containers import OWNER_LABEL, is_orphan, owner, remove_leftovers
from reliable_mq.testing.management import Management, ManagementAPIError
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from reliable_mq.testing import FaultProxyFactory

PLUGINS = {
    "rabbitmq_auth_mechanism_ssl",
    "rabbitmq_consistent_hash_exchange",
    "rabbitmq_management",
    "rabbitmq_prometheus",
    "rabbitmq_stream",
}

#: Suspends the log of all quorum queues for a second.
SLOW_DISK = """
Log = ra_log_wal,
spawn(fun() -> sys:suspend(Log), timer:sleep(1000), sys:resume(Log) end),
timer:sleep(100)
"""


@pytest.mark.both_lines
def test_both_lines_run_with_the_plugins_that_tests_rely_on(any_broker: RabbitMQ) -> None:
    enabled = any_broker.evaluate("rabbit_plugins:active()")

    assert any_broker.version.startswith("4.0." if any_broker.image.endswith(":4.0") else "4.")
    assert {plugin for plugin in PLUGINS if plugin in enabled} == PLUGINS


def test_a_virtual_host_is_one_tests_own(vhost: VirtualHost, new_vhost: Callable[[RabbitMQ], VirtualHost]) -> None:
    other = new_vhost(vhost.broker)
    publish(vhost, "orders", ["1"])

    assert vhost.queue("orders")["type"] == "quorum"
    assert other.queue("orders") is None
    assert vhost.live_counts() == {"orders": 1}


def test_the_management_api_is_asked_without_the_http_proxy(broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxy that it found first

    assert not broker.management.alarms()


def test_a_queue_that_does_not_exist_yet_is_waited_for(vhost: VirtualHost) -> None:
    with pytest.raises(TimeoutError, match="message_count 0 of 'late', which does not exist"):
        vhost.wait_for_messages("late", 0, timeout=0.2)
    with ThreadPoolExecutor(1) as pool, vhost.connect() as connection:
        waited = pool.submit(vhost.wait_for_messages, "late", 0)
        connection.channel().queue_declare("late", durable=True)
        waited.result()


def test_a_queue_without_an_answer_of_its_leader_is_not_empty(vhost: VirtualHost) -> None:
    publish(vhost, "orders", ["1"])
    suspend_leader(vhost, "orders", 1)
    with pytest.raises(TimeoutError, match="message_count 0 of 'orders'"):
        vhost.wait_for_messages("orders", 0, timeout=0.5)


def test_live_counts_know_of_acks_that_wait_for_the_disk(any_vhost: VirtualHost) -> None:
    publish(any_vhost, "orders", ["1"])
    with any_vhost.connect() as connection:
        channel = connection.channel()
        method, _, _ = channel.basic_get("orders")
        any_vhost.broker.evaluate(SLOW_DISK)
        channel.basic_ack(method.delivery_tag)

    assert any_vhost.live_counts() == {"orders": 0}


def test_a_virtual_host_of_any_name_is_observed(broker: RabbitMQ) -> None:
    vhost = VirtualHost(broker, "lägret\\t" + uuid.uuid4().hex)
    vhost.create()
    try:
        connection = vhost.connect()
        channel = connection.channel()
        channel.queue_declare("orders")
        channel.basic_publish("", "orders", b"")
        wait_until(lambda: channel.basic_get("orders")[0], timeout=10, what="a message that is not acked")

        assert vhost.live_counts() == {"orders": 1}
        assert vhost.close_connections() == 1
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
            connection.process_data_events(time_limit=10)
    finally:
        vhost.delete()


def test_a_deleted_virtual_host_is_gone(broker: RabbitMQ, new_vhost: Callable[[RabbitMQ], VirtualHost]) -> None:
    vhost = new_vhost(broker)
    vhost.delete()

    with pytest.raises(ManagementAPIError, match="404"):
        vhost.delete()
    vhost.create()  # for the fixture to delete


def test_a_virtual_host_that_is_gone_keeps_no_other(broker: RabbitMQ) -> None:
    fixture = contextmanager(inspect.unwrap(fixtures.new_vhost))()
    new_vhost = fixture.__enter__()
    made = [new_vhost(broker) for _ in range(3)]
    made[1].delete()

    with pytest.raises(ManagementAPIError, match="404"):
        fixture.__exit__(None, None, None)

    left = {each["name"] for each in broker.management.call("GET", "vhosts")}
    assert left.isdisjoint(vhost.name for vhost in made)


def test_a_killed_broker_returns_at_its_address_with_messages(private_vhost: VirtualHost) -> None:
    """While it is dead, a change of state that is impossible names the state."""
    broker, url = private_vhost.broker, private_vhost.url
    publish(private_vhost, "orders", ["1", "2"], kind="classic")  # a new quorum queue may not survive the kill
    connection = private_vhost.connect()

    broker.kill()

    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connection.process_data_events(time_limit=30)
    assert not broker.answers()
    for action in (broker.kill, broker.pause, broker.unpause):
        refused(action, "exited")
    broker.start()
    assert private_vhost.url == url
    private_vhost.wait_for_messages("orders", 2)


@pytest.mark.soak
def test_an_orderly_restart_says_so_to_clients(private_vhost: VirtualHost) -> None:
    connection = private_vhost.connect()

    private_vhost.broker.stop()

    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="320"):
        connection.process_data_events(time_limit=30)
    private_vhost.broker.start()
    private_vhost.connect().close()


def test_a_paused_broker_accepts_connections_and_says_nothing(private_broker: RabbitMQ) -> None:
    private_broker.pause()

    with socket.create_connection((private_broker.host, private_broker.port), timeout=1) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        with pytest.raises(TimeoutError):
            connection.recv(1)
    private_broker.unpause()
    private_broker.wait_ready(timeout=10)


def test_a_broker_that_falls_silent_ends_a_wait(private_vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reliable_mq.testing.virtual_host._HEARTBEAT", 3)  # the broker waits for 6 s at least
    publish(private_vhost, "orders", ["1"])
    broker = private_vhost.broker

    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(private_vhost.wait_for_consumers, "orders", 1, timeout=120)
        wait_until(lambda: "<<" in open_connections(private_vhost), timeout=60, what="the connection of the wait")
        broker.pause()
        try:
            error = wait.exception(timeout=60)
        finally:
            broker.unpause()

    assert isinstance(error, pika.exceptions.AMQPHeartbeatTimeout)


def test_a_broker_that_waits_for_the_disk_can_be_frozen(private_broker: RabbitMQ) -> None:
    writing = "while [ -e /tmp/on ]; do dd if=/dev/zero of=/tmp/$1 bs=16M count=4 conv=fsync; done"
    private_broker.execute("touch", "/tmp/on")
    for writer in range(4):
        private_broker.container.exec_run(["sh", "-c", writing, "sh", f"written-{writer}"], detach=True)

    begun = "ls /tmp | grep -c written- || true"
    try:
        wait_until(
            lambda: private_broker.execute("sh", "-c", begun).strip() == "4", timeout=30, what="all of them begun"
        )
        for _ in range(3 if soaking() else 1):
            private_broker.pause()
            assert private_broker.status() == "paused"
            private_broker.unpause()
    finally:
        private_broker.heal()
        private_broker.execute("rm", "/tmp/on")


@pytest.mark.parametrize("alarm", ["memory", "disk"])
def test_an_alarm_blocks_publishers_until_it_ends(private_vhost: VirtualHost, alarm: str) -> None:
    broker = private_vhost.broker
    seen: list[str] = []
    with private_vhost.connect() as connection:
        connection.add_on_connection_blocked_callback(lambda *_: seen.append("blocked"))
        connection.add_on_connection_unblocked_callback(lambda *_: seen.append("unblocked"))
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        broker.alarm(alarm)
        channel.basic_publish("", "orders", b"")

        wait_until(lambda: connection.process_data_events(0.1) or seen == ["blocked"], timeout=10, what="blocked")
        broker.clear_alarm(alarm)
        wait_until(lambda: connection.process_data_events(0.1) or seen[1:], timeout=10, what="unblocked")

    assert seen == ["blocked", "unblocked"]


def test_whatever_was_done_to_a_broker_heals(private_broker: RabbitMQ) -> None:
    for number, kind in enumerate(("memory", "disk")):
        private_broker.alarm(kind)  # type: ignore[arg-type]
        assert private_broker.management.alarms() == ({"memory", "disk"} if number else {"memory"})
    private_broker.pause()

    private_broker.heal()

    assert not private_broker.management.alarms()
    assert private_broker.answers()


def test_healing_restores_the_configured_limits(private_broker: RabbitMQ) -> None:
    def limits() -> str:
        return private_broker.evaluate(
            "{vm_memory_monitor:get_vm_memory_high_watermark(), rabbit_disk_monitor:get_disk_free_limit()}"
        )

    private_broker.evaluate("application:set_env(rabbit, vm_memory_high_watermark, 0.5)")
    private_broker.evaluate("application:set_env(rabbit, disk_free_limit, 60000000)")
    try:
        private_broker.alarm("memory")
        private_broker.alarm("disk")
        private_broker.heal()
        assert limits() == "{0.5,60000000}"
    finally:
        private_broker.evaluate("application:set_env(rabbit, vm_memory_high_watermark, 0.6)")
        private_broker.evaluate("application:set_env(rabbit, disk_free_limit, 50000000)")
    private_broker.alarm("memory")
    private_broker.alarm("disk")
    private_broker.heal()
    assert limits() == "{0.6,50000000}"


def test_healing_restores_the_certificates_of_the_launch(private_broker: RabbitMQ) -> None:
    path, original = next((path, file.content) for path, file in private_broker._files.items())

    def content() -> bytes:
        chunks, _ = private_broker.container.get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            return tar.extractfile(tar.getnames()[0]).read()

    private_broker.change_certificate({path: b"# another", "/tmp/added.pem": b"another"})
    assert content() == b"# another"

    private_broker.heal()

    assert content() == original


def refused(action: Callable[[], None], state: str) -> None:
    """Check that a broker refuses a change of its state."""
    broker: RabbitMQ = action.__self__  # type: ignore[attr-defined]
    with pytest.raises(LabError, match=rf"cannot {action.__name__} <.*:{broker.port}>, which is {state}: "):
        action()


def test_a_change_of_state_that_is_impossible_names_the_state(private_broker: RabbitMQ) -> None:
    refused(private_broker.unpause, "running")
    private_broker.pause()
    refused(private_broker.pause, "paused")
    refused(private_broker.start, "paused")


def test_a_broker_that_boots_is_waited_for(private_broker: RabbitMQ) -> None:
    private_broker.kill()
    private_broker.container.start()

    private_broker.heal()

    assert private_broker.answers()


@pytest.mark.parametrize("state", ["running", "paused", "exited"])
def test_lost_packets_heal_in_any_state(private_broker: RabbitMQ, state: str) -> None:
    private_broker.lose_packets(1)
    if state != "running":
        private_broker.pause()
    if state == "exited":
        private_broker.kill()

    private_broker.heal()

    assert private_broker.answers()


def test_lost_packets_leave_no_volume(private_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    remove = Container.remove

    def noted(container: Container, **options: object) -> None:
        container.reload()
        removed.extend(volumes_of(container))
        remove(container, **options)

    monkeypatch.setattr(Container, "remove", noted)
    private_broker.lose_packets(0.1)
    private_broker.lost_packets()
    private_broker.heal()

    volumes = private_broker.container.client.volumes
    known = {volume.id for volume in volumes.list()}
    assert removed
    assert known.intersection(removed) <= set(volumes_of(private_broker.container))


def test_what_heal_could_not_undo_is_undone_by_the_next(
    private_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_broker.lose_packets(1)
    with monkeypatch.context() as patched:
        patched.setattr(private_broker, "_in_network_of_container", fail)
        with pytest.raises(LabError, match="docker"):
            private_broker.heal()

    private_broker.heal()

    assert private_broker.answers()


def test_packets_that_could_not_be_lost_need_no_healing(
    private_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = private_broker._in_network_of_container
    monkeypatch.setattr(private_broker, "_in_network_of_container", lambda _: run("no-iptables-here"))
    with pytest.raises(LabError, match="needs iptables"):
        private_broker.lose_packets(1)

    private_broker.heal()

    assert private_broker.answers()


def test_an_alarm_that_nobody_saw_is_cleared(private_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Management, "alarms", fail)
        with pytest.raises(LabError, match="docker"):
            private_broker.alarm("memory")
    wait_until(private_broker.management.alarms, timeout=30, what="the alarm")

    private_broker.heal()

    assert not private_broker.management.alarms()


def test_an_alarm_outlives_a_start_that_changes_nothing(private_broker: RabbitMQ) -> None:
    private_broker.alarm("memory")
    private_broker.start()

    private_broker.heal()

    assert not private_broker.management.alarms()


def test_closed_connections_are_counted_though_output_is_lost(
    vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command that closes connections runs twice. The second time, they are already closed."""
    execute, lost = vhost.broker.execute, set()

    def loses_first_output(*command: str) -> str:
        output = execute(*command)
        if "close_connections" not in command[-1] or command in lost:
            return output
        lost.add(command)
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
            connection.process_data_events(time_limit=10)
        wait_until(lambda: open_connections(vhost) == "[]", timeout=10, what="the connection is closed")
        return ""

    monkeypatch.setattr(vhost.broker, "execute", loses_first_output)
    connection = vhost.connect()
    wait_until(lambda: open_connections(vhost) != "[]", timeout=10, what="the broker knows of the connection")
    assert vhost.close_connections() == 1
    assert lost


@pytest.mark.parametrize("step", ["put_archive", "start"])
def test_an_interrupted_launch_leaves_no_container(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def interrupted(container: Container, *_: object) -> NoReturn:
        made.append(container)
        raise KeyboardInterrupt

    made: list[Container] = []
    broker = RabbitMQ()
    monkeypatch.setattr(Container, step, interrupted)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            broker.launch()

    assert len(made) == 2
    for container in made:
        with pytest.raises(NotFound):
            container.reload()


@pytest.mark.soak
def test_a_broker_can_be_given_configuration_and_files() -> None:
    with RabbitMQ(conf="heartbeat = 17\n", files={"/etc/reliable-mq/ca.pem": b"content"}) as broker:
        shown = wait_until(  # docker sometimes loses the output of a short command
            lambda: broker.execute("cat", "/etc/reliable-mq/ca.pem"), timeout=30, what="the content of the file"
        )
        assert shown == "content"
        assert "17" in broker.evaluate("application:get_env(rabbit, heartbeat)")


def test_an_image_without_erl_call_has_rabbitmqctl_asked(private_broker: RabbitMQ) -> None:
    def move(source: str, target: str) -> None:
        assert private_broker.container.exec_run(["mv", source, target], user="0").exit_code == 0

    def found() -> str:  # docker sometimes loses the output of a short command
        return private_broker.execute("sh", "-c", "command -v erl_call").strip()

    place, hidden = wait_until(found, timeout=30, what="the place of erl_call"), "/var/hidden"
    move(place, hidden)
    try:
        with pytest.raises(LabError, match="exit code"):
            found()
        assert private_broker.evaluate("[1, {two, <<3>>}]") == "[1,{two,<<3>>}]"
        assert private_broker.evaluate('unicode:characters_to_binary("\\"größer\\"\\n")') == '"größer"\n'
        with pytest.raises(LabError, match="undef"):
            private_broker.evaluate("no:such()")
    finally:
        move(hidden, place)


def test_only_containers_whose_owner_is_gone_are_leftovers(broker: RabbitMQ) -> None:
    home, process, started = owner().rsplit(":", 2)

    assert broker.container.labels[OWNER_LABEL] == owner()
    assert not is_orphan(owner())
    assert not is_orphan(f"elsewhere:{process}:1")
    assert is_orphan(f"{home}:{process}:{int(started) - 1}")
    assert is_orphan(f"{home}:4194305:{started}")  # above the largest possible process id


def test_a_process_of_another_pid_namespace_is_no_leftover() -> None:
    """Test runs in containers may have one host name, and do not see each other's processes."""
    code = "import sys; from reliable_mq.testing.containers import is_orphan; sys.exit(is_orphan(sys.argv[1]))"
    unshared = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run([*unshared, sys.executable, "-c", code, owner()], timeout=60, check=False)
    assert done.returncode == 0


def test_a_leftover_may_vanish_while_leftovers_are_removed(broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    client, home = broker.container.client, f"this-test-{uuid.uuid4().hex}"  # no other test process is affected
    leftovers = [
        client.containers.create(broker.container.image, labels={OWNER_LABEL: f"{home}:4194305:{n}"}) for n in range(2)
    ]
    monkeypatch.setattr(containers, "process_home", lambda: home)
    listing = docker.APIClient.containers

    def overtaken(api: docker.APIClient, **arguments: object) -> object:
        listed = listing(api, **arguments)
        leftovers[0].remove(v=True)
        return listed

    monkeypatch.setattr(docker.APIClient, "containers", overtaken)

    remove_leftovers()

    with pytest.raises(NotFound):
        leftovers[1].reload()


def test_the_checker_finds_everything_that_was_published(vhost: VirtualHost, checker: Audit) -> None:
    ids = [str(n) for n in range(300)]
    book(checker, ids)
    publish(vhost, "orders", ids)
    publish(vhost, "orders.dead", ["0"])

    checker.drain(vhost, ["orders"], dead_letters=["orders.dead", "absent"])

    balance = checker.close()
    assert (balance.drained, balance.duplicated) == (300, {"0"})
    assert vhost.live_counts() == {"orders": 0, "orders.dead": 0}


def test_the_checker_catches_a_message_that_the_broker_lost(vhost: VirtualHost) -> None:
    reported: list[str] = []
    checker = Audit(reported.append)
    book(checker, ["1", "2"])
    publish(vhost, "orders", ["1"])

    checker.drain(vhost, ["orders"])

    with pytest.raises(AssertionError, match="lost: 2"):
        checker.close()
    assert "attempted 2, confirmed 2" in reported[0]


def test_the_checker_catches_a_message_that_nobody_published(vhost: VirtualHost) -> None:
    checker = Audit()
    book(checker, ["1"])
    publish(vhost, "orders", ["1", "stranger"])

    checker.drain(vhost, ["orders"])

    with pytest.raises(AssertionError, match="unexpected: stranger"):
        checker.close()


def test_draining_does_not_end_while_somebody_holds_a_message(vhost: VirtualHost) -> None:
    checker = Audit()
    publish(vhost, "orders", ["1"])
    with vhost.connect() as holder:
        holder.channel().basic_get("orders")

        with pytest.raises(TimeoutError, match=r"\{'orders': 1\}"):
            checker.drain(vhost, ["orders"], timeout=1)

    checker.drain(vhost, ["orders"])
    assert checker.balance().drained == 1


def test_draining_waits_for_dead_letters_that_are_on_their_way(vhost: VirtualHost) -> None:
    checker = Audit()
    ids = [str(n) for n in range(200)]
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("orders.dead", durable=True, arguments={"x-queue-type": "quorum"})
        arguments = {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "orders.dead",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        channel.queue_declare("orders", durable=True, arguments=arguments)
        book(checker, ids)
        publish(vhost, "orders", ids)
        received: list[int] = []
        channel.basic_consume("orders", lambda _channel, method, *_: received.append(method.delivery_tag))
        wait_until(lambda: connection.process_data_events(0.1) or len(received) == 200, timeout=10, what="messages")
        channel.basic_nack(0, multiple=True, requeue=False)

    checker.drain(vhost, ["orders"], dead_letters=["orders.dead"])

    assert checker.close().dead_lettered == 200


def test_the_baseline_sees_a_thread_and_a_descriptor_that_stay(baseline: None) -> None:
    stop = threading.Event()
    stray = threading.Thread(target=stop.wait, name="stray")
    with pytest.raises(AssertionError, match="stray"), back_to_baseline(timeout=0.2):
        stray.start()
    stop.set()
    stray.join()

    opened: list[socket.socket] = []
    with pytest.raises(AssertionError, match="socket"), back_to_baseline(timeout=0.2):
        opened.append(socket.socket())
    opened[0].close()


def test_the_harness_itself_leaves_nothing_behind(vhost: VirtualHost, checker: Audit) -> None:
    with back_to_baseline(timeout=10):
        book(checker, ["1"])
        publish(vhost, "orders", ["1"])
        checker.drain(vhost, ["orders"])
        vhost.broker.logs()
        wait_until(lambda: vhost.close_connections() == 0, timeout=10, what="the broker knows that none is left")


def test_a_seed_repeats_what_was_drawn(seed: int, rng: random.Random) -> None:
    assert rng.random() == type(rng)(seed).random()


def test_the_fault_proxy_stands_before_a_broker(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    proxy = fault_proxy(vhost.url)

    with pika.BlockingConnection(pika.URLParameters(proxy.url)) as connection:
        assert connection.is_open
        assert proxy.connections == 1


def open_connections(vhost: VirtualHost) -> str:
    return vhost.broker.evaluate(f'rabbit_connection_tracking:list(<<"{vhost.name}">>)')


def volumes_of(container: Container) -> list[str]:
    return [mount["Name"] for mount in container.attrs["Mounts"] if mount["Type"] == "volume"]


def fail(_: object) -> NoReturn:
    raise LabError("docker does not answer")


def test_the_lossy_proxy_serves_again_when_its_server_does() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # refuses connections until it listens
        server.settimeout(20)
        with LossyProxy(server.getsockname()[1]) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as client:
                assert client.recv(1) == b""

            server.listen()

            with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as client:
                client.sendall(b"x")
                served, _ = server.accept()
                with served:
                    assert served.recv(1) == b"x"


def book(checker: Audit, ids: list[str]) -> None:
    """Record messages as attempted and confirmed."""
    for message_id in ids:
        checker.attempted(message_id)
        checker.confirmed(message_id)


def publish(vhost: VirtualHost, queue: str, ids: list[str], kind: str = "quorum") -> None:
    """Declare a queue if it is missing; publish empty messages with these ids."""
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        if vhost.queue(queue) is None:
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
        for message_id in ids:
            channel.basic_publish("", queue, b"", pika.BasicProperties(message_id=message_id, delivery_mode=2))
    vhost.wait_for_messages(queue, len(ids))
