"""The examples with Spark run as they are, each a program of its own, and print what their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration.test_examples import EXAMPLES, ROOT, assert_prints

if TYPE_CHECKING:
    from integration.support.management import VirtualHost


@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", ["spark_files", "spark_once"])
def test_an_example_prints_what_it_says(vhost: VirtualHost, example: str) -> None:
    """On a session that it starts itself."""
    done = subprocess.run(
        [sys.executable, f"{example}.py"],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RELIABLE_MQ_URL": vhost.url, "PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert_prints(example, done.stdout)
