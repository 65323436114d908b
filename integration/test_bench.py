"""The benchmark runs to its end on a real broker with every contender.

The tests do not check its speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.bench.contenders.ours_consumer_stores import KINDS, new_store
from integration.bench.paths import ROOT
from integration.bench.poison import add_to_report, measure
from integration.bench.stores import TOGETHER, rates
from integration.support.seeds import soaking
from reliable_mq import RetryPolicy
from reliable_mq.testing import VirtualHost


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_contender_does_its_job(vhost: VirtualHost, tmp_path: Path) -> None:
    """The runner checks that published messages arrive and consumed ones are gone."""
    ours = ["submit", "many", "publish", "consumer", "async-submit", "async-callers", "async-consumer"]
    ours += ["outbox-accept", "outbox-relay", "outbox-threads", "consumer-sqlite"]
    ours += [f"consumer-{kind}" for kind in KINDS]
    others = ["pika-select", "pika-consumer", "aio-pika-tasks", "aio-pika-consumer"]
    others += ["faststream-tasks", "faststream-consumer"]
    named = [*(f"ours-{name}" for name in ours), *others]
    types = ["classic", "quorum"]
    sizes = ["--messages", "500", "--consumed", "1000", "--deadline", "60", "--queue-types", ",".join(types)]
    command = [sys.executable, "-m", "integration.bench", "--quick", "--no-curves", "--only", "*", *sizes]
    command += ["--url", vhost.url, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    document = json.loads((tmp_path / "report.json").read_text())
    assert document["failures"] == []
    measured = {(entry["queue_type"], entry["contender"]) for entry in document["samples"]}
    for name in named:
        assert {(queue_type, name) for queue_type in types} <= measured
    assert ("memory", "ours-memory") in measured
    assert "Publishers, quorum queue" in (tmp_path / "report.md").read_text()


def test_what_stores_answer_is_counted_key_by_key_and_in_batches() -> None:
    """The stores without a server are measured; `make soak` measures the others.

    There a store may miss its target.
    """
    with ExitStack() as stack:
        for kind in ("memory", "sqlite"):
            store = new_store(kind, stack)
            assert min(*rates(store, 1, 0.05, "one"), *rates(store, TOGETHER, 0.05, "many")) > 0
    if soaking():
        command = [sys.executable, "-m", "integration.bench.stores", "0.1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert all(kind in done.stdout for kind in KINDS), done.stdout + done.stderr


@pytest.mark.soak
def test_what_poison_messages_cost_beside_a_requeue_loop(vhost: VirtualHost, tmp_path: Path) -> None:
    """This library stops after its attempts; the loop does not stop by itself.

    Both are in the report.
    """
    ours, loop = measure(vhost, 5, RetryPolicy(3, delays=(0.1,)), 1.0)
    assert (ours.deliveries, ours.over) == (3.0, True)
    assert loop.deliveries > ours.deliveries
    assert not loop.over
    (tmp_path / "report.md").write_text("# Benchmark\n\n## Publishers\n")
    for _ in range(2):
        add_to_report([ours, loop], tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Benchmark\n\n## Publishers\n\n## Poison messages\n")
    assert report.count("and so on |") == report.count("then over |") == 1
    assert [cost["over"] for cost in json.loads((tmp_path / "report.json").read_text())["poison"]] == [True, False]
