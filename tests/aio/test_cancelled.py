"""Publishers that are cancelled while they open. No broker."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import closing

import pytest

from reliable_mq import AsyncPublisher


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_cancelled_entering_does_not_hold_up_who_cancels(turns: int) -> None:
    """This holds in every turn of the loop, because there is no handshake."""

    async def enter(url: str) -> None:
        async with AsyncPublisher(url):
            pytest.fail("it was entered")

    async def main(url: str) -> float:
        task = asyncio.ensure_future(enter(url))
        for _ in range(turns):
            await asyncio.sleep(0)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen(10)
        took = asyncio.run(main(f"amqp://guest:guest@127.0.0.1:{server.getsockname()[1]}/"))
    assert took < 2, "it waited for the end of a connection that never began"
