"""Write and read RabbitMQ as a client of a Spark Connect server.

Usage: ``python -m integration.programs.spark_connect JSON``, with ``remote`` (``sc://...``), ``url``, ``directory``
(for checkpoints and files; the server is on this host) and ``registered``. If ``registered`` is false, this package
cannot be imported here and the server has to find the format by itself; the program then only copies the queue
``orders`` to ``done``. Otherwise it also writes the stream ``events``, and reads it in a query and in a batch. At the
end it prints its results as a JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.streaming import StreamingQuery

EVENTS = 300


def main(settings: dict[str, Any]) -> None:
    spark = SparkSession.builder.remote(settings["remote"]).getOrCreate()
    said: dict[str, object] = {"session": type(spark).__module__}
    if settings["registered"]:
        from reliable_mq.spark import register

        said["before"] = error_of(lambda: Client(spark, settings).write_events("events"))
        register(spark)
        register(spark)
    else:
        sys.modules["reliable_mq"] = None  # type: ignore[assignment]
    client = Client(spark, settings)
    said["progress"] = client.queue_to_queue()
    if settings["registered"]:
        client.write_events("events")
        client.stream_to_files()
        said["events"] = client.events()
        said["unroutable"] = error_of(lambda: client.write_events("nowhere"))
        said["overwrite"] = error_of(lambda: client.write_events("events", mode="overwrite"))
        said["missing"] = error_of(client.read_a_queue_that_is_not_there)
    spark.stop()
    print(json.dumps(said), flush=True)


def error_of(act: Callable[[], object]) -> str:
    """Return the error message that the user sees, or an empty string."""
    try:
        act()
    except PySparkException as error:
        return str(error)
    return ""


class Client:
    """The client's operations on a session."""

    def __init__(self, spark: SparkSession, settings: dict[str, Any]) -> None:
        self._spark = spark
        self._url = settings["url"]
        self._directory = settings["directory"]

    def queue_to_queue(self) -> object:
        """Copy the orders under their own ids; return the end offset of the last batch."""
        rows = self._spark.readStream.format("rabbitmq").options(url=self._url, queue="orders").load()
        query = (
            rows.select("body", "message_id")
            .writeStream.format("rabbitmq")
            .options(url=self._url, routingKey="done", checkpointLocation=f"{self._directory}/done-checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        return json.loads(ended(query).lastProgress["sources"][0]["endOffset"])

    def write_events(self, routing_key: str, mode: str = "append") -> None:
        """Write a batch."""
        rows = self._spark.range(0, EVENTS, 1, 2).selectExpr("cast(id as string) as body")
        rows.write.format("rabbitmq").options(url=self._url, routingKey=routing_key).mode(mode).save()

    def stream_to_files(self) -> None:
        """Read the stream in a query."""
        rows = self._spark.readStream.format("rabbitmq").options(
            url=self._url, stream="events", startingOffsets="earliest"
        )
        ended(
            rows.load()
            .select("offset", "body", "message_id")
            .writeStream.format("parquet")
            .option("path", f"{self._directory}/events")
            .option("checkpointLocation", f"{self._directory}/events-checkpoint")
            .trigger(availableNow=True)
            .start()
        )

    def events(self) -> list[tuple[int, str]]:
        """Read the stream in a batch; return offsets and bodies."""
        rows = self._spark.read.format("rabbitmq").options(url=self._url, stream="events").load()
        return [(row.offset, bytes(row.body).decode()) for row in rows.select("offset", "body").collect()]

    def read_a_queue_that_is_not_there(self) -> None:
        """Start a query that fails."""
        rows = self._spark.readStream.format("rabbitmq").options(url=self._url, queue="not-there").load()
        ended(rows.writeStream.format("noop").trigger(availableNow=True).start())


def ended(query: StreamingQuery) -> StreamingQuery:
    """Wait until a query ends; return it."""
    assert query.awaitTermination(120), "the query did not end"
    return query


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
