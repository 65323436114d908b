"""Access control for the page: who may use it, and from where.

Each request is checked before any other code sees it, in this order:

1. **Host.** A host name that is not allowed is refused. Otherwise, a site could reach a page on this machine through a
   name that resolves to this machine (DNS rebinding).
2. **Origin.** A request that another site caused is refused, by ``Sec-Fetch-Site``, or by ``Origin`` if the browser
   does not send that header. The only exception is a link to the page. `Pages` lets it open only a queue that the page
   lists, since reading marks messages and hides them from consumers. A change needs a POST, and a POST must prove its
   origin: it is refused if both headers are missing.
3. **Person.** The function of the embedding service or a token decides. The token is sent as ``Authorization: Bearer``,
   or once in a form, which begins a session whose cookie holds a random number. If neither is configured, requests
   must come from this machine and through no proxy.

Every response forbids all scripts, styles, images and frames except the page's own files.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reliable_mq._util.validation import check_collection, ip_address, is_coroutine_function
from reliable_mq.errors import ConfigurationError

#: A function that returns the user's name for the audit log, or None to refuse the request. Only a name admits a user.
UserOf: TypeAlias = Callable[[Request], str | None]

#: The minimum length of a token, in characters.
SHORTEST_TOKEN: Final = 16
_COOKIE: Final = "reliable_mq_dead_letters"
_SESSION: Final = 12 * 3600.0  # seconds
_SESSIONS: Final = 1000
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_HOST_AND_PORT: Final = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
_PROXIED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_OPEN: Final = ("/sign-in", "/static/")  # paths that need no user
_SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """An ASGI middleware that checks requests, and sets ``user`` in the scope's state.

    Raises:
        ConfigurationError: If an argument is invalid. The message names the argument.
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], token: str | None, user: UserOf | None) -> None:
        check_collection("allowed_hosts", hosts)
        token = None if token is None else token.strip()
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise ConfigurationError(
                f"token has {len(token)} characters, but needs at least {SHORTEST_TOKEN}: "
                'python -c "import secrets; print(secrets.token_urlsafe())" prints one'
            )
        if token is not None and user is not None:
            raise ConfigurationError("give either token or user, not both")
        if user is not None and not callable(user):
            raise ConfigurationError(f"user must be a function of the request, not {user!r}")
        if is_coroutine_function(user):
            raise ConfigurationError("user must be a plain function: a coroutine function is not awaited")
        self._app = app
        self._hosts = {_host(host) for host in (*_LOOPBACK, *hosts)} - {""}
        self._token = None if token is None else _digest(token)
        self._user = user
        self._lock = threading.Lock()
        self._sessions: dict[bytes, tuple[str, float]] = {}

    @property
    def has_token(self) -> bool:
        """Whether users sign in with a token."""
        return self._token is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        path = _path(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY.items():
                    headers[name] = value
                if not path.startswith("/static/"):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        refusal = self._refusal(request) or await self._unknown(request, path)
        await (self._app if refusal is None else refusal)(scope, receive, guarded)

    def sign_in(self, request: Request, token: str, name: str) -> Response | None:
        """Return a response that begins a session, or None if the token is wrong."""
        if self._token is None or not hmac.compare_digest(_digest(token), self._token):
            return None
        session = secrets.token_urlsafe(32)
        now = time.monotonic()
        with self._lock:
            self._sessions = {key: value for key, value in self._sessions.items() if value[1] > now}
            while len(self._sessions) >= _SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_digest(session)] = (_named(name, request), now + _SESSION)
        response = RedirectResponse(f"{request.scope.get('root_path', '')}/", 303)
        response.set_cookie(
            _COOKIE,
            session,
            path=request.scope.get("root_path", "") or "/",
            # Behind a proxy with TLS, only the browser knows the scheme of its address.
            secure=request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:"),
            httponly=True,
            samesite="lax",
        )
        return response

    def sign_out(self, request: Request) -> Response:
        """Return a response that ends the session."""
        with self._lock:
            self._sessions.pop(_digest(request.cookies.get(_COOKIE, "")), None)
        root = request.scope.get("root_path", "")
        response = RedirectResponse(f"{root}/sign-in", 303)
        response.delete_cookie(_COOKIE, path=root or "/", httponly=True, samesite="lax")
        return response

    def _refusal(self, request: Request) -> Response | None:
        """Check method, host and origin. Return a refusal, or None for a good request."""
        headers = request.headers
        if request.method not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("method not allowed\n", 405, {"Allow": "GET, HEAD, POST"})
        named = headers.getlist("host")
        if len(named) != 1 or _host(named[0]) not in self._hosts:
            return _refused("the Host header is not an allowed host: see allowed_hosts (--allowed-host)", 421)
        site = headers.get("sec-fetch-site")
        if request.method == "POST":
            same = site == "same-origin" if site is not None else "origin" in headers
            if same and "origin" in headers:
                same = _host_and_port(headers["origin"]) == named[0].lower()
            return None if same else _refused("the request was not made by this page")
        followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if is_of_another_site(request) and not followed:
            return _refused("the request was made by another site")
        return None

    async def _unknown(self, request: Request, path: str) -> Response | None:
        """Set the request's user. Return a refusal if the user is not known, else None."""
        user = await run_in_threadpool(self._named_by_service, request) if self._user else self._name(request)
        request.state.reliable_mq_user = user or ""  # the service that mounts the page may have a user of its own
        if user is not None or (self.has_token and path.startswith(_OPEN)):
            return None
        if not self.has_token:
            return _refused("this page serves only its own machine, or users that its service admits")
        by_browser = request.method == "GET" or request.headers.get("sec-fetch-mode") == "navigate"
        if by_browser and "hx-request" not in request.headers:
            return RedirectResponse(f"{request.scope.get('root_path', '')}/sign-in", 303)
        return PlainTextResponse("sign in first\n", 401, {"WWW-Authenticate": "Bearer"})

    def _named_by_service(self, request: Request) -> str | None:
        name: object = None if self._user is None else self._user(request)
        return name if isinstance(name, str) and name.strip() else None

    def _name(self, request: Request) -> str | None:
        if self._token is None:
            return _named("", request) if _is_local(request) else None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip()), self._token):
            return _named("bearer of the token", request)
        with self._lock:
            name, until = self._sessions.get(_digest(request.cookies.get(_COOKIE, "")), ("", 0.0))
        return name if time.monotonic() < until else None


def is_of_another_site(request: Request) -> bool:
    """Return whether another site caused the request, as a browser reports it."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _refused(text: str, status: int = 403) -> Response:
    return PlainTextResponse(f"refused: {text}\n", status)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _host(text: str) -> str:
    """Return the host of a Host header in one spelling, or "" if it is invalid.

    The header is ``host``, ``host:port`` or ``[address]:port``.
    """
    text = text.strip().lower().removesuffix(".")
    found = _HOST_AND_PORT.fullmatch(text)
    host = "" if found is None else (found[1] or found[2] or "").removesuffix(".")
    address = ip_address(text) or ip_address(host)  # without brackets, an address may be mistaken for a host and a port
    return host if address is None else str(address)


def _host_and_port(origin: str) -> str:
    """Return the host and port of an origin in lower case, or "" if it is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _named(name: str, request: Request) -> str:
    """Return a name for the audit log: the given name, with the client's address."""
    name = " ".join(name.split())[:60]
    return f"{name} ({_address(request)})" if name else _address(request) or "unknown"


def _is_local(request: Request) -> bool:
    """Return whether the request comes from this machine and has no proxy header."""
    headers: Headers = request.headers
    if any(name in headers for name in _PROXIED):
        return False
    client = _address(request)
    address = ip_address(client)
    return not client if address is None else address.is_loopback  # a Unix socket has no address
