"""Mount the page for dead letters in an ASGI application.

The service decides who may use the page. Its URLs are below ``/ops/dead-letters``. This program requests some of them,
as a browser would. To see the page, serve ``app`` with ``uvicorn dead_letters_page:app``, behind a gateway that sets
the header ``X-User``.

Prints::

    nobody: 403
    a request of another site: 403
    Ada reads: 200
    the letter is there: True
    Ada replays it: Done, 1 confirmed
    back in its queue: ['order-1']
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from reliable_mq import Consumer, DeadLetter, Delivery, Message, Publisher, Queue
from reliable_mq.web import DeadLetterApp

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
PATH = "/ops/dead-letters"
ORDERS = Queue("example.page.orders")


def user(request: Request) -> str | None:
    """Return the user's name, or None to refuse the request.

    A service would read its session here.
    """
    return request.headers.get("x-user")


page = DeadLetterApp(URL, [ORDERS], user=user, allow_changes=True, allowed_hosts=["shop.example"])


@asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    yield
    await asyncio.to_thread(page.close)  # a running replay finishes its batch, and stops


async def health(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("well\n")


app = Starlette(routes=[Route("/health", health), Mount(PATH, page)], lifespan=lifespan)


def make_a_dead_letter() -> None:
    died = threading.Event()

    def handle(_delivery: Delivery) -> None:
        died.set()
        raise DeadLetter("the customer is gone")

    with Publisher(URL, topology=[ORDERS]) as publisher:
        publisher.publish(Message.json({"order": 1}, message_id="order-1"), routing_key=ORDERS.name)
    with Consumer(URL, ORDERS, handle) as consumer:
        died.wait(30)
        while not consumer.statistics.dead_lettered:
            time.sleep(0.05)


def take_replayed() -> list[str | None]:
    with Consumer(URL, ORDERS, None) as consumer, consumer.get(10, timeout=5) as deliveries:
        return [delivery.message_id for delivery in deliveries]


async def main() -> None:
    await asyncio.to_thread(make_a_dead_letter)
    queue = f"{ORDERS.name}.dead"
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="https://shop.example") as browser,
    ):
        print(f"nobody: {(await browser.get(PATH + '/')).status_code}")
        browser.headers["X-User"] = "Ada"
        form = {"queue": queue, "choice": "", "go": "replay"}
        elsewhere = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        refused = await browser.post(f"{PATH}/replay", data=form, headers=elsewhere)
        print(f"a request of another site: {refused.status_code}")
        answer = await browser.get(f"{PATH}/letters", params={"queue": queue, "reason": "customer"})
        print(f"Ada reads: {answer.status_code}")
        print(f"the letter is there: {'order-1' in answer.text}")
        here = {"Origin": "https://shop.example", "Sec-Fetch-Site": "same-origin"}
        begun = await browser.post(f"{PATH}/replay", data=form, headers=here)
        shown = ""
        for _ in range(300):
            shown = (await browser.get(begun.headers["location"])).text
            if "Back to the letters" in shown:
                break
            await asyncio.sleep(0.1)
        state = re.search(r'class="state \w+"><strong>(\w+)', shown)
        count = re.search(r"<dd><strong>(\d+)</strong>", shown)
        print(f"Ada replays it: {state and state[1]}, {count and count[1]} confirmed")
    print(f"back in its queue: {await asyncio.to_thread(take_replayed)}")


if __name__ == "__main__":
    asyncio.run(main())
