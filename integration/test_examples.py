"""Every file in ``examples/`` runs unchanged and prints its docstring's output."""

from __future__ import annotations

import ast
import asyncio
import builtins
import doctest
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import pytest
from sqlalchemy import create_engine, inspect

from integration.support import processes
from integration.support.programs import output_of
from integration.support.seeds import soaking
from reliable_mq import BrokerUnavailable, Message, OutboxError, Publisher, PublishUnconfirmed, Queue, TopologyMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from integration.support.certificates import Authority
    from integration.support.databases import Database
    from reliable_mq.testing import RabbitMQ, VirtualHost

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
GUIDES = ROOT / "docs" / "guides"
# These have their own tests below.
SPECIAL = {"service", "asyncio_service", "tls", "test_with_faults", "test_asyncio", "test_kombu"}
SPARK = {path.stem for path in EXAMPLES.glob("spark_*.py")}  # tested in integration/spark
DEADLINE = 60.0

_PRINTS = re.compile(r"^Prints[^\n]*::\n\n((?:(?: {4}[^\n]*)?\n)+)", re.MULTILINE)


def expected(example: str) -> str:
    """Return the output that the docstring of an example gives."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{example}.py").read_text()), clean=True)
    found = _PRINTS.search(f"{docstring}\n")
    assert found is not None, f"{example} does not say what it prints"
    return textwrap.dedent(found[1]).strip("\n") + "\n"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **more}


def run(name: str, *arguments: str, cwd: Path = EXAMPLES, deadline: float = DEADLINE, **variables: str) -> str:
    """Run a program or module to a successful end; return its output."""
    ran = processes.run(name, *arguments, cwd=cwd, env=environment(**variables), timeout=deadline)
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout.decode()}\n{ran.stderr.decode()}"
    return ran.stdout.decode()


def assert_prints(example: str, printed: str) -> None:
    """Compare the output with the docstring, where ``...`` matches anything."""
    wanted = expected(example)
    assert doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS), f"{wanted}\n!=\n{printed}"


@pytest.mark.parametrize("example", sorted({path.stem for path in EXAMPLES.glob("*.py")} - SPECIAL - SPARK))
def test_an_example_prints_what_it_says(vhost: VirtualHost, example: str) -> None:
    """In a soak it runs again, after the first run and in a new Python process."""
    variables = {"RELIABLE_MQ_URL": vhost.url}
    assert_prints(example, run(f"{example}.py", **variables))
    if soaking():
        command = [sys.executable, f"{example}.py"]
        assert_prints(example, output_of(command, cwd=EXAMPLES, env=environment(**variables), timeout=DEADLINE))


@pytest.mark.parametrize(
    "example",
    ["inbox", pytest.param("outbox", marks=pytest.mark.soak), pytest.param("asyncio_outbox", marks=pytest.mark.soak)],
)
def test_an_example_with_a_database_runs_on_postgresql(
    vhost: VirtualHost, database: Callable[[str], Database], example: str
) -> None:
    """The environment names the database that replaces the temporary file.

    The example leaves no table there.
    """
    url = database("postgresql").fresh()
    variables = {"RELIABLE_MQ_URL": vhost.url, "RELIABLE_MQ_DATABASE": url, "RELIABLE_MQ_ASYNC_DATABASE": url}
    assert_prints(example, run(f"{example}.py", **variables))
    engine = create_engine(url)
    assert inspect(engine).get_table_names() == []
    engine.dispose()


@pytest.mark.parametrize("service", ["service", "asyncio_service"])
def test_the_service_stops_in_good_order_on_sigterm(vhost: VirtualHost, service: str) -> None:
    """The service runs until SIGTERM and ends with everything settled."""
    wanted = expected(service).splitlines()
    printed, status = run_until(EXAMPLES / f"{service}.py", len(wanted) - 1, RELIABLE_MQ_URL=vhost.url)
    assert printed == wanted
    assert status == 0
    assert vhost.live_counts()[f"example.{service}.orders"] == 0
    assert vhost.live_counts()[f"example.{service}.invoices"] == 3


@pytest.mark.parametrize(
    "error",
    [
        PublishUnconfirmed("no confirm"),
        OutboxError("the disk is full"),
        BrokerUnavailable("wrong password", permanent=True),
        TopologyMismatch("other arguments", kind="queue", name="orders"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_fastapi_service_answers_503_after_an_error(error: Exception) -> None:
    """A first connect may fail after the start, with an error that is no `PublishError`."""

    async def publish(*arguments: object, **options: object) -> None:
        raise error

    async def place(app: FastAPI) -> httpx.Response:
        app.state.publisher = SimpleNamespace(publish=publish)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.post("/orders", json={"order": 1})

    spec = importlib.util.spec_from_file_location("fastapi_service", EXAMPLES / "fastapi_service.py")
    assert spec is not None
    assert spec.loader is not None
    service = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(service)
    response = asyncio.run(place(service.app))
    assert response.status_code == 503


def test_the_tests_under_faults_pass(vhost: VirtualHost) -> None:
    """A user's own tests with the fault proxy pass outside of this suite."""
    printed = run(
        "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull, "--rootdir",
        str(EXAMPLES), "test_with_faults.py", RELIABLE_MQ_URL=vhost.url,
    )  # fmt: skip
    assert_prints("test_with_faults", printed)


@pytest.mark.timeout(300)
def test_the_tests_of_a_service_with_another_library_pass() -> None:
    """The example with kombu passes in the lab, which starts its own broker."""
    printed = run(
        "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull, "--rootdir",
        str(EXAMPLES), "test_kombu.py", deadline=4 * DEADLINE,
    )  # fmt: skip
    assert_prints("test_kombu", printed)


def test_the_tests_of_asyncio_code_pass(vhost: VirtualHost) -> None:
    """The example of tests with pytest-asyncio passes, too."""
    printed = run(
        "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(EXAMPLES),
        "-o", "asyncio_default_fixture_loop_scope=function", "test_asyncio.py", RELIABLE_MQ_URL=vhost.url,
    )  # fmt: skip
    assert_prints("test_asyncio", printed)


def test_the_example_of_tls_prints_what_it_says(private_broker: RabbitMQ, authority: Authority) -> None:
    """The broker requires a client certificate. All certificates are from a private authority."""
    client = authority.issue("client")
    variables = {
        "RELIABLE_MQ_URL": f"amqps://guest:guest@localhost:{private_broker.tls_port}/",
        "RELIABLE_MQ_CA_FILE": str(authority.file),
        "RELIABLE_MQ_CERT_FILE": str(client.cert_file),
        "RELIABLE_MQ_KEY_FILE": str(client.key_file),
    }
    assert_prints("tls", run("tls.py", **variables))


@pytest.mark.parametrize("number", [0, 1], ids=["sync", "asyncio"])
def test_the_first_programs_of_the_readme_run(vhost: VirtualHost, tmp_path: Path, number: int) -> None:
    """They publish and handle until stopped, and leave nothing behind.

    A new Python process runs them.
    """
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    url = '"amqp://guest:guest@localhost/"'
    assert programs[number].count(url) == 1, "the URL stands in one place, for a reader to change"
    first = tmp_path / "first.py"
    first.write_text(programs[number].replace(url, repr(vhost.url)))
    with subprocess.Popen(
        [sys.executable, first], env=environment(PYTHONUNBUFFERED="1"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        printed, status = stopped_after(2, process)
    assert printed == ["handling order 1, attempt 1", "handling order 2, attempt 1"]
    assert status == 0
    assert not any(vhost.live_counts().values())


def test_the_programs_of_the_tutorial_run(vhost: VirtualHost, tmp_path: Path) -> None:
    """The publisher confirms ten orders; the consumer ships nine, dead-letters one."""
    place, ship = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)[:2]
    for name, program in (("place.py", place), ("ship.py", ship)):
        (tmp_path / name).write_text(program.replace('"amqp://guest:guest@localhost/"', repr(vhost.url)))
    assert run("place.py", cwd=tmp_path) == "10 orders are confirmed\n"
    printed, status = run_until(tmp_path / "ship.py", 9)
    assert printed == [f"order {number} is shipped, attempt 1" for number in (1, 2, 4, 5, 6, 8, 9, 10)] + [
        "order 7 is shipped, attempt 3"
    ]
    assert status == 0
    assert vhost.live_counts() | {"tutorial.orders.dead": 1} == vhost.live_counts()


@pytest.mark.parametrize("library", ["pika", "aio-pika", "faststream", "celery"])
def test_the_programs_of_each_migration_guide_run(vhost: VirtualHost, tmp_path: Path, library: str) -> None:
    """Each program that uses this library runs, in the order of the page.

    A consuming program runs until it has shipped.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", (GUIDES / f"from-{library}.md").read_text(), re.MULTILINE | re.DOTALL)
    programs = [block for block in blocks if "from reliable_mq import" in block and "amqp://" in block]
    assert programs
    for number, program in enumerate(programs):
        assert program.count('"amqp://guest:guest@localhost/"') == 1
        name = f"program_{number}.py"
        (tmp_path / name).write_text(program.replace('"amqp://guest:guest@localhost/"', repr(vhost.url)))
        if ".run()" in program:
            printed, status = run_until(tmp_path / name, 1)
            assert (printed, status) == (["order 1 is shipped"], 0)
        else:
            assert run(name, cwd=tmp_path) == "order 1 is confirmed\n"


@pytest.mark.parametrize(("guide", "programs"), [("publish", 2), ("consume", 7), ("retries", 2), ("outbox", 2)])
def test_the_programs_of_a_guide_run(vhost: VirtualHost, tmp_path: Path, guide: str, programs: int) -> None:
    """Each complete block with a broker runs.

    A block may lack only the reader's own ``ship`` and ``handle``.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", (GUIDES / f"{guide}.md").read_text(), re.MULTILINE | re.DOTALL)
    found = [block for block in blocks if URL in block and undefined(block) <= {"ship", "handle"}]
    assert len(found) == programs
    order = Message.json({"order": 1, "closed": False, "paid": True})
    with Publisher(vhost.url, topology=QUEUES) as publisher:
        for number, program in enumerate(found):
            name = f"program_{number}.py"
            (tmp_path / name).write_text(READERS_OWN + program.replace(URL, repr(vhost.url)))
            queue = re.search(r'"(their-orders|orders|events)"', program)
            assert queue is not None
            if "Consumer(" in program:
                publisher.publish(order, routing_key=queue[1])
            if ".run()" in program:
                lines = 1 + program.count("print(")
                printed, status = run_until(tmp_path / name, lines)
                assert (printed[-1], len(printed), status) == ("order 1 is shipped", lines, 0)
            else:
                printed = run(name, cwd=tmp_path).splitlines()
                assert printed == ["order 1 is shipped"] or "Consumer(" not in program
    published = sum("publisher.publish(" in program for program in found)
    counts = vhost.live_counts()
    del counts["events"]  # a stream keeps its messages
    assert counts == dict.fromkeys(counts, 0) | {"orders": published}


URL = '"amqp://guest:guest@localhost/"'
QUEUES = [
    Queue("orders"),
    Queue("their-orders", dead_letter=None),
    Queue("events", type="stream", max_age=7 * 24 * 3600),
]
READERS_OWN = """
def ship(order):
    print(f"order {order['order']} is shipped")
    return True

def handle(delivery):
    ship(delivery.json())

"""


def undefined(block: str) -> set[str]:
    """Return the names that a block uses and does not define."""
    used, defined = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add(node.asname or node.name)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined


def run_until(program: Path, lines: int, **variables: str) -> tuple[list[str], int]:
    """Run a program in its directory until it has printed `lines` lines; see `stopped_after`."""
    env = environment(PYTHONUNBUFFERED="1", **variables)
    with processes.Process(program.name, cwd=program.parent, env=env, stderr=sys.__stderr__.fileno()) as process:
        return stopped_after(lines, process)


def stopped_after(lines: int, process: processes.Process | subprocess.Popen[bytes]) -> tuple[list[str], int]:
    """Wait until a process has printed `lines` lines, then send SIGTERM.

    Return its output and its exit status.
    """
    deadline = threading.Timer(DEADLINE, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGTERM)
        printed += process.stdout.readlines()
        return b"".join(printed).decode().splitlines(), process.wait(DEADLINE)
    finally:
        deadline.cancel()
        deadline.join()
