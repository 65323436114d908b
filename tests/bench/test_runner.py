"""The benchmark's message for a contender that failed."""

from __future__ import annotations

from integration.bench.runner import reason_in

OF_SPARK = """\
26/01/02 03:04:05 WARN NativeCodeLoader: Unable to load native-hadoop library
Traceback (most recent call last):
  File "contender.py", line 82, in read
    query.awaitTermination()
pyspark.errors.exceptions.captured.StreamingQueryException: [STREAM_FAILED] Query [id = 1] terminated with exception:
Traceback (most recent call last):
  File "queues.py", line 12, in latestOffset
reliable_mq.errors.BrokerUnavailable: 127.0.0.1:5672 did not answer
 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 1, runId = 2]
Current Committed Offsets: {}

Current State: INITIALIZING
Thread State: RUNNABLE
"""


def test_the_exception_is_named_wherever_it_stands() -> None:
    """Spark's output is a page long and quotes the error of its Python process."""
    assert reason_in(OF_SPARK) == "reliable_mq.errors.BrokerUnavailable: 127.0.0.1:5672 did not answer"
    assert reason_in("Traceback\n  line\nRuntimeError: 3 of 5\n") == "RuntimeError: 3 of 5"


def test_without_one_the_last_thing_that_was_said_is_the_reason() -> None:
    """Without any output, the reason is that stderr was empty."""
    assert reason_in("starting\nsegmentation fault\n") == "segmentation fault"
    assert reason_in("\n") == "nothing on stderr"
