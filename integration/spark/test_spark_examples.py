"""The examples with Spark run as they are and print what their docstrings say."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from integration.support.programs import output_of
from integration.support.spark import JAVA_OPTIONS
from integration.test_examples import EXAMPLES, ROOT, assert_prints

if TYPE_CHECKING:
    from reliable_mq.testing import VirtualHost

NAMES = ("spark_files", "spark_once")

# One after the other in one program: each starts a session and stops it, and they share the JVM, whose start is dear.
PROGRAM = """
import runpy, sys
for name in sys.argv[1:]:
    runpy.run_path(f"{name}.py", run_name="__main__")
    print("----", flush=True)
"""


@pytest.mark.timeout(400)
def test_the_examples_print_what_they_say(vhost: VirtualHost) -> None:
    """On sessions that they start themselves."""
    output = output_of(
        [sys.executable, "-c", PROGRAM, *NAMES],
        cwd=EXAMPLES,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RELIABLE_MQ_URL": vhost.url,
            "PYSPARK_PYTHON": sys.executable,
            "JDK_JAVA_OPTIONS": JAVA_OPTIONS,  # for the start of it
        },
        timeout=350,
    )
    for name, printed in zip(NAMES, output.split("----\n"), strict=False):
        assert_prints(name, printed)
