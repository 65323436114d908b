"""Reading: the list of queues, filtered letters, and a single letter.

No page of these changes a queue.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from reliable_mq import Message
from reliable_mq.core import headers
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError
from reliable_mq.stores import AsyncRedisStore
from reliable_mq.testing.waiting import until, wait_until
from reliable_mq.web import DeadLetterApp
from reliable_mq.web.jobs import Job, Jobs
from reliable_mq.web.letters import QueueReading
from reliable_mq.web.operations import Operations
from tests.refused_threads import refusing_threads
from tests.web.conftest import URL
from tests.web.memory_broker import letter

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.testclient import TestClient

    from tests.web.memory_broker import MemoryBroker

    Page = Callable[..., TestClient]


def plain(html: str) -> str:
    """Return the text of a page with collapsed spaces."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def first_letter(page: TestClient) -> str:
    found = re.search(r'name="letter" value="([0-9a-f]{32})"', page.get("/letters?queue=orders.dead").text)
    assert found is not None
    return found[1]


def test_the_list_shows_depth_and_age(page: Page, broker: MemoryBroker) -> None:
    """A small queue is read once for its age. An empty or a missing queue is not read."""
    broker.add("orders.dead", letter(1, **{headers.LAST_FAILURE: datetime.now(UTC) - timedelta(hours=3)}))
    broker.queues["mail.dead"] = []
    browser = page(["orders.dead", "mail.dead", "gone.dead"])
    wait_until(lambda: "3 h ago" in browser.get("/?part=list").text, timeout=20, what="the age")
    text = plain(browser.get("/").text)
    assert "orders.dead 1 3 h ago" in text
    assert "mail.dead 0 empty" in text
    assert "gone.dead no such queue" in text
    assert "not read yet" not in text
    assert broker.reads == 1


def test_the_list_reads_no_queue_whose_reads_are_counted(page: Page, broker: MemoryBroker) -> None:
    broker.add("orders.dead", letter(1))
    broker.counts_reads = True
    browser = page()
    for _ in range(3):
        assert browser.get("/").status_code == 200
    wait_until(lambda: "not read yet" in browser.get("/?part=list").text, timeout=20, what="the end of the attempt")
    assert broker.reads == 1
    assert "id-1" in browser.get("/letters?queue=orders.dead").text


def test_the_list_tries_a_queue_that_cannot_be_read_once(page: Page, broker: MemoryBroker) -> None:
    """Each refresh would connect, and its failed operation would take the place of a finished export or report."""

    def refused(*_: Any) -> Any:
        raise ConsumeError("RabbitMQ does not deliver from this queue")

    broker.add("orders.dead", letter(1))
    browser = page()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.web.memory_broker._Channel.take", refused)
        for _ in range(3):
            browser.get("/")
            wait_until(lambda: "not read yet" in browser.get("/?part=list").text, timeout=20, what="the end")
        assert broker.reads == 1
        assert "does not deliver" in plain(browser.get("/letters?queue=orders.dead").text)
    assert "id-1" in browser.get("/letters?queue=orders.dead").text


@pytest.fixture
def many_queues(broker: MemoryBroker) -> list[str]:
    names = [f"orders-{number}.dead" for number in range(20)]
    for name in names:
        broker.add(name, letter(1))
    return names


def read_all(browser: TestClient) -> None:
    """Refresh the list until it shows the age of every queue."""

    def shown() -> bool:
        html = browser.get("/?part=list").text
        return "reading…" not in html and "not read yet" not in html

    wait_until(shown, timeout=20, what="the ages of all queues")


def test_the_list_reads_each_of_many_queues_once(page: Page, broker: MemoryBroker, many_queues: list[str]) -> None:
    """The ages stay, although not all readings are kept."""
    browser = page(many_queues)
    read_all(browser)
    assert browser.get("/?part=list").text.count("shop.Timeout") == 20
    assert broker.reads == 20


def test_the_list_reads_few_queues_at_a_time(page: Page, broker: MemoryBroker, many_queues: list[str]) -> None:
    broker.reading.clear()
    browser = page(many_queues)
    for _ in range(3):
        assert browser.get("/?part=list").text.count("reading…") == 8
    broker.reading.set()
    read_all(browser)


def test_waiting_for_letters_takes_no_threads_of_the_service(page: Page, broker: MemoryBroker) -> None:
    """The thread pool of a service that mounts the page has 40 threads for all its plain functions."""
    broker.add("orders.dead", letter(1))
    broker.reading.clear()
    transport = httpx.ASGITransport(page().app, client=("127.0.0.1", 50000))

    async def visit() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as browser:
            letters = [asyncio.create_task(browser.get("/letter?queue=orders.dead&id=none")) for _ in range(50)]
            await until(lambda: any(one.name == "dead letters orders.dead" for one in threading.enumerate()), 20)
            assert (await asyncio.wait_for(browser.get("/"), 20)).status_code == 200
            assert not any(task.done() for task in letters)
            broker.reading.set()
            assert {answer.status_code for answer in await asyncio.gather(*letters)} == {404}

    asyncio.run(visit())


def test_the_list_forgets_no_reading_of_a_user(page: Page, broker: MemoryBroker, many_queues: list[str]) -> None:
    broker.add("orders.dead", letter(1))
    browser = page(["orders.dead", *many_queues])
    one = first_letter(browser)

    def is_kept() -> bool:
        before = broker.reads
        assert browser.get(f"/letter?queue=orders.dead&id={one}").status_code == 200
        return broker.reads == before

    read_all(browser)
    assert is_kept()
    for name in many_queues[:7]:
        assert browser.get(f"/letters?queue={name}").status_code == 200
    assert is_kept()
    assert browser.get(f"/letters?queue={many_queues[-1]}").status_code == 200
    assert is_kept()


def test_a_queue_is_read_once_for_all_pages(page: Page, broker: MemoryBroker) -> None:
    """RabbitMQ counts reads as deliveries, and hides the messages during a read."""
    broker.add("orders.dead", *map(letter, range(120)))
    browser = page()
    for query in ("", "&page=2", "&exception=*Timeout", "&reason=5+of+5"):
        assert browser.get(f"/letters?queue=orders.dead{query}").status_code == 200
    browser.get(f"/letter?queue=orders.dead&id={first_letter(browser)}")
    assert broker.reads == 1
    browser.post("/read", data={"queue": "orders.dead"})
    assert broker.reads == 2
    assert len(broker.queues["orders.dead"]) == 120


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("", 40),
        ("exception=*Timeout", 19),
        ("exception=shop.Timeout", 19),
        ("exception=ValueError&message-id=id-4", 1),
        ("message-id=id-4&message-id=id-5", 2),
        ("reason=ATTEMPTS", 40),
        ("from-queue=orders", 40),
        ("header=tenant%3Dnorth", 1),
        ("older-than=1s", 0),
    ],
)
def test_the_filter_is_in_the_address(page: Page, broker: MemoryBroker, query: str, count: int) -> None:
    broker.add("orders.dead", *map(letter, range(39)), letter(40, tenant="north"))
    text = page().get(f"/letters?queue=orders.dead&{query}").text
    if count:
        assert f">{count} letter" in text
    else:
        assert "No letter matches this filter: older than 1s." in plain(text)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("older-than=soon", "older-than: an age is a number with s, m, h, d or w behind it, not 'soon'"),
        ("header=tenant", "header must be NAME=VALUE, not 'tenant'"),
        ("excepton=ValueError", "'excepton' is not a field of a filter: the fields are exception, reason, from-queue"),
        ("exception=ValueError&from_queue=orders", "'from_queue' is not a field of a filter"),
        ("group=ValueError", "group must be an exception and a reason, as in the link of a group, not 'ValueError'"),
        ("exception=ValueError&exception=*Timeout", "exception is given twice: a filter has only one"),
    ],
)
def test_a_wrong_filter_shows_no_letter_and_no_button(page: Page, broker: MemoryBroker, query: str, text: str) -> None:
    """It must not show all letters, next to buttons that would delete them."""
    browser = page(allow_changes=True)
    for queue in ([], [letter(1), letter(2)]):
        broker.add("orders.dead", *queue)
        answer = browser.get(f"/letters?queue=orders.dead&{query}")
        assert answer.status_code == 400
        assert text in plain(answer.text)
        assert "Show all" in answer.text
        for shown in ("id-1", "Replay all", "Export all", "Delete all"):
            assert shown not in answer.text
        browser.post("/read", data={"queue": "orders.dead"})
    one = first_letter(browser)
    answer = browser.get(f"/letter?queue=orders.dead&id={one}&{query}")
    assert (answer.status_code, text in plain(answer.text)) == (400, True)


def test_letters_are_grouped_by_exception_and_reason(page: Page, broker: MemoryBroker) -> None:
    """The link of a group selects only its letters, whatever its name contains."""
    odd = {headers.EXCEPTION_TYPE: "app.Error[*]?", headers.DEAD_LETTER_REASON: "100 % & more = \udcff"}
    message = letter(1)
    broker.add("orders.dead", *map(letter, range(5)))
    table = {**dict(message.headers), **odd, headers.DEAD_LETTER_REASON: b"100 % & more = \xff"}
    broker.add("orders.dead", Message(b"odd", headers=table), letter(9, **{headers.EXCEPTION_TYPE: "app.ErrorX"}))
    browser = page()
    html = browser.get("/letters?queue=orders.dead").text
    assert "ValueError 5 of 5 attempts failed 3" in plain(html)
    (link,) = (unescape(found) for found in re.findall(r'href="(/letters[^"]*100[^"]*)"', html))
    assert ">1 letter" in browser.get(link).text


def of_group(number: int, exception: str, reason: str, queue: str = "orders") -> Message:
    return letter(
        number,
        **{headers.EXCEPTION_TYPE: exception, headers.DEAD_LETTER_REASON: reason, headers.ORIGINAL_QUEUE: queue},
    )


def rows_of_groups(html: str) -> list[tuple[str, int]]:
    """Return the link and the count of each group."""
    found = re.findall(r'"Exception"><a href="([^"]*)".*?"Letters">(\d+)<', html, re.DOTALL)
    return [(unescape(link), int(count)) for link, count in found]


@pytest.mark.parametrize("chosen", ["", "&from-queue=orders"])
def test_the_link_of_a_group_selects_as_many_letters(page: Page, broker: MemoryBroker, chosen: str) -> None:
    """It selects letters without an exception or a reason, and keeps the filter."""
    groups = [("", ""), ("app.E", "x expired"), ("", "expired"), ("app.E", ""), ("E", "x expired"), ("", "Expired")]
    for number, (exception, reason) in enumerate(groups):
        broker.add("orders.dead", *[of_group(number, exception, reason)] * (number + 1))
        broker.add("orders.dead", of_group(number, exception, reason, "mail"))
    browser = page()
    rows = rows_of_groups(browser.get(f"/letters?queue=orders.dead{chosen}").text)
    assert [count for _, count in rows] == [count + (not chosen) for count in (6, 5, 4, 3, 2, 1)]
    for link, count in rows:
        html = browser.get(link).text
        assert f"{count} letter" in plain(html[html.index('<h2 id="letters">') :])
        assert chosen in link
        assert rows_of_groups(html) == [(link, count)]


def test_an_operation_on_a_group_processes_only_its_letters(page: Page, broker: MemoryBroker) -> None:
    """Long texts are in the link as far as they are listed. The form to filter keeps the group."""
    broker.add("orders.dead", of_group(1, "", ""), of_group(2, "app." + "E" * 600, "why " * 200), of_group(3, "", "x"))
    browser = page(allow_changes=True)
    (link,) = (link for link, _ in rows_of_groups(browser.get("/letters?queue=orders.dead").text) if "EEE" in link)
    html = browser.get(link).text
    (choice,) = {unescape(found) for found in re.findall(r'name="choice" value="([^"]*)"', html)}
    (group,) = (unescape(found) for found in re.findall(r'name="group" value="([^"]*)"', html))
    assert ">1 letter" in browser.get("/letters", params={"queue": "orders.dead", "group": group, "reason": "WHY"}).text
    browser.post("/purge", data={"queue": "orders.dead", "choice": choice, "go": "purge", "name": "orders.dead"})
    wait_until(lambda: len(broker.queues["orders.dead"]) == 2, timeout=20, what="the end of the purge")
    assert sorted(broker.bodies("orders.dead")) == [b'{"order":1}', b'{"order":3}']


def test_a_letter_is_shown_in_full(page: Page, broker: MemoryBroker) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    broker.add("orders.dead", letter(1, tenant="north", **{headers.TRACE_CONTEXT: f"00-{trace}-00f067aa0ba902b7-01"}))
    browser = page()
    address = f"/letter?queue=orders.dead&id={first_letter(browser)}"
    text = plain(browser.get(address).text)
    for expected in ("shop.Timeout", "no 1", "5 of 5 attempts failed", "orders", trace, "tenant north", '"order": 1'):
        assert expected in text
    assert "000000 7b 22 6f 72 64 65 72 22" in plain(browser.get(f"{address}&as=hex").text)
    assert '{"order":1}' in plain(browser.get(f"{address}&as=text").text)
    body = browser.get(address.replace("/letter?", "/body?"))
    assert (body.content, body.headers["content-type"]) == (b'{"order":1}', "application/octet-stream")
    assert body.headers["content-disposition"].startswith("attachment; filename=")


def test_next_and_previous_lead_through_all_letters(page: Page, broker: MemoryBroker) -> None:
    """Those that are equal in every byte share one page."""
    broker.add("orders.dead", *map(letter, (1, 1, 2, 1, 3, 2)))
    browser = page()

    def walk(address: str, relation: str) -> list[str]:
        found: list[str] = []
        while address and len(found) < 6:
            html = browser.get(address).text
            found += re.findall(r"<h1>([^<]*)</h1>", html)
            link = re.search(f'rel="{relation}" href="([^"]*)"', html)
            address = "" if link is None else unescape(link[1])
        return found

    ids = re.findall(r'name="letter" value="([0-9a-f]{32})"', browser.get("/letters?queue=orders.dead").text)
    first, last = (f"/letter?queue=orders.dead&id={ids[place]}" for place in (0, 4))
    assert walk(first, "next") == ["id-1", "id-2", "id-3"]
    assert walk(last, "prev") == ["id-3", "id-2", "id-1"]


def test_a_letter_that_is_gone_is_said_so(page: Page, broker: MemoryBroker) -> None:
    broker.add("orders.dead", letter(1))
    answer = page().get("/letter?queue=orders.dead&id=0")
    assert answer.status_code == 404
    assert "This letter is not in the queue" in answer.text


def test_only_the_queues_that_were_named_can_be_opened(page: Page, broker: MemoryBroker) -> None:
    broker.add("orders.dead", letter(1))
    broker.add("orders", letter(2))
    answer = page().get("/letters?queue=orders")
    assert (answer.status_code, broker.reads) == (404, 0)
    assert "This page shows no queue “orders”." in plain(answer.text)
    assert "id-2" in page((), any_queue=True).get("/letters?queue=orders").text
    assert "id-2" in page(lambda: ["orders"]).get("/letters?queue=orders").text


def test_a_name_with_spaces_around_it_is_no_other_queue(page: Page, broker: MemoryBroker) -> None:
    """RabbitMQ allows such names. A typed name with extra spaces is found too."""
    broker.add("orders.dead", letter(1))
    broker.add("orders.dead ", letter(2))
    for browser in (page(["orders.dead", "orders.dead "]), page(lambda: ["orders.dead", "orders.dead "])):
        assert "id-2" in browser.get("/letters?queue=orders.dead%20").text
        assert "id-1" in browser.get("/letters?queue=orders.dead").text
        assert "id-1" in browser.get("/letters?queue=%20orders.dead").text


def test_a_filter_that_is_no_address_leads_to_the_letters(page: Page, broker: MemoryBroker) -> None:
    """It does not lead to another queue either."""
    broker.add("orders.dead", letter(1))
    broker.add("orders", letter(2))
    browser = page((), any_queue=True)
    for choice in ("%FF", "%ED%A0%80", "queue%3Dorders", "reason%3D%25FF%26message-id%3Did-1"):
        answer = browser.get(f"/reading?queue=orders.dead&id=none&choice={choice}")
        assert (answer.url.path, answer.url.params.get_list("queue")) == ("/letters", ["orders.dead"])
    assert answer.url.query == b"queue=orders.dead&reason=%FF&message-id=id-1"


@pytest.mark.parametrize(("name", "status"), [("%00", 400), ("a" * 256, 400), ("%ff", 404), ("", 404), ("nosuch", 503)])
def test_a_name_that_is_no_queue_is_not_listed(page: Page, broker: MemoryBroker, name: str, status: int) -> None:
    """Otherwise a link on another site could fill the list with invalid names."""
    broker.add("orders.dead", letter(1))
    browser = page((), any_queue=True)
    assert browser.get(f"/letters?queue={name}").status_code == status
    assert "id-1" in browser.get("/letters?queue=orders.dead").text
    listed = browser.get("/").text
    assert ("orders.dead" in listed, listed.count('<th scope="row">')) == (True, 1)


def test_a_broker_that_is_away_is_an_error_with_a_way_on(page: Page, broker: MemoryBroker) -> None:
    broker.add("orders.dead", letter(1))
    broker.away = True
    browser = page()
    assert "no host could be reached" in plain(browser.get("/").text)
    answer = browser.get("/letters?queue=orders.dead")
    assert answer.status_code == 503
    assert "no host could be reached" in plain(answer.text)
    broker.away = False
    assert "id-1" in browser.get("/letters?queue=orders.dead").text


def test_a_thread_that_cannot_be_started_is_an_error_once(page: Page, broker: MemoryBroker) -> None:
    """The next operation on the queue does not wait behind the one that never began."""
    broker.add("orders.dead", letter(1))
    browser = page()
    with refusing_threads("dead letters orders.dead"):
        answer = browser.get("/letters?queue=orders.dead")
    assert (answer.status_code, "can't start new thread" in plain(answer.text)) == (503, True)
    assert "id-1" in browser.get("/letters?queue=orders.dead").text


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_reading_that_takes_long_is_made_once(
    page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, away: bool, again: bool
) -> None:
    """A reload shows the letters with the filter, or the error."""
    monkeypatch.setattr("reliable_mq.web.pages._READ_WITHIN", 0.0)
    broker.add("orders.dead", *map(letter, range(3)))
    browser = page()
    if again:
        wait_until(lambda: "id-1" in browser.get("/letters?queue=orders.dead").text, timeout=20, what="a reading")
    before = broker.reads
    broker.reading.clear()
    if again:
        answer = browser.post("/read", data={"queue": "orders.dead", "choice": "message-id=id-1"})
    else:
        answer = browser.get("/letters?queue=orders.dead&message-id=id-1")
    address = str(answer.url)
    assert "Reading the queue…" in plain(answer.text)
    assert "Reading the queue…" in plain(browser.get(address).text)
    broker.away = away
    broker.reading.set()
    wait_until(lambda: "Reading the queue" not in browser.get(address).text, timeout=20, what="the end of the reading")
    ended = browser.get(address)
    if away:
        assert (ended.status_code, "no host could be reached" in ended.text) == (503, True)
    else:
        assert ended.url.path == "/letters"
        assert ">1 letter" in ended.text
    assert broker.reads == before + (not away)


def test_two_users_who_open_a_queue_at_once_read_it_once(
    page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event loops of several threads serve them. The second looks for a reading before the first has begun one."""
    broker.add("orders.dead", letter(1))
    browser = page()
    running, read, second, looked = Jobs.of, Operations._read, [], threading.Event()

    def of(jobs: Jobs, queue: str) -> list[Job]:
        found = running(jobs, queue)
        if second:
            looked.set()
        else:
            second.append(pool.submit(browser.get, "/letters?queue=orders.dead"))
            wait(second, 0.3)
        return found

    def read_once_looked(operations: Operations, job: Job) -> None:
        assert looked.wait(20)
        read(operations, job)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Jobs, "of", of)
        monkeypatch.setattr(Operations, "_read", read_once_looked)
        assert "id-1" in browser.get("/letters?queue=orders.dead").text
        assert "id-1" in second[0].result(20).text
    assert broker.reads == 1


@pytest.mark.parametrize("fails", [False, True])
def test_no_queue_is_unknown_while_names_are_searched(page: Page, broker: MemoryBroker, fails: bool) -> None:
    """The first search may take long. All requests wait for it, and get its error. A later error keeps the names."""
    broker.add("orders.dead", letter(1))
    searching, found, away = threading.Event(), threading.Event(), [fails]
    searches = []

    def names() -> list[str]:
        searches.append(1)
        searching.set()
        assert found.wait(20)
        if away[0]:
            raise BrokerUnavailable("the management API is away")
        return ["orders.dead"]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        browser = page(names)
        first = pool.submit(browser.get, "/letters?queue=orders.dead")
        assert searching.wait(20)
        second = pool.submit(browser.post, "/replay", data={"queue": "orders.dead", "choice": ""})
        assert wait([second], 0.3).not_done
        found.set()
        for answer in (first.result(20), second.result(20)):
            assert answer.status_code == (503 if fails else 200)
            assert not fails or "the management API is away" in plain(answer.text)
        assert len(searches) == 1
        patch.setattr("reliable_mq.web.letters._NAMES_KEPT", 0.0)
        browser = page(names)
        for away[0], status in ((True, 503), (False, 200), (True, 200)):
            assert browser.get("/letters?queue=orders.dead").status_code == status
        assert browser.get("/letters?queue=other.dead").status_code == 404
        assert "the management API is away" in plain(browser.get("/").text)


def test_a_queue_is_opened_by_name_without_a_search(page: Page, broker: MemoryBroker) -> None:
    """It does not wait for a search that takes long, or fail with it."""
    broker.add("orders.dead", letter(1))

    def names() -> list[str]:
        raise AssertionError("nothing is searched")

    assert "id-1" in page(names, any_queue=True).get("/letters?queue=orders.dead").text


def test_an_unexpected_error_of_the_search_is_no_404(page: Page) -> None:
    """A bug in the function is not hidden by a page that shows no queue."""

    def names() -> list[str]:
        raise KeyError("a bug")

    browser = page(names)
    for _ in range(2):
        with pytest.raises(KeyError):
            browser.get("/letters?queue=orders.dead")


def test_a_queue_that_has_gone_is_forgotten(page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it comes back, it is read for its age like a new queue. Names that come and go take no memory."""
    monkeypatch.setattr("reliable_mq.web.letters._NAMES_KEPT", 0.0)
    names = ["orders.dead"]
    browser = page(lambda: names)
    for number, exception in enumerate(("ValueError", "shop.Timeout"), 1):
        broker.queues["orders.dead"] = []
        broker.add("orders.dead", letter(number + 1))
        names[:] = ["orders.dead"]
        read_all(browser)
        assert exception in browser.get("/?part=list").text
        assert broker.reads == number
        names.clear()
        assert "orders.dead" not in browser.get("/?part=list").text


def test_a_queue_that_is_no_longer_named_is_closed(
    page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a user has opened it before."""
    monkeypatch.setattr("reliable_mq.web.letters._NAMES_KEPT", 0.0)
    broker.add("orders.dead", letter(1))
    broker.add("mail.dead", letter(2))
    names = ["orders.dead", "mail.dead"]
    browser = page(lambda: names, allow_changes=True)
    assert "id-2" in browser.get("/letters?queue=mail.dead").text
    names.remove("mail.dead")
    assert browser.get("/letters?queue=mail.dead").status_code == 404
    purge = {"queue": "mail.dead", "choice": "", "go": "purge", "name": "mail.dead"}
    assert browser.post("/purge", data=purge).status_code == 404
    assert "mail.dead" not in browser.get("/").text


def test_an_empty_queue_is_good_news(page: Page, broker: MemoryBroker) -> None:
    broker.queues["orders.dead"] = []
    assert "No dead letters." in plain(page().get("/letters?queue=orders.dead").text)


def test_a_reading_keeps_bounded_content(page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters beyond the bound are read from the queue one by one when requested."""
    monkeypatch.setattr("reliable_mq.web.letters.KEPT_BYTES", 1000)
    broker.add("orders.dead", *map(letter, range(20)))
    browser = page(allow_changes=True, allow_editing=True)
    ids = re.findall(r'name="letter" value="([0-9a-f]{32})"', browser.get("/letters?queue=orders.dead").text)
    assert broker.reads == 1
    assert "no 19" in plain(browser.get(f"/letter?queue=orders.dead&id={ids[19]}").text)
    assert "no 18" in plain(browser.get(f"/letter?queue=orders.dead&id={ids[18]}").text)
    assert broker.reads == 3
    assert browser.get(f"/body?queue=orders.dead&id={ids[17]}").content == b'{"order":17}'
    assert "{&#34;order&#34;:16}" in browser.get(f"/edit?queue=orders.dead&id={ids[16]}").text
    assert "not searched by header here" in plain(browser.get("/letters?queue=orders.dead&header=a%3Db").text)


def test_a_reading_keeps_bounded_texts(page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher may forge a class, a reason and a queue of any length, other ones in each message."""
    monkeypatch.setattr("reliable_mq.web.letters.KEPT_BYTES", 0)
    names = (headers.EXCEPTION_TYPE, headers.DEAD_LETTER_REASON, headers.ORIGINAL_QUEUE)
    for number in range(50):
        broker.add("orders.dead", letter(number, **{name: f"no {number} {name}" + "x" * 30_000 for name in names}))
    browser = page()
    browser.get("/audit")
    tracemalloc.start()
    try:
        found = plain(browser.get("/letters?queue=orders.dead&reason=no+49").text)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "1 letter ·" in found
    assert kept < 2_000_000


def test_equal_texts_are_one_and_end_with_their_reading(broker: MemoryBroker) -> None:
    """A text that is interned would stay in the process, and a publisher may forge any number of texts."""
    reading = QueueReading("orders.dead")
    broker.add("orders.dead", letter(1), letter(3))
    with broker.open(URL, "orders.dead") as dead:
        for message in dead.browse():
            reading.add(message)
    first, second = reading.letters
    for name in ("exception_type", "reason"):
        text = getattr(first, name)
        assert getattr(second, name) is text
        assert sys.intern("".join(text)) is not text


def test_a_letter_that_cannot_be_read_again_is_not_gone(
    page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content is not kept, and the broker is away, or another operation on the queue goes on."""
    monkeypatch.setattr("reliable_mq.web.letters.KEPT_BYTES", 0)
    monkeypatch.setattr("reliable_mq.web.pages._LETTER_WITHIN", 0.01)
    broker.add("orders.dead", letter(1), letter(2))
    browser = page()
    ids = re.findall(r'name="letter" value="([0-9a-f]{32})"', browser.get("/letters?queue=orders.dead").text)
    one, other = (f"/letter?queue=orders.dead&id={each}" for each in ids)

    def told(text: str, status: int = 503) -> bool:
        answer = browser.get(one)
        return (answer.status_code, text in plain(answer.text)) == (status, True)

    broker.away = True
    wait_until(lambda: told("no host could be reached"), timeout=20, what="the error")
    broker.away = False
    broker.reading.clear()
    before = broker.reads
    for _ in range(25):  # more operations than may wait for a queue
        assert told("has not been read yet")
    broker.reading.set()
    wait_until(lambda: told("no 1", 200), timeout=20, what="the letter")
    assert broker.reads == before + 1
    broker.queues["orders.dead"].clear()
    wait_until(lambda: browser.get(other).status_code == 404, timeout=20, what="the end of the other letter")


def test_a_queue_with_more_letters_than_a_reading_holds(
    page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliable_mq.web.operations.MOST", 10)
    broker.add("orders.dead", *map(letter, range(30)))
    assert "The first 10 of 30 letters were read." in plain(page().get("/letters?queue=orders.dead").text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"queues": ()}, "queues must name at least one"),
        ({"queues": "orders.dead"}, "queues must be a collection: write ['orders.dead']"),
        ({"queues": [""]}, "queues must hold names"),
        ({"token": "short"}, "token has 5 characters, but needs at least 16"),
        ({"token": "x" * 20, "user": lambda _request: "me"}, "give either token or user"),
        ({"allow_editing": True}, "allow_editing needs allow_changes"),
        ({"allow_changes": "false"}, "allow_changes must be True or False, not 'false'"),
        ({"any_queue": "0"}, "any_queue must be True or False, not '0'"),
        ({"allowed_hosts": "shop.example"}, "allowed_hosts must be a collection: write ['shop.example']"),
        ({"idempotency": object()}, "idempotency must be a store that can reset attempts"),
        ({"idempotency": AsyncRedisStore("redis://h")}, "idempotency is a store for AsyncConsumer"),
        ({"idempotency_namespace": "shop"}, "idempotency_namespace has no effect without idempotency="),
        ({"audit_log": "/no/such/directory/log"}, "audit_log: /no/such/directory/log cannot be written"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        DeadLetterApp(URL, **({"queues": ["orders.dead"]} | options))
