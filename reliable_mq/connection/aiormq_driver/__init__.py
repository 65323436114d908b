"""A link to a broker, by aiormq, the layer below aio-pika.

No other package imports aiormq. aiormq does the AMQP handshake with SASL, heartbeats and the closing handshake, on a
transport of ours. The transport cuts the inbound stream into frames with our `InboundReader` and passes those of
channel 0 on to aiormq. Outbound frames go straight to the transport, in one piece; aiormq's own writes are whole
frames, too. So a message meets none of its queues, locks, tasks and futures. aiormq's channels take a task and a lock
for each method, cannot declare arguments that its codec does not know, and may lose a close-ok, which costs the
connection. This uses few private parts of aiormq; its version is pinned, and ``tests/connection/test_aiormq_layers.py``
reports which of them have changed.

Invariants:

- No exception of a callback reaches the event loop: all go to ``on_error``.
- A link reports ``link_closed`` exactly once, last, and its socket is closed then. Its one task ends soon after, and
  `EventLoop.finish` waits for it.
- No exception of aiormq leaves the package: `link_error` maps every one. No text contains a credential.
- aiormq's log records for our links have level DEBUG.
- A peer that sends content lives: aiormq, which sees no content, gets a heartbeat in its place.
"""

from reliable_mq.connection.aiormq_driver.errors import link_error
from reliable_mq.connection.aiormq_driver.link import Link

__all__ = ["Link", "link_error"]
