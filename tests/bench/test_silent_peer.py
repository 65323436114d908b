"""The stand-in for a broker that withholds its confirms."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from integration.bench.contender import Job, Sample
from integration.bench.paths import ROOT
from integration.bench.silent_peer import serving

HELD = 3000


@pytest.mark.slow
def test_memory_growth_is_measured_while_publishes_are_held() -> None:
    with serving(HELD) as url:
        job = Job(url=url, queue="q", messages=HELD, size=10)
        command = [sys.executable, "-m", "integration.bench.contenders.ours_memory", "ours-memory", *job.arguments()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    sample = Sample(**json.loads(done.stdout))
    assert sample.rss_growth_bytes is not None
    assert 100 * HELD < sample.rss_growth_bytes < sample.peak_rss_bytes
