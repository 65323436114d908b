"""A link to a broker by aiormq, the layer below aio-pika.

No other package imports aiormq. aiormq handles the AMQP handshake with SASL, heartbeats and the closing handshake, on
our transport. The transport cuts the inbound stream into frames with our `InboundReader` and passes the frames of
channel 0 on to aiormq. Outbound frames go straight to the transport, in one piece; aiormq also writes whole frames. So
a message passes through none of aiormq's queues, locks, tasks and futures. aiormq's channels use a task and a lock for
each method, cannot declare arguments that aiormq's codec does not know, and may lose a close-ok, which costs the
connection. This uses few private parts of aiormq, whose version is pinned, and
``tests/connection/test_aiormq_layers.py`` reports which parts have changed.

Invariants:

- No exception of a callback reaches the event loop. All exceptions go to ``on_error``.
- A link reports ``link_closed`` exactly once, as its last event, when its socket is closed. The link's only task ends
  soon after, and `EventLoop.finish` waits for it.
- No exception of aiormq leaves the package: `link_error` maps every one. No text contains a credential.
- aiormq's log records for our links have level DEBUG.
- A peer that sends content counts as alive: aiormq, which does not see content, gets a heartbeat in its place.
"""

from reliable_mq.connection.aiormq_driver.errors import link_error
from reliable_mq.connection.aiormq_driver.link import Link

__all__ = ["Link", "link_error"]
