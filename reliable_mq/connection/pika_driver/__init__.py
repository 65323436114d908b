"""The only package that imports pika: an event loop and a link to a broker.

pika does sockets, TLS, the AMQP handshake and heartbeats. Channels bypass it in both directions: inbound bytes go to
our `InboundReader`, which passes on the frames of channel 0 to pika; outbound frames come encoded and leave in one
piece. This uses private layers of pika, so its version is pinned, and ``tests/connection/test_pika_layers.py`` reports
which of them have changed.

Invariants:

- No exception of a callback reaches pika's loop, where it would end the loop or skip other callbacks: all go to
  ``on_error``.
- A link reports ``on_closed`` exactly once, last, and its descriptors are closed when the loop has run once more.
- No exception of pika leaves the package: `broker_error` maps every one. No text contains a credential.
- The clock is monotonic (pika's timers are).
- pika's log records on a loop's thread have level DEBUG (`reliable_mq._util.logs`).
"""

from reliable_mq.connection.pika_driver.errors import broker_error
from reliable_mq.connection.pika_driver.link import Link
from reliable_mq.connection.pika_driver.loop import EventLoop, Timer

__all__ = ["EventLoop", "Link", "Timer", "broker_error"]
