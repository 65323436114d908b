"""The only package that imports pika: an event loop and a link to a broker.

pika handles sockets, TLS, the AMQP handshake and heartbeats. Channels bypass pika in both directions. Inbound bytes go
to our `InboundReader`, which passes the frames of channel 0 on to pika. Outbound frames are already encoded, and are
sent in one piece. This uses private layers of pika, so pika's version is pinned, and
``tests/connection/test_pika_layers.py`` reports which layers have changed.

Invariants:

- No exception of a callback reaches pika's loop, where it would end the loop or skip other callbacks. All exceptions go
  to ``on_error``.
- A link reports ``link_closed`` exactly once, as its last event. Its descriptors are closed when the loop has run once
  more.
- No exception of pika leaves the package: `broker_error` maps every one. No text contains a credential.
- The clock is monotonic, as pika's timers are.
- pika's log records on a loop's thread have level DEBUG (`reliable_mq._util.logs`).
"""

from reliable_mq.connection.pika_driver.errors import broker_error
from reliable_mq.connection.pika_driver.link import Link
from reliable_mq.connection.pika_driver.loop import EventLoop

__all__ = ["EventLoop", "Link", "broker_error"]
