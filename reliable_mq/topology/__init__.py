"""Queues, exchanges and bindings as data, declared at every connect.

In place of a queue or an exchange, a plain name means one that exists: it is not declared.

Invariants:

- Every constructed object can be declared: a combination that RabbitMQ refuses is refused here, by its field's name.
- The defaults lose nothing: a quorum queue, dead-lettered at least once, without the broker's delivery limit, which
  counts reconnects too; a full queue refuses publishes, it does not drop messages that were confirmed.
- A user's ``arguments`` win over our defaults, and never contradict a field without an error.
"""

from reliable_mq.topology.arguments import TopologyWarning
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
from reliable_mq.topology.queue import DEAD_SUFFIX, DEFAULT, DefaultDeadLetter, Queue, QueueType

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
