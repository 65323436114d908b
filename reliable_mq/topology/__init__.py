"""Queues, exchanges and bindings as data, declared at every connect.

A plain name in place of a queue or an exchange means an existing one, which is not declared.

Invariants:

- Every constructed object can be declared. A combination that RabbitMQ refuses raises an error that names the field.
- The defaults lose no messages. A queue is a quorum queue, is dead-lettered at least once and has no delivery limit of
  the broker, which also counts reconnects. A full queue refuses publishes instead of dropping confirmed messages.
- A user's ``arguments`` take precedence over our defaults. If they contradict a field, an error is raised.
"""

from reliable_mq.topology.arguments import QueueType, TopologyWarning
from reliable_mq.topology.declare import (
    Binding,
    Declaration,
    Exchange,
    Inequivalence,
    declarations,
    inequivalence_from_reply,
    mismatch_from_differences,
    mismatch_from_reply,
)
from reliable_mq.topology.queue import DEAD_SUFFIX, DEFAULT, DefaultDeadLetter, Queue

__all__ = [
    "DEAD_SUFFIX",
    "DEFAULT",
    "Binding",
    "Declaration",
    "DefaultDeadLetter",
    "Exchange",
    "Inequivalence",
    "Queue",
    "QueueType",
    "TopologyWarning",
    "declarations",
    "inequivalence_from_reply",
    "mismatch_from_differences",
    "mismatch_from_reply",
]
