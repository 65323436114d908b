"""A web page for dead letters: an ASGI application.

A service mounts it, or ``reliable-mq web`` serves it.

::

    app.mount("/dead-letters", DeadLetterApp("amqp://...", [orders], token=os.environ["DEAD_LETTERS_TOKEN"]))

It needs the extra ``web``. Whatever it does to a queue, it does by `reliable_mq.deadletters`, whose promises hold: a
dead letter leaves its queue after its copy was confirmed, or because it was to be purged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from reliable_mq.errors import ConfigurationError
from reliable_mq.stores.protocol import ResettableStore
from reliable_mq.topology import Queue
from reliable_mq.web.access import Guard, UserOf
from reliable_mq.web.letters import Source
from reliable_mq.web.operations import AuditLog, Operations
from reliable_mq.web.pages import Pages

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions

__all__ = ["DeadLetterApp"]


class DeadLetterApp:
    """A page for dead letters: an ASGI application, to serve or to mount.

    It shows queues and letters; with ``allow_changes``, users replay and purge them. It connects to the broker when a
    page needs that, once for each operation. The requests of several users at a time, and threads, are fine.

    With ``token``, users sign in with it. With ``user``, the function decides who may use the page. With neither, the
    page serves requests from this machine that come through no proxy.

    Args:
        url: as for ``Publisher``.
        queues: the dead-letter queues: names, or queues whose dead letters are meant (``Queue("orders")`` means
            ``orders.dead``); or a function that returns names, called every few seconds. Others cannot be opened.
        any_queue: let users open a queue by its name as well, whether it holds dead letters or not.
        allow_changes: let users replay and purge.
        allow_editing: let users change the body of a letter that they replay; needs ``allow_changes``.
        token: a secret of 16 characters at least.
        user: takes a Starlette ``Request``, and returns a name for the audit log; None refuses the request.
        allowed_hosts: names under which the page is reached, beside ``localhost``; others are refused.
        audit_log: path of a file to which each change and each export is appended.
        idempotency: the store of the consumers that letters are replayed to, whose counts of attempts are reset.
        idempotency_namespace: that of the consumers, if they were given one.
        credentials, tls: as for ``Publisher``.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        queues: Sequence[Queue | str] | Callable[[], Sequence[str]] = (),
        *,
        any_queue: bool = False,
        allow_changes: bool = False,
        allow_editing: bool = False,
        token: str | None = None,
        user: UserOf | None = None,
        allowed_hosts: Iterable[str] = (),
        audit_log: str | os.PathLike[str] | None = None,
        idempotency: ResettableStore | None = None,
        idempotency_namespace: str | None = None,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
    ) -> None:
        if isinstance(queues, str):
            raise ConfigurationError(f"queues must be a collection: write [{queues!r}]")
        if allow_editing and not allow_changes:
            raise ConfigurationError("allow_editing needs allow_changes: an edited letter is replayed")
        if idempotency is not None and not isinstance(idempotency, ResettableStore):
            raise ConfigurationError(
                f"idempotency must be a store that can reset attempts (reset_many), not {type(idempotency).__name__}"
            )
        source = Source(url, queues, any_queue=any_queue, credentials=credentials, tls=tls)
        audit = AuditLog(audit_log)
        self._operations = Operations(source, audit, store=idempotency, namespace=idempotency_namespace)
        pages = Pages(source, self._operations, audit, allow_changes=allow_changes, allow_editing=allow_editing)
        routes = [
            Route("/", pages.queues),
            Route("/letters", pages.letters),
            Route("/letter", pages.letter),
            Route("/body", pages.body),
            Route("/read", pages.read, methods=["POST"]),
            Route("/reading", pages.reading),
            Route("/replay", pages.replay, methods=["POST"]),
            Route("/purge", pages.purge, methods=["POST"]),
            Route("/edit", pages.edit, methods=["GET", "POST"]),
            Route("/export", pages.export, methods=["POST"]),
            Route("/job", pages.job),
            Route("/stop", pages.stop, methods=["POST"]),
            Route("/file", pages.file),
            Route("/audit", pages.audit_log),
            Route("/sign-in", pages.sign_in, methods=["GET", "POST"]),
            Route("/sign-out", pages.sign_out, methods=["POST"]),
            Mount("/static", StaticFiles(packages=[("reliable_mq.web", "static")])),
        ]
        app = Starlette(routes=routes, exception_handlers=pages.exception_handlers)
        self._guard = pages.guard = Guard(app, hosts=allowed_hosts, token=token, user=user)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        await self._guard(scope, receive, send)

    def close(self, timeout: float = 10.0) -> bool:
        """Stop the operations that are going on, and wait for them. Blocks.

        A replay or purge ends after its current batch; the other messages stay in their queue. If the process ends
        without this call, nothing is lost either.

        Args:
            timeout: seconds.

        Returns:
            Whether all have ended.
        """
        return self._operations.jobs.close(timeout)
