"""Access to the page: host, origin, token, security headers, and size of forms."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from reliable_mq.errors import ConfigurationError
from reliable_mq.web import DeadLetterApp
from tests.web.conftest import SAME_ORIGIN, URL
from tests.web.memory_broker import letter

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from tests.web.memory_broker import MemoryBroker

    Page = Callable[..., TestClient]

TOKEN = "a-token-of-some-length"


@pytest.fixture(autouse=True)
def _letters(broker: MemoryBroker) -> None:
    broker.add("orders.dead", *map(letter, range(3)))
    broker.queues["orders"] = []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8025", 200),
        ("127.0.0.1:8025", 200),
        ("[::1]:8025", 200),
        ("[0:0:0:0:0:0:0:1]:8025", 200),
        ("[::ffff:127.0.0.1]:8025", 200),
        ("[::ffff:7f00:1]", 200),
        ("::1", 200),
        ("[::ffff:10.0.0.7]", 421),
        ("::1:8025", 421),
        ("localhost:1:2", 421),
        ("shop.example", 200),
        ("shop.example.:443", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
        ("[::1", 421),
        ("[::1]x", 421),
        ("localhost:[", 421),
        ("localhost:80@[", 421),
    ],
)
def test_only_allowed_hosts_are_served(page: Page, host: str, status: int) -> None:
    """A name that an attacker resolves to this machine is refused, and so is what is no host and port."""
    assert page(allowed_hosts=["shop.example", "["]).get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 400),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}, 400),
        ({"Origin": "http://localhost"}, 400),
        ({}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:9999"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
    ],
)
def test_only_its_own_forms_are_accepted(page: Page, headers: dict[str, str], status: int) -> None:
    """An accepted purge form gets 400 here because it lacks the name of the queue."""
    browser = page(allow_changes=True)
    for name in SAME_ORIGIN:
        del browser.headers[name]
    answer = browser.post("/purge", data={"queue": "orders.dead", "go": "purge"}, headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, 403),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({}, 200),
    ],
)
def test_another_site_may_link_here_and_load_nothing(page: Page, headers: dict[str, str], status: int) -> None:
    browser = page()
    for name in SAME_ORIGIN:
        del browser.headers[name]
    assert browser.get("/letters?queue=orders.dead", headers=headers).status_code == status


def test_a_link_of_another_site_reads_no_unlisted_queue(page: Page, broker: MemoryBroker) -> None:
    """Otherwise, any site could have a work queue read, which marks its messages and hides them from consumers."""
    broker.add("orders", letter(1))
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    browser = page(any_queue=True)
    for path in ("/letters?queue=orders", "/letter?queue=orders&id=0", "/body?queue=orders&id=0"):
        answer = browser.get(path, headers=link)
        assert answer.status_code == 403
        assert "A link of another site opens listed queues only" in answer.text
    assert broker.reads == 0
    assert browser.get("/letters?queue=orders.dead", headers=link).status_code == 200
    assert browser.get("/letters?queue=orders").status_code == 200
    assert browser.get("/letters?queue=orders", headers=link).status_code == 200  # it is listed from then on


def test_without_a_token_only_this_machine_is_served(page: Page) -> None:
    assert page(client="127.0.0.1").get("/").status_code == 200
    for client in ("::1", "::1%lo", "::ffff:127.0.0.1"):
        assert page(client=client).get("/").status_code == 200
    for client in ("10.0.0.7", "192.168.1.4", "2001:db8::1", "::ffff:10.0.0.7"):
        assert page(client=client).get("/").status_code == 403
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
        assert page().get("/", headers={header: "10.0.0.7"}).status_code == 403


def test_a_proxy_is_known_by_its_headers_alone(page: Page) -> None:
    """Without them, a request through a proxy on this machine looks local. A token protects the page then."""
    proxied = {"Host": "127.0.0.1:8025", "Origin": "https://letters.example"}
    assert page().get("/", headers=proxied).status_code == 200
    assert page().post("/export", headers=proxied).status_code == 403
    assert page().post("/export", headers=proxied | {"Origin": "http://127.0.0.1:8025"}).status_code == 415
    assert page().get("/", headers=proxied | {"X-Forwarded-For": "10.0.0.7"}).status_code == 403
    closed = page(token=TOKEN)
    assert closed.get("/", headers=proxied, follow_redirects=False).headers["location"] == "/sign-in"
    assert closed.post("/export", headers=proxied | {"Origin": "http://127.0.0.1:8025"}).status_code == 401


def test_users_sign_in_with_the_token(page: Page) -> None:
    """The session ends at sign-out.

    Its cookie is not readable by scripts and is not sent with posts of other sites.
    """
    browser = page(token=TOKEN, client="10.0.0.7", allow_changes=True)
    answer = browser.get("/letters?queue=orders.dead")
    assert str(answer.url) == "http://localhost/sign-in"
    assert not [told for told in ("order", "broker.example", "changes allowed") if told in answer.text]
    assert browser.get("/?part=list", headers={"HX-Request": "true"}).status_code == 401
    assert browser.post("/purge", data={"queue": "orders.dead"}).status_code == 401
    sent = browser.post("/purge", data={"queue": "orders.dead"}, headers={"Sec-Fetch-Mode": "navigate"})
    assert str(sent.url) == "http://localhost/sign-in"
    wrong = browser.post("/sign-in", data={"token": TOKEN[:-1], "name": "Ada"})
    assert (wrong.status_code, "The token is wrong." in wrong.text) == (403, True)
    assert 'name="name" value="Ada"' in wrong.text
    assert TOKEN[:-1] not in wrong.text
    signed_in = browser.post("/sign-in", data={"token": TOKEN, "name": " Ada\tLovelace "}, follow_redirects=False)
    cookie = signed_in.headers["set-cookie"]
    assert TOKEN not in cookie
    assert {"HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
    assert "Secure" not in cookie.split("; ")
    assert "Ada Lovelace (10.0.0.7)" in browser.get("/letters?queue=orders.dead").text
    browser.post("/sign-out")
    assert str(browser.get("/").url) == "http://localhost/sign-in"


def test_a_cookie_from_behind_a_tls_proxy_needs_tls(page: Page) -> None:
    """The page itself speaks HTTP. The browser names the scheme of its address."""
    browser = page(token=TOKEN, allowed_hosts=["shop.example"])
    from_proxy = {"Host": "shop.example", "Origin": "https://shop.example"}
    given = {"token": TOKEN, "name": "Ada"}
    signed_in = browser.post("/sign-in", data=given, headers=from_proxy, follow_redirects=False)
    assert "Secure" in signed_in.headers["set-cookie"].split("; ")


def test_a_line_end_behind_the_token_is_not_a_part_of_it(page: Page) -> None:
    """It may be the content of a file. What a user sends has no surrounding spaces."""
    browser = page(token=f"{TOKEN}\n")
    assert browser.post("/sign-in", data={"token": TOKEN}, follow_redirects=False).status_code == 303
    with pytest.raises(ConfigurationError, match="token has 15 characters, but needs at least 16"):
        page(token="x" * 15 + "\n")


def test_a_program_sends_the_token(page: Page) -> None:
    browser = page(token=TOKEN)
    assert "id-1" in browser.get("/letters?queue=orders.dead", headers={"Authorization": f"Bearer {TOKEN}"}).text
    for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer ", "Bearer \udcff"):
        header = wrong.encode("utf-8", "surrogateescape")
        answer = browser.get("/", headers=[(b"Authorization", header)], follow_redirects=False)
        assert answer.status_code == 303


def test_the_service_decides_who_a_user_is(page: Page) -> None:
    def user(request: Request) -> str | None:
        return request.headers.get("x-user")

    browser = page(user=user, client="10.0.0.7", allow_changes=True)
    assert browser.get("/").status_code == 403
    browser.headers["x-user"] = "Grace"
    form = {"queue": "orders.dead", "choice": "", "go": "replay"}
    assert "begun by Grace" in browser.post("/replay", data=form).text


def test_the_user_is_looked_up_beside_the_event_loop(page: Page) -> None:
    """The function may ask a database."""
    loops: list[object] = []

    def user(_request: Request) -> str:
        try:
            loops.append(asyncio.get_running_loop())
        except RuntimeError:
            loops.append(None)
        return "Grace"

    assert page(user=user, client="10.0.0.7").get("/").status_code == 200
    assert set(loops) == {None}


def test_the_user_of_the_mounting_service_stays(page: Page) -> None:
    guarded = page(user=lambda _request: "Grace").app
    users: list[object] = []

    async def service(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = state = {"user": "of the service"}
        await guarded(scope, receive, send)
        users.append(state["user"])

    assert TestClient(service, "http://localhost").get("/").status_code == 200
    assert users == ["of the service"]


@pytest.mark.filterwarnings("ignore:coroutine 'sleep' was never awaited")
@pytest.mark.parametrize("answer", [lambda: False, lambda: True, str, lambda: " ", object, lambda: asyncio.sleep(0)])
def test_only_a_name_admits_a_user(page: Page, answer: Callable[[], Any]) -> None:
    browser = page(user=lambda _request: answer(), client="10.0.0.7", allow_changes=True)
    assert browser.get("/letters?queue=orders.dead").status_code == 403
    form = {"queue": "orders.dead", "choice": "", "go": "replay"}
    assert browser.post("/replay", data=form).status_code == 403


class AsyncUser:
    async def __call__(self, _request: Request) -> str | None:
        return None


@pytest.mark.parametrize("user", [AsyncUser(), AsyncUser().__call__])
def test_an_asynchronous_user_function_is_refused(user: Any) -> None:
    with pytest.raises(ConfigurationError, match="user must be a plain function"):
        DeadLetterApp(URL, ["orders.dead"], user=user)


def test_a_user_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="user must be a function of the request, not 'Ada'"):
        DeadLetterApp(URL, ["orders.dead"], user="Ada")  # type: ignore[arg-type]


def test_every_response_forbids_foreign_scripts(page: Page) -> None:
    browser = page()
    answers = [browser.get(path) for path in ("/", "/letters?queue=orders.dead", "/nothing", "/static/page.js")]
    answers += [browser.get("/", headers={"Host": "evil.example"}), browser.request("PUT", "/")]
    for answer in answers:
        assert answer.headers["content-security-policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
    assert [answer.status_code for answer in answers] == [200, 200, 404, 200, 421, 405]
    assert answers[0].headers["cache-control"] == "no-store"


def test_a_form_of_another_kind_or_size_is_refused(page: Page) -> None:
    browser = page(allow_changes=True)
    assert browser.post("/purge", json={"queue": "orders.dead"}).status_code == 415
    assert browser.post("/purge", data={"queue": "orders.dead", "choice": "x" * 2_000_000}).status_code == 413
    many = {"queue": "orders.dead", "letter": ["x"] * 3000}
    assert browser.post("/purge", data=many).status_code == 400


def test_it_can_be_mounted(broker: MemoryBroker) -> None:
    """All of its links are below the mount path."""
    pages = DeadLetterApp(URL, ["orders.dead"], token=TOKEN)
    browser = TestClient(Starlette(routes=[Mount("/ops/dead", pages)]), "http://localhost", headers=SAME_ORIGIN)
    signed_in = browser.post("/ops/dead/sign-in", data={"token": TOKEN, "name": "Ada"}, follow_redirects=False)
    assert signed_in.headers["location"] == "/ops/dead/"
    assert "Path=/ops/dead" in signed_in.headers["set-cookie"]
    html = browser.get("/ops/dead/letters?queue=orders.dead").text
    assert "id-1" in html
    assert 'href="/ops/dead/static/page.css"' in html
    assert 'href="/letter' not in html
    assert browser.get("/ops/dead/static/page.css").status_code == 200
    assert broker.reads == 1
    assert pages.close()
