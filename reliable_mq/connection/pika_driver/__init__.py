"""pika, and the only package that imports it: an event loop, a link to a broker, a data channel on it.

pika keeps what it is good at: sockets, TLS, the AMQP handshake, heartbeats, channels and their synchronous methods.
Content (publishes, deliveries, confirms) goes past it in both directions: inbound bytes go to our `InboundReader`,
which hands back the frames that are pika's; outbound frames come encoded and leave in one piece. This uses private
layers of pika, so its version is pinned, and ``tests/connection/test_pika_layers.py`` says what is missing when they
move.

Invariants:

- No exception leaves a callback into pika's loop, where it would end the loop or skip other callbacks: all go to
  ``on_error``.
- A link reports ``on_closed`` exactly once, last, and its descriptors are closed when the loop has run once more.
- pika's exceptions stop here: `broker_error` turns every one of them into ours. No text contains a credential.
- The clock is monotonic (pika's timers are).
- What pika logs on a loop's thread is at level DEBUG (`reliable_mq.connection.driver_logs`).
"""

from reliable_mq.connection.pika_driver.errors import broker_error
from reliable_mq.connection.pika_driver.link import Link
from reliable_mq.connection.pika_driver.loop import EventLoop, Timer

__all__ = ["EventLoop", "Link", "Timer", "broker_error"]
