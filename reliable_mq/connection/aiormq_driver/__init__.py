"""aiormq, the layer below aio-pika, and the only package that imports it: a link to a broker, a data channel on it.

aiormq keeps what it is good at: the AMQP handshake with SASL, heartbeats, the closing handshake. It is given a
transport of ours, which cuts the inbound stream into frames with our `InboundReader`: what is aiormq's goes on to it,
whole frames at a time; content, and the methods of our one channel, do not. Outbound frames go straight to the
transport, in one piece; aiormq's own writes are whole frames, too. So none of its queues, locks, tasks and futures is
on the way of a message. Channels are ours because those of aiormq take a task and a lock a method, cannot declare what
its codec does not name, and may lose a close-ok, which costs the connection. What is private to aiormq in this is
little; its version is pinned, and ``tests/connection/test_aiormq_layers.py`` says what is missing when it moves.

Invariants:

- No exception leaves a callback into the event loop: all go to ``on_error``.
- A link reports ``link_closed`` exactly once, last, and its socket is closed then. Its one task ends soon after, and
  `EventLoop.finish` waits for it.
- The exceptions of aiormq stop here: they become ours. No text contains a credential.
- What aiormq logs on our behalf is at level DEBUG.
- A peer that sends content lives: aiormq, which sees none of it, is told so by a heartbeat.
"""

from reliable_mq.connection.aiormq_driver.errors import link_error
from reliable_mq.connection.aiormq_driver.link import Link

__all__ = ["Link", "link_error"]
