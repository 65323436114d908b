"""The orders service with outbox and inbox on asyncio, as a FastAPI application.

``POST /orders`` commits the order and its message in one transaction and returns status 202, whether or not the broker
is reachable. The handler commits the invoice and the completion record of the message in one transaction, too.

``RELIABLE_MQ_ASYNC_DATABASE`` may be any SQLAlchemy URL with an asyncio driver, for example
``postgresql+psycopg://user:password@localhost/orders``. The default is a temporary SQLite file. To run the service, use
``uvicorn asyncio_outbox:app``. Run as a program, it sends itself requests, one of them twice.

Prints::

    202 {'message_id': 'order-1'}
    202 {'message_id': 'order-2'}
    409 {'detail': 'order 2 is there already'}
    invoiced: [1, 2]
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
from fastapi import FastAPI, HTTPException, Request
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from reliable_mq import AsyncConsumer, AsyncPublisher, Delivery, Message, Queue
from reliable_mq.outbox import SQLAlchemyOutbox
from reliable_mq.stores import AsyncSQLAlchemyStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
RUN = uuid.uuid4().hex[:8]  # so that runs of the example do not share queues and tables
ORDERS = Queue(f"example.asyncio_outbox.orders.{RUN}")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        url = os.environ.get("RELIABLE_MQ_ASYNC_DATABASE", f"sqlite+aiosqlite:///{directory}/orders.db")
        engine = create_async_engine(url)
        outbox = SQLAlchemyOutbox(engine, table=f"outbox_{RUN}", create=True)
        store = AsyncSQLAlchemyStore(engine, table=f"inbox_{RUN}")
        await store.create_table()
        async with engine.begin() as connection:
            await connection.execute(text(f"CREATE TABLE orders_{RUN} (number INTEGER PRIMARY KEY)"))
            await connection.execute(text(f"CREATE TABLE invoices_{RUN} (number INTEGER)"))
        invoiced: asyncio.Queue[int] = asyncio.Queue()

        async def invoice(delivery: Delivery) -> None:
            number = delivery.json()["order"]
            async with delivery.transaction() as session:
                await session.execute(text(f"INSERT INTO invoices_{RUN} VALUES (:number)"), {"number": number})
            invoiced.put_nowait(number)

        async with (
            AsyncPublisher(URL, topology=[ORDERS], outbox=outbox),  # also runs the relay
            AsyncConsumer(URL, ORDERS, invoice, idempotency=store),
        ):
            app.state.engine, app.state.outbox, app.state.invoiced = engine, outbox, invoiced
            yield  # requests are served
        async with engine.begin() as connection:  # only because this is an example
            for table in ("orders", "invoices", "outbox", "inbox"):
                await connection.execute(text(f"DROP TABLE {table}_{RUN}"))
        await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def place(request: Request) -> dict[str, str]:
    number = (await request.json())["order"]
    message = Message.json({"order": number}, message_id=f"order-{number}")
    async with AsyncSession(request.app.state.engine) as session:
        try:
            await session.execute(text(f"INSERT INTO orders_{RUN} VALUES (:number)"), {"number": number})
            request.app.state.outbox.add(session, message, routing_key=ORDERS.name)
            await session.commit()
        except IntegrityError as error:
            raise HTTPException(409, f"order {number} is there already") from error
    return {"message_id": message.message_id}


async def main() -> None:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            for number in (1, 2, 2):
                response = await client.post("/orders", json={"order": number})
                print(response.status_code, response.json())
        invoiced = [await asyncio.wait_for(app.state.invoiced.get(), 30) for _ in range(2)]
        print(f"invoiced: {sorted(invoiced)}")


if __name__ == "__main__":
    asyncio.run(main())
