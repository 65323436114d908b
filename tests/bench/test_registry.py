"""The contenders that can be measured."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

from integration.bench import child
from integration.bench import contenders as contenders_package
from integration.bench.contender import Bar, Contender, Job, Role, Sample
from integration.bench.paths import ROOT
from integration.bench.runner import FILLERS, FILLERS_WITH_IDS


def test_names_are_unique_and_bars_name_contenders() -> None:
    """Across all modules: a bar without a contender would never be measured."""
    found = pkgutil.iter_modules(contenders_package.__path__, f"{contenders_package.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    contenders: list[Contender] = [one for module in modules for one in module.CONTENDERS]
    bars: list[Bar] = [bar for module in modules for bar in getattr(module, "BARS", ())]
    assert {"ours-async-submit", "ours-async-consumer", "ours-memory"} <= {bar.contender for bar in bars}
    names = [one.name for one in contenders]
    assert len(names) == len(set(names))
    assert {bar.contender for bar in bars} <= set(names)
    others = {limit.of for bar in bars for limit in bar.any_of if limit.of}
    assert others <= set(names)
    assert {*FILLERS, *FILLERS_WITH_IDS} <= set(names)


def test_a_job_survives_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The contender gets the runner's job and prints its sample as the last line."""
    asked = Job(url="amqp://u:p@h/%2F", queue="q", messages=7, size=8, window=9, prefetch=10, ack_every=11, warmup=12)
    seen: list[Job] = []

    def run(job: Job) -> Sample:
        seen.append(job)
        return Sample(messages=7, wall_seconds=1.0, cpu_seconds=0.5, peak_rss_bytes=1)

    child.main([Contender(name="one", label="One", role=Role.PUBLISHER, run=run)], ["one", *asked.arguments()])
    assert seen == [asked]
    assert '"wall_seconds": 1.0' in capsys.readouterr().out.splitlines()[-1]


def test_a_peer_by_hand_runs_without_our_package() -> None:
    """Otherwise the peer's memory and CPU time would include this package's."""
    code = (
        "import sys, integration.bench.contenders.pika_select_publisher;"
        "sys.exit(any(name.startswith('reliable_mq') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
