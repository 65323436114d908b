"""A web page for dead letters: an ASGI application.

A service can mount the page, or ``reliable-mq web`` serves it::

    app.mount("/dead-letters", DeadLetterApp("amqp://...", [orders], token=os.environ["DEAD_LETTERS_TOKEN"]))

The page needs the extra ``web``. It changes queues only through `reliable_mq.deadletters`, whose promises hold: a dead
letter leaves its queue only after its copy was confirmed, or because a user purged it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from reliable_mq._util.validation import check_collection, check_flag, missing_extra
from reliable_mq.errors import ConfigurationError
from reliable_mq.stores.protocol import ResettableStore, check_reset_options
from reliable_mq.topology import Queue

try:
    from starlette.applications import Starlette
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    from reliable_mq.web.access import Guard, UserOf
    from reliable_mq.web.letters import Source
    from reliable_mq.web.operations import AuditLog, Operations
    from reliable_mq.web.pages import Pages
except ImportError as error:
    raise missing_extra("DeadLetterApp", "web", error) from error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions

__all__ = ["DeadLetterApp"]


class DeadLetterApp:
    """An ASGI application with a page for dead letters, to serve or to mount.

    The page shows queues and their dead letters. With ``allow_changes``, users can replay and purge them. The
    application connects to the broker when a page needs it, once for each operation. It is thread-safe and serves
    several users at a time.

    With ``token``, users sign in with that token. With ``user``, the function decides who may use the page. With
    neither, the page serves only requests that come from this machine and through no proxy.

    Args:
        url: The URL or URLs of the broker, as for ``Publisher``.
        queues: The dead-letter queues: their names, queues whose dead letters are shown (``Queue("orders")`` means
            ``orders.dead``), or a function that returns names and is called every few seconds. Users can open no other
            queue.
        any_queue: True to let users open any queue by its name, whether it holds dead letters or not.
        allow_changes: True to let users replay and purge dead letters.
        allow_editing: True to let users change the body of a letter that they replay. Requires ``allow_changes``.
        token: A secret of at least 16 characters. Surrounding whitespace is ignored.
        user: A function that takes a Starlette ``Request`` and returns a name for the audit log, or None to refuse the
            request. Any other value also refuses it. The function must not be a coroutine function.
        allowed_hosts: The host names of the page, besides ``localhost`` and the loopback addresses. Requests for any
            other host are refused.
        audit_log: The path of a file to which each change and each export is appended.
        idempotency: The store of the consumers that handle replayed letters. A replay resets its attempt counts.
        idempotency_namespace: The namespace of these consumers, if they have one.
        credentials, tls: The credentials and TLS options, as for ``Publisher``.

    Raises:
        ConfigurationError: If an argument is invalid. The message names the argument.
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
        check_collection("queues", queues)
        check_flag("any_queue", any_queue)
        check_flag("allow_changes", allow_changes)
        check_flag("allow_editing", allow_editing)
        if allow_editing and not allow_changes:
            raise ConfigurationError("allow_editing needs allow_changes: an edited letter is replayed")
        check_reset_options(idempotency, idempotency_namespace)
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
        """Stop the running operations and block until they end.

        A replay or purge ends after its current batch. The remaining messages stay in their queue. Nothing is lost if
        the process ends without this call.

        Args:
            timeout: The maximum wait, in seconds.

        Returns:
            True if all operations have ended.
        """
        return self._operations.jobs.close(timeout)
