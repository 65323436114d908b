"""A FastAPI application with a publisher and a consumer in its lifespan.

``POST /orders`` returns status 202 once the broker has confirmed the order, and 503 if it was not confirmed, at once
while there is no connection (``on_disconnected="raise"``). A client that retries sends the same ``order``, from which
the ``message_id`` is derived, so the handler of the orders can detect the duplicate.

If the broker is away at the start, and later refuses the login or the topology, ``publish`` raises an error that is no
``PublishError``. The status is 503 as well.

The server handles the signals: it ends the lifespan, which stops the consumer and then flushes the publisher. To run
the service, use ``uvicorn fastapi_service:app``. Run as a program, it sends itself two requests.

Prints::

    202 {'message_id': 'order-1'}
    202 {'message_id': 'order-2'}
    confirmed: 2, handled: [1, 2]
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
from fastapi import FastAPI, HTTPException, Request

from reliable_mq import (
    AsyncConsumer,
    AsyncPublisher,
    BrokerUnavailable,
    Delivery,
    Message,
    PublishError,
    Queue,
    TopologyMismatch,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.fastapi.orders")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    handled: asyncio.Queue[int] = asyncio.Queue()

    async def handle(delivery: Delivery) -> None:
        handled.put_nowait(delivery.json()["order"])

    async with (
        AsyncPublisher(
            URL, topology=[ORDERS], confirm_timeout=3, delivery_timeout=10, on_disconnected="raise"
        ) as publisher,
        AsyncConsumer(URL, ORDERS, handle),
    ):
        app.state.publisher, app.state.handled = publisher, handled
        yield  # requests are served


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def place(request: Request) -> dict[str, str]:
    publisher: AsyncPublisher = request.app.state.publisher
    order = await request.json()
    message = Message.json(order, message_id=f"order-{order['order']}")
    try:
        receipt = await publisher.publish(message, routing_key=ORDERS.name)
    except (PublishError, BrokerUnavailable, TopologyMismatch) as error:
        raise HTTPException(503, str(error)) from error
    return {"message_id": receipt.message_id}


async def main() -> None:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            for number in (1, 2):
                response = await client.post("/orders", json={"order": number})
                print(response.status_code, response.json())
        handled = [await app.state.handled.get() for _ in range(2)]
        print(f"confirmed: {app.state.publisher.statistics.confirmed}, handled: {sorted(handled)}")


if __name__ == "__main__":
    asyncio.run(main())
