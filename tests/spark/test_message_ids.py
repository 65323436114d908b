"""Generated ids of rows: equal at every attempt, different for different rows."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.spark.options import WriteOptions
from reliable_mq.spark.rows import MessageIds
from reliable_mq.spark.sink import BatchSink, StreamSink, WrittenPartition

ROWS = st.lists(
    st.tuples(st.binary(max_size=4), st.tuples(st.text(max_size=2), st.none() | st.integers())), max_size=30
)


def made(
    rows: list[tuple[bytes, tuple[object, ...]]], prefix: str = "q/1/0", constant: tuple[str, ...] = ()
) -> list[str]:
    ids = MessageIds(prefix, constant)
    return [ids.of(body, values) for body, values in rows]


@given(rows=ROWS, seed=st.integers())
def test_row_order_does_not_change_the_ids_of_an_attempt(
    rows: list[tuple[bytes, tuple[object, ...]]], seed: int
) -> None:
    """An id belongs to its row; equal rows have as many ids as there are rows."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)

    def by_row(order: list[tuple[bytes, tuple[object, ...]]]) -> dict[tuple[bytes, tuple[object, ...]], set[str]]:
        found: dict[tuple[bytes, tuple[object, ...]], set[str]] = {}
        for row, message_id in zip(order, made(order), strict=True):
            found.setdefault(row, set()).add(message_id)
        return found

    assert by_row(rows) == by_row(shuffled)


@given(rows=ROWS)
def test_no_two_rows_of_a_partition_have_the_same_id(rows: list[tuple[bytes, tuple[object, ...]]]) -> None:
    """Equal rows are separate messages."""
    assert len(set(made(rows))) == len(rows)


def test_where_a_column_ends_matters() -> None:
    """A column value cannot be confused with the body or with another column."""
    rows: list[tuple[bytes, tuple[object, ...]]] = [
        (b"", ("a", "b")),
        (b"", ("ab", "")),
        (b"('a', 'b')", ()),
        (b"a", ("b",)),
    ]
    assert len({MessageIds("p").of(body, values) for body, values in rows}) == len(rows)


def test_partitions_batches_and_targets_have_ids_of_their_own() -> None:
    """The same row is a different message in each of them."""
    row: list[tuple[bytes, tuple[object, ...]]] = [(b"x", ())]
    assert len({*made(row, "q/1/0"), *made(row, "q/1/1"), *made(row, "q/2/0"), *made(row, "q/1/0", ("events",))}) == 4


@pytest.mark.slow
def test_ids_are_the_same_in_another_process() -> None:
    """The hash seed of the process does not matter."""
    program = "from reliable_mq.spark.rows import MessageIds; print(MessageIds('p', ('e',)).of(b'x', ('a', None, 1)))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
    )
    assert done.stdout.strip() == MessageIds("p", ("e",)).of(b"x", ("a", None, 1))


def test_an_id_fits_a_message() -> None:
    """An id has at most 255 bytes, even with the longest numbers."""
    ids = MessageIds("01a1ffb6-0ce1-7569-a921-e929dd3f7692/9223372036854775807/2147483647")
    assert max(len(ids.of(b"x")) for _ in range(1000)) < 255


@pytest.mark.parametrize(
    ("sink", "batch_id", "what_follows"),
    [
        (BatchSink, None, "another write publishes them again, with the same ids only if the rows have a column"),
        (StreamSink, 7, "another attempt publishes them again, with the same ids"),
    ],
)
def test_a_warning_says_which_ids_the_next_attempt_has(
    sink: type[BatchSink | StreamSink], batch_id: int | None, what_follows: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another batch write has other ids, unless the rows have theirs."""
    writer = sink(WriteOptions(url="amqp://localhost/", routing_key="orders"), ("body",))
    writer.abort([WrittenPartition(3, 3), None], batch_id)
    assert f"after 3 messages were confirmed, which stay published; {what_follows}" in caplog.text
