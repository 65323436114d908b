"""The partitions of a super stream, in the order of their bindings.

Later reads of the bindings may change them.
"""

from __future__ import annotations

from typing import Any

import pytest

from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.monitoring.management import ManagementAPI, ManagementError
from reliable_mq.spark import stream_broker
from reliable_mq.spark.stream_broker import PartitionFinder, bound_partitions
from reliable_mq.url import parse_url


def binding(queue: str, order: object = None, kind: str = "queue") -> dict[str, Any]:
    arguments = {} if order is None else {"x-stream-partition-order": order}
    return {"destination": queue, "destination_type": kind, "arguments": arguments}


def test_partitions_are_in_the_order_of_their_bindings() -> None:
    """A queue that is bound twice occurs once; a queue without an order is last."""
    bindings = [
        binding("none"), binding("b", 10), binding("a", "9"), binding("c", 8), binding("b", 7),
        binding("other", 0, "exchange"),
    ]  # fmt: skip
    assert bound_partitions(bindings) == ["b", "c", "a", "none"]


def test_what_was_found_stays_while_the_api_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running query continues, and a new query fails."""
    monkeypatch.setattr(stream_broker, "_LOOK_AGAIN", 0.0)
    monkeypatch.setattr(stream_broker, "exists", lambda *_: False)
    answers: list[Any] = [[binding("a", 0)], ManagementError("away"), [binding("a", 0), binding("b", 1)]]

    def get(_api: object, *_segments: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ManagementAPI, "get", get)
    finder = PartitionFinder(parse_url("amqp://localhost/"), ["s"], "http://localhost:15672")
    channel: Any = None
    assert [finder.streams(channel) for _ in range(3)] == [["a"], ["a"], ["a", "b"]]
    answers[:] = [ManagementError("refused", 401)]
    with pytest.raises(BrokerUnavailable, match="bindings of 's' cannot be read: refused") as raised:
        PartitionFinder(parse_url("amqp://localhost/"), ["s"], "http://localhost:15672").streams(channel)
    assert raised.value.permanent
    with pytest.raises(ConfigurationError, match=r"^managementUrl must be http"):
        PartitionFinder(parse_url("amqp://localhost/"), ["s"], "localhost:15672").streams(channel)
