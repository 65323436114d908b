"""Disables `new_queue_grace` for all test suites.

Nearly every test declares its queues and publishes into them at once, which would take `new_queue_grace` each time. The
tests of that grace, and those that kill a broker, pass ``new_queue_grace=2.0``. Called by the `conftest` of each suite
and by every program that a test runs in a separate process (`integration.programs`).
"""

from __future__ import annotations

from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.publisher_options import PublisherOptions

__all__ = ["treat_new_queues_as_old"]


def treat_new_queues_as_old() -> None:
    """Set the default of ``new_queue_grace`` to 0 in this process."""
    for one in (PublisherOptions, ConsumerOptions):
        defaults = one.__init__.__kwdefaults__  # type: ignore[misc]  # of the class itself, no instance
        assert "new_queue_grace" in defaults
        defaults["new_queue_grace"] = 0.0
