"""A web page for dead letters: an ASGI application.

A service mounts it, or ``reliable-mq web`` serves it.

::

    app.mount("/dead-letters", DeadLetterApp("amqp://...", [orders], token=os.environ["DEAD_LETTERS_TOKEN"]))

It needs the extra ``web``. Whatever it does to a queue, it does by `reliable_mq.deadletters`, whose promises hold: a
dead letter leaves its queue after its copy was confirmed, or because it was to be purged.
"""

from __future__ import annotations

from reliable_mq.web.app import DeadLetterApp

__all__ = ["DeadLetterApp"]
