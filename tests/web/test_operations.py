"""Replay, delete, export and edit: requirements, effects, and audit log entries."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import resource
import threading
import tracemalloc
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import ClientDisconnect

from reliable_mq import Message
from reliable_mq.core import headers
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until
from reliable_mq.web import DeadLetterApp
from reliable_mq.web.operations import AuditLog
from tests.hostile_exceptions import Textless
from tests.leftovers import nothing_left
from tests.web.memory_broker import letter
from tests.web.test_pages import first_letter, plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from httpx2 import Response
    from starlette.testclient import TestClient

    from tests.web.memory_broker import MemoryBroker

    Page = Callable[..., TestClient]

QUEUE = "orders.dead"


@pytest.fixture
def letters(broker: MemoryBroker) -> None:
    broker.add(QUEUE, *map(letter, range(10)))
    broker.queues["orders"] = []


def ended(browser: TestClient, answer: Response) -> str:
    """Wait until an operation has ended, and return the text of its page."""
    assert answer.status_code == 200, answer.text
    address = str(answer.url)
    wait_until(lambda: "Back to the letters" in browser.get(address).text, timeout=20, what="the end of the operation")
    return plain(browser.get(address).text)


def ids_of(browser: TestClient, query: str = "") -> list[str]:
    html = browser.get(f"/letters?queue={QUEUE}&{query}").text
    return re.findall(r'name="letter" value="([0-9a-f]{32})"', html)


@pytest.mark.usefixtures("letters")
def test_nothing_can_be_changed_by_default(page: Page, broker: MemoryBroker) -> None:
    """There are no buttons, and forged forms are refused; reading is allowed."""
    browser = page()
    html = browser.get(f"/letters?queue={QUEUE}").text
    assert "read only" in html
    assert "Delete all" not in html
    for path, fields in (("/replay", {"go": "replay"}), ("/purge", {"go": "purge", "name": QUEUE}), ("/edit", {})):
        assert browser.post(path, data={"queue": QUEUE, "choice": ""} | fields).status_code == 403
    dry = ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "dry-run"}))
    assert "Would be replayed 10" in dry
    assert "Replay 10 now" not in dry
    assert len(broker.queues[QUEUE]) == 10
    assert broker.queues["orders"] == []


@pytest.mark.usefixtures("letters")
def test_one_letter_is_replayed(page: Page, broker: MemoryBroker) -> None:
    browser = page(allow_changes=True)
    one = first_letter(browser)
    asked = browser.post("/replay", data={"queue": QUEUE, "choice": f"letter={one}"})
    assert "1 letter in the last reading: 1 selected letter" in plain(asked.text)
    assert broker.queues["orders"] == []
    told = ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": f"letter={one}", "go": "replay"}))
    assert "Replayed 1 confirmed, and out of the queue" in told
    assert broker.bodies("orders") == [b'{"order":0}']
    assert len(broker.queues[QUEUE]) == 9
    assert one not in ids_of(browser)


@pytest.mark.usefixtures("letters")
def test_selected_letters_are_replayed_and_no_others(page: Page, broker: MemoryBroker) -> None:
    browser = page(allow_changes=True)
    ids = ids_of(browser)
    form = {"queue": QUEUE, "choice": "", "which": "selected", "letter": [ids[2], ids[5]]}
    asked = browser.post("/replay", data=form)
    assert "2 selected letters" in plain(asked.text)
    choice = re.search(r'name="choice" value="([^"]+)"', asked.text)
    assert choice is not None
    form = {"queue": QUEUE, "choice": choice[1].replace("&amp;", "&"), "go": "replay"}
    assert "Replayed 2" in ended(browser, browser.post("/replay", data=form))
    assert broker.bodies("orders") == [b'{"order":2}', b'{"order":5}']
    nothing = browser.post("/replay", data={"queue": QUEUE, "choice": "", "which": "selected"})
    assert nothing.status_code == 400
    assert "no letter is selected: go back, and select some" in plain(nothing.text)


@pytest.mark.usefixtures("letters")
def test_selected_letters_that_are_gone_are_counted(page: Page) -> None:
    """Another tab with an older list may have replayed or deleted them."""
    browser = page(allow_changes=True)
    ids = ids_of(browser)
    form = {"queue": QUEUE, "choice": f"letter={ids[2]}", "go": "replay"}
    assert "Not found" not in ended(browser, browser.post("/replay", data=form))
    two = f"letter={ids[2]}&letter={ids[5]}"
    told = ended(browser, browser.post("/replay", data={**form, "choice": two, "limit": "2"}))
    assert "Replayed 1 confirmed, and out of the queue Not found 1 replayed or deleted" in told
    purge = {"queue": QUEUE, "choice": f"{two}&letter={ids[0]}", "go": "purge", "name": QUEUE}
    assert "1 deleted for good. 2 not found: replayed or deleted" in ended(browser, browser.post("/purge", data=purge))


def test_messages_that_are_equal_in_every_byte_go_together(page: Page, broker: MemoryBroker) -> None:
    """They have one fingerprint, so one of them cannot be selected alone. The forms count them all."""
    twin = letter(1)
    broker.add(QUEUE, twin, letter(2), twin)
    broker.queues["orders"] = []
    browser = page(allow_changes=True)
    form = {"queue": QUEUE, "choice": f"letter={first_letter(browser)}"}
    for path in ("/replay", "/purge"):
        assert "2 letters in the last reading: 1 selected letter" in plain(browser.post(path, data=form).text)
    form["go"] = "replay"
    assert "Replayed 2" in ended(browser, browser.post("/replay", data=form))
    assert broker.bodies(QUEUE) == [b'{"order":2}']


@pytest.mark.usefixtures("letters")
def test_all_that_match_are_replayed_after_a_dry_run(page: Page, broker: MemoryBroker) -> None:
    """The dry run offers the replay with the same options."""
    broker.queues["elsewhere"] = []
    browser = page(allow_changes=True)
    form = {"queue": QUEUE, "choice": "exception=*Timeout", "target": "queue", "to": "elsewhere", "limit": "3"}
    answer = browser.post("/replay", data={**form, "go": "dry-run"})
    assert "Replay 3 now" in ended(browser, answer)
    assert broker.queues["elsewhere"] == []
    html = browser.get(str(answer.url)).text
    assert f'href="/letters?queue={QUEUE}&amp;exception=%2ATimeout">Back to the letters' in html
    again = dict(re.findall(r'type="hidden" name="([a-z]+)" value="([^"]*)"', html))
    assert "Replayed 3" in ended(browser, browser.post("/replay", data={**again, "go": "replay"}))
    assert broker.bodies("elsewhere") == [b'{"order":1}', b'{"order":3}', b'{"order":5}']


@pytest.mark.usefixtures("letters")
def test_letters_that_cannot_be_replayed_are_named(page: Page, broker: MemoryBroker) -> None:
    broker.add(QUEUE, Message(b"foreign", message_id="no-origin"))
    browser = page(allow_changes=True)
    told = ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "replay"}))
    assert "Replayed 10" in told
    assert "Failed 1 still in the queue" in told
    assert "no-origin its origin is unknown: name a target" in told
    assert broker.bodies(QUEUE) == [b"foreign"]


def test_few_of_many_failures_are_kept(page: Page, broker: MemoryBroker) -> None:
    """Their letters are not kept, because operations are kept for hours."""
    browser = page()
    browser.get("/audit")
    tracemalloc.start()
    try:
        broker.add(QUEUE, *(Message(bytes(200_000), message_id=f"no-origin-{number}") for number in range(70)))
        answer = browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "dry-run"})
        told = ended(browser, answer)
        broker.queues[QUEUE].clear()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 3_000_000
    assert "Cannot be replayed 70" in told
    assert "no-origin-49 " in told
    assert "no-origin-50 " not in told
    assert "and 20 more" in told


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"rate": "fast"}, "rate must be a number of messages per second, not 'fast'"),
        ({"rate": "nan"}, "rate must be a number of messages per second, not 'nan'"),
        ({"limit": "-1"}, "limit must be a whole number from 1"),
        ({"target": "queue"}, "the name of the other queue is missing"),
        ({"target": "queue", "to": QUEUE}, f"to is '{QUEUE}' itself"),
        ({"target": "moon"}, "target must be origin, queue or published"),
    ],
)
def test_a_wrong_option_of_a_replay_is_named(
    page: Page, broker: MemoryBroker, field: dict[str, str], text: str
) -> None:
    browser = page(allow_changes=True)
    answer = browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "replay", **field})
    shown = plain(answer.text) if answer.status_code == 400 else ended(browser, answer)
    assert text in shown
    assert len(broker.queues[QUEUE]) == 10


@pytest.mark.usefixtures("letters")
def test_a_purge_needs_the_name_of_the_queue(page: Page, broker: MemoryBroker) -> None:
    browser = page(allow_changes=True)
    form = {"queue": QUEUE, "choice": "message-id=id-4"}
    assert "Type the name of the queue" in plain(browser.post("/purge", data=form).text)
    for typed in ("", "orders", QUEUE.upper()):
        answer = browser.post("/purge", data={**form, "go": "purge", "name": typed})
        assert answer.status_code == 400
        assert "The name is not that of the queue. Nothing was deleted." in plain(answer.text)
    assert len(broker.queues[QUEUE]) == 10
    told = ended(browser, browser.post("/purge", data={**form, "go": "purge", "name": QUEUE}))
    assert "1 deleted for good." in told
    assert b'{"order":4}' not in broker.bodies(QUEUE)
    assert len(broker.queues[QUEUE]) == 9


@pytest.mark.usefixtures("letters")
def test_an_export_is_downloaded(page: Page, broker: MemoryBroker) -> None:
    """The file equals the output of ``dlq export``, and the letters stay."""
    browser = page()
    answer = browser.post("/export", data={"queue": QUEUE, "choice": "exception=ValueError"})
    assert "Download 5 letters" in ended(browser, answer)
    file = browser.get(str(answer.url).replace("/job?", "/file?"))
    lines = [json.loads(line) for line in file.text.splitlines()]
    assert [line["body"] for line in lines] == [f'{{"order":{number}}}' for number in (0, 2, 4, 6, 8)]
    assert re.fullmatch(r'attachment; filename="orders\.dead-[\d-]+\.jsonl"', file.headers["content-disposition"])
    assert len(broker.queues[QUEUE]) == 10


@pytest.mark.usefixtures("letters")
def test_an_export_is_not_dropped_while_it_is_opened(page: Page) -> None:
    """Otherwise its descriptor might be that of another file. After it was dropped, the page says so."""
    browser = page()
    answer = browser.post("/export", data={"queue": QUEUE, "choice": ""})
    ended(browser, answer)
    app = browser.app
    assert isinstance(app, DeadLetterApp)
    job = app._operations.jobs.get(answer.url.params["id"])
    assert job is not None
    assert job.file is not None
    descriptor = job.file.fileno
    dropped: list[Future[bool]] = []

    def fileno() -> int:
        number = descriptor()
        dropped.append(pool.submit(app.close))
        wait(dropped, 0.3)
        return number

    path = str(answer.url).replace("/job?", "/file?")
    with ThreadPoolExecutor(1) as pool:
        job.file = SimpleNamespace(fileno=fileno, close=job.file.close)  # type: ignore[assignment]
        assert len(browser.get(path).text.splitlines()) == 10
        assert dropped[0].result(20)
    answer = browser.get(path)
    assert answer.status_code == 404
    assert "no longer kept" in plain(answer.text)


@pytest.mark.usefixtures("letters")
def test_editing_is_off_unless_it_is_asked_for(page: Page, broker: MemoryBroker) -> None:
    plain_page, browser = page(allow_changes=True), page(allow_changes=True, allow_editing=True)
    one = first_letter(browser)
    form = {"queue": QUEUE, "id": one, "body": '{"order":0,\r\n"fixed":true}'}
    assert plain_page.post("/edit", data=form).status_code == 403
    assert "Edit and replay" not in plain_page.get(f"/letter?queue={QUEUE}&id={one}").text
    assert "Edit and replay" in browser.get(f"/letter?queue={QUEUE}&id={one}").text
    shown = browser.get(f"/edit?queue={QUEUE}&id={one}").text
    assert ">\n{&#34;order&#34;:0}</textarea>" in shown
    assert "Replayed 1" in ended(browser, browser.post("/edit", data=form))
    assert broker.bodies("orders") == [b'{"order":0,\n"fixed":true}']
    assert len(broker.queues[QUEUE]) == 9
    assert "edited, SHA-256" in plain(browser.get("/audit").text)


@pytest.mark.usefixtures("letters")
def test_an_edit_publishes_the_body_of_its_form_and_needs_one(page: Page, broker: MemoryBroker) -> None:
    """The bytes are kept; a missing body must not empty the letter's body."""
    browser = page(allow_changes=True, allow_editing=True)
    form = {"queue": QUEUE, "id": first_letter(browser)}
    answer = browser.post("/edit", data=form)
    assert (answer.status_code, broker.bodies("orders")) == (400, [])
    assert "body is missing" in plain(answer.text)
    coded = {"Content-Type": "application/x-www-form-urlencoded"}
    sent = f"queue={QUEUE}&id={form['id']}&body=%FFa%0D%0A"
    assert "Replayed 1" in ended(browser, browser.post("/edit", content=sent, headers=coded))
    assert broker.bodies("orders") == [b"\xffa\n"]


@pytest.mark.usefixtures("letters")
def test_an_edit_finds_its_letter_after_the_queue_changed(page: Page, broker: MemoryBroker) -> None:
    """The change drops the reading. Links to the letter lead on, too."""
    browser = page(allow_changes=True, allow_editing=True)
    ids = ids_of(browser)
    for number, path in enumerate(("/letter", "/body", "/edit")):
        other = {"queue": QUEUE, "choice": f"letter={ids[number + 1]}", "go": "replay"}
        ended(browser, browser.post("/replay", data=other))
        assert browser.get(f"{path}?queue={QUEUE}&id={ids[0]}").status_code == 200
    ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": f"letter={ids[4]}", "go": "replay"}))
    form = {"queue": QUEUE, "id": ids[0], "body": "mended"}
    assert "Replayed 1" in ended(browser, browser.post("/edit", data=form))
    assert broker.bodies("orders")[-1] == b"mended"
    assert browser.get(f"/letter?queue={QUEUE}&id={ids[0]}").status_code == 404


@pytest.mark.usefixtures("letters")
def test_an_edit_that_fails_keeps_its_text(page: Page, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another operation goes on, the broker is away, or the letter is gone."""
    monkeypatch.setattr("reliable_mq.web.pages._LETTER_WITHIN", 0.01)
    browser = page(allow_changes=True, allow_editing=True)
    ids = ids_of(browser)
    form = {"queue": QUEUE, "id": ids[0], "body": "mended\r\n&"}

    def told(text: str, status: int = 503) -> bool:
        answer = browser.post("/edit", data=form)
        assert ">\nmended\n&amp;</textarea>" in answer.text
        assert f'name="id" value="{ids[0]}"' in answer.text
        return (answer.status_code, text in plain(answer.text)) == (status, True)

    ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": f"letter={ids[1]}", "go": "replay"}))
    broker.reading.clear()
    assert told("has not been read yet")
    broker.away = True
    broker.reading.set()
    wait_until(lambda: told("no host could be reached"), timeout=20, what="the error")
    broker.away = False
    broker.queues[QUEUE].clear()
    wait_until(lambda: told("This letter is not in the queue", 404), timeout=20, what="the end of the letter")
    assert b"mended\n&" not in broker.bodies("orders")


@pytest.mark.usefixtures("letters")
def test_a_body_that_a_form_would_change_cannot_be_edited(page: Page, broker: MemoryBroker) -> None:
    """The page says why, and what to do. The content of the two largest is not kept, and read again."""
    broker.queues[QUEUE].clear()
    bodies = (b"a\r\nb", b"\xff", b"a\x00b", "\u202eright to left".encode(), b"x" * 200_000, *[b"x" * 2_000_000] * 2)
    for body in bodies:
        broker.add(QUEUE, Message(body, headers={headers.FORMAT: 1, headers.ORIGINAL_QUEUE: "orders"}))
    browser = page(allow_changes=True, allow_editing=True)
    for one, body in zip(ids_of(browser), bodies, strict=True):
        why = "not printable text" if len(body) < 200_000 else f"its body has {len(body):,} bytes"
        shown = browser.get(f"/letter?queue={QUEUE}&id={one}").text
        assert "cannot be edited" in shown
        assert why in shown
        for answer in (
            browser.get(f"/edit?queue={QUEUE}&id={one}"),
            browser.post("/edit", data={"queue": QUEUE, "id": one, "body": "x"}),
        ):
            assert answer.status_code == 409
            assert why in answer.text
            assert "DeadLetterQueue.replay(body=…)" in answer.text
    assert "orders" not in broker.queues or not broker.queues["orders"]


@pytest.mark.usefixtures("letters")
def test_a_replay_can_be_stopped_and_goes_on_with_the_next(page: Page, broker: MemoryBroker) -> None:
    broker.gate.clear()
    browser = page(allow_changes=True)
    answer = browser.post("/replay", data={"queue": QUEUE, "choice": "", "rate": "1", "go": "replay"})
    name = str(answer.url).partition("id=")[2]
    running = browser.get(f"/job?id={name}&part=progress")
    assert "Running" in running.text
    assert 'hx-trigger="load' in running.text
    broker.gate.set()
    told = ended(browser, browser.post("/stop", data={"id": name}))
    assert told.startswith("Replay")
    assert "Stopped" in told
    left = len(broker.queues[QUEUE])
    assert left + len(broker.queues["orders"]) == 10
    assert left > 0
    ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "replay"}))
    assert sorted(broker.bodies("orders")) == [f'{{"order":{number}}}'.encode() for number in range(10)]


@pytest.mark.usefixtures("letters")
def test_two_operations_on_one_queue_run_one_after_another(page: Page, broker: MemoryBroker) -> None:
    broker.gate.clear()
    browser = page(allow_changes=True)
    browser.get(f"/letters?queue={QUEUE}")
    first = browser.post("/replay", data={"queue": QUEUE, "choice": "exception=ValueError", "go": "replay"})
    second = browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "replay"})
    assert "Another operation on this queue is running" in plain(second.text)
    assert "Replay running" in plain(browser.get(f"/letters?queue={QUEUE}").text)
    broker.gate.set()
    assert "Replayed 5" in ended(browser, first)
    assert "Replayed 5" in ended(browser, second)
    assert len(broker.bodies("orders")) == 10


@pytest.mark.usefixtures("letters")
def test_the_attempts_that_a_store_counts_are_reset(page: Page) -> None:
    reset: list[str] = []

    class Store(MemoryStore):
        def reset_many(self, keys: Any) -> Any:
            reset.extend(keys)
            return super().reset_many(keys)

    browser = page(allow_changes=True, idempotency=Store(), idempotency_namespace="shop")
    ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": "message-id=id-3", "go": "replay"}))
    assert reset == ["shop|orders|id-3"]


@pytest.mark.usefixtures("letters")
def test_a_queue_is_free_after_an_error_without_text(page: Page, tmp_path: Path) -> None:
    """The error of a store ends the thread that formats it. The next operation still runs."""

    class Store(MemoryStore):
        def reset_many(self, keys: Any) -> Any:
            raise Textless

    log = tmp_path / "audit.jsonl"
    browser = page(allow_changes=True, idempotency=Store(), audit_log=log)
    failed = ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "replay"}))
    assert "Textless" in failed
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["begun", "ended"]
    assert "Would be replayed 10" in ended(
        browser, browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "dry-run"})
    )


@pytest.mark.usefixtures("letters")
def test_the_audit_log_has_who_did_what(page: Page, tmp_path: Path) -> None:
    """One line is written before and one after. The next process shows them."""
    log = tmp_path / "audit.jsonl"
    browser = page(allow_changes=True, audit_log=log)
    form = {"queue": QUEUE, "choice": "exception=*Timeout", "rate": "1000", "go": "replay"}
    ended(browser, browser.post("/replay", data=form))
    ended(browser, browser.post("/replay", data={**form, "go": "dry-run"}))
    begun, over = map(json.loads, log.read_text().splitlines())
    assert (begun["event"], begun["operation"], begun["queue"]) == ("begun", "replay", QUEUE)
    assert (begun["user"], begun["filter"], begun["rate"]) == ("127.0.0.1", "exception=%2ATimeout", 1000)
    assert (over["event"], over["outcome"], over["replayed"], over["failed"]) == ("ended", "done", 5, 0)
    assert over["id"] == begun["id"]
    assert "done: 5 replayed, 0 failed" in plain(page(audit_log=log).get("/audit").text)
    log.write_text('{"at": "never"}\n[]\nnothing\n{"at": "2026-01-01T00:00:00+00:00", "user": "<b>"}\n')
    assert "2026-01-01 00:00:00 UTC &lt;b&gt;" in " ".join(
        re.sub(r"<[^>]*>", " ", page(audit_log=log).get("/audit").text).split()
    )


@pytest.mark.usefixtures("letters")
def test_the_audit_log_has_who_stopped_an_operation(page: Page, broker: MemoryBroker, tmp_path: Path) -> None:
    """It may be another user than the one who began it."""
    broker.gate.clear()
    log = tmp_path / "audit.jsonl"
    browser = page(allow_changes=True, audit_log=log, user=lambda request: request.headers["x-user"])
    ada, bob, eve = ({"x-user": name} for name in ("ada", "bob", "eve"))
    browser.headers.update(ada)
    answer = browser.post("/replay", data={"queue": QUEUE, "choice": "", "rate": "1", "go": "replay"})
    name = str(answer.url).partition("id=")[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reliable_mq.web.pages._READ_WITHIN", 0.0)
        for who in (bob, eve):
            told = plain(browser.post("/stop", data={"id": name}, headers=who).text)
            assert "begun by ada" in told
            assert "stopped by bob" in told
    broker.gate.set()
    assert "stopped by bob" in ended(browser, answer)
    begun, over = map(json.loads, log.read_text().splitlines())
    assert (over["user"], over["outcome"], over["stopped_by"]) == ("ada", "stopped", "bob")
    assert "stopped_by" not in begun
    assert "stopped by bob" in plain(browser.get("/audit").text)


def test_exports_that_go_on_at_a_time_are_few(page: Page, broker: MemoryBroker) -> None:
    """Each writes a file as large as its queue."""
    names = [f"orders-{number}.dead" for number in range(5)]
    for name in names:
        broker.add(name, letter(1))
    broker.reading.clear()
    browser = page(names)
    begun = [browser.post("/export", data={"queue": name, "choice": ""}) for name in names]
    assert [answer.status_code for answer in begun] == [200, 200, 200, 200, 409]
    assert "4 exports are running: try again when one has ended" in plain(begun[-1].text)
    broker.reading.set()
    for answer in begun[:-1]:
        assert "Download 1 letter" in ended(browser, answer)
    assert browser.post("/export", data={"queue": names[-1], "choice": ""}).status_code == 200


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("spec", ["2.3", "2.4"])
def test_a_download_that_is_given_up_at_once_leaves_no_file_open(page: Page, spec: str) -> None:
    """An open descriptor would keep the disk space of the file, which has no name."""
    browser = page()
    form = {"queue": QUEUE, "choice": ""}
    answer = browser.post("/export", data=form)
    ended(browser, answer)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/file",
        "root_path": "",
        "query_string": answer.url.query,
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 50000),
    }

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        if spec == "2.4":
            raise OSError("the client is gone")

    async def give_up(times: int) -> None:
        for _ in range(times):
            with suppress(ClientDisconnect):
                await browser.app({**scope}, receive, send)

    async def give_up_all() -> None:
        await give_up(1)
        with nothing_left():
            await give_up(10)

    asyncio.run(give_up_all())


@pytest.mark.usefixtures("letters")
def test_the_audit_page_does_not_wait_for_the_disk(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would block the event loop of the service."""
    writing, disk = threading.Event(), threading.Event()

    def fsync(_descriptor: int) -> None:
        writing.set()
        assert disk.wait(60)

    monkeypatch.setattr("reliable_mq.web.operations.os.fsync", fsync)
    browser = page(audit_log=tmp_path / "audit.jsonl")
    with ThreadPoolExecutor(1) as pool:
        try:
            begun = browser.post("/export", data={"queue": QUEUE, "choice": ""})
            assert writing.wait(20)
            assert pool.submit(browser.get, "/audit").result(20).status_code == 200
        finally:
            disk.set()
    ended(browser, begun)


@pytest.mark.usefixtures("letters")
def test_what_cannot_be_logged_does_not_begin(page: Page, broker: MemoryBroker, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    browser = page(allow_changes=True, audit_log=log)
    log.unlink()
    log.mkdir()
    told = ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "replay"}))
    assert "Is a directory" in told
    assert len(broker.queues[QUEUE]) == 10


def test_a_partly_written_audit_entry_fails_and_harms_no_other(tmp_path: Path) -> None:
    """Nothing begins without its entry, so a short write is an error."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.write("begun", "first", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            log.write("begun", "second", {})
        with pytest.raises(OSError, match=re.escape(str(path))):  # File too large
            log.write("begun", "second", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write("begun", "third", {})
    log.write("begun", "fourth", {})
    for each in (log, AuditLog(path)):
        assert [entry["id"] for entry in each.latest()] == ["fourth", "third", "first"]


@pytest.mark.parametrize("place", ["pipe", "/dev/null"])
def test_an_audit_log_is_a_regular_file(place: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to would block, and a device keeps nothing."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"audit_log: .* cannot be written: it is not a regular file"):
        AuditLog(tmp_path / place)


@pytest.mark.usefixtures("letters")
def test_an_operation_that_fails_says_what_became_of_the_letters(page: Page, broker: MemoryBroker) -> None:
    broker.away = True
    browser = page(allow_changes=True)
    told = ended(browser, browser.post("/replay", data={"queue": QUEUE, "choice": "", "go": "replay"}))
    assert "no host could be reached. What was confirmed is out of the queue; everything else is in it." in told


@pytest.mark.usefixtures("letters")
def test_an_edited_letter_leaves_the_queue_after_a_lost_ack(page: Page, broker: MemoryBroker) -> None:
    """Otherwise the next replay would also publish the letter with its old body."""
    broker.fails_at_ack = 1
    browser = page(allow_changes=True, allow_editing=True)
    form = {"queue": QUEUE, "id": first_letter(browser), "body": "mended"}
    assert "Replayed 1 confirmed, and out of the queue" in ended(browser, browser.post("/edit", data=form))
    assert broker.bodies("orders") == [b"mended"]
    assert b'{"order":0}' not in broker.bodies(QUEUE)
    assert len(broker.queues[QUEUE]) == 9


@pytest.mark.usefixtures("letters")
def test_a_replay_whose_acks_fail_does_not_say_the_letters_left(page: Page, broker: MemoryBroker) -> None:
    broker.fails_at_ack, broker.failure = 1, BrokerUnavailable("no host could be reached")
    browser = page(allow_changes=True)
    form = {"queue": QUEUE, "choice": "", "limit": "3", "go": "replay"}
    told = ended(browser, browser.post("/replay", data=form))
    assert len(broker.queues[QUEUE]) == 10
    assert "Replayed 3 confirmed no host could be reached." in told
    assert "out of the queue, except perhaps the last 3; everything else is in it." in told


def test_a_purge_that_fails_says_how_many_it_deleted(page: Page, broker: MemoryBroker, tmp_path: Path) -> None:
    broker.add(QUEUE, *map(letter, range(450)))
    broker.fails_at_ack = 3
    log = tmp_path / "audit.jsonl"
    browser = page(allow_changes=True, audit_log=log)
    form = {"queue": QUEUE, "choice": "", "go": "purge", "name": QUEUE}
    told = ended(browser, browser.post("/purge", data=form))
    assert "At least 400 deleted for good, before it failed." in told
    assert "the connection was lost" in told
    over = json.loads(log.read_text().splitlines()[-1])
    assert (over["outcome"], over["count"]) == ("failed", 400)
    assert "failed: 400" in plain(browser.get("/audit").text)
    assert len(broker.queues[QUEUE]) == 50


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": "excepton=ValueError"}, "'excepton' is not a field of a filter"),
        ({"choice": "exception=ValueError&queue=orders"}, "'queue' is not a field of a filter"),
        ({"exception": "ValueError"}, "choice is missing"),
        ({"choice": "", "which": "selcted"}, "which must be selected or all, not 'selcted'"),
        ({"choice": "header=a%3D1&header=a%3D2"}, "header 'a' is named twice"),
    ],
)
def test_a_misspelt_filter_selects_nothing(page: Page, broker: MemoryBroker, form: dict[str, str], text: str) -> None:
    """It must not select all letters: a form that changes something is refused."""
    browser = page(allow_changes=True)
    for path, fields in (("/replay", {"go": "replay"}), ("/purge", {"go": "purge", "name": QUEUE}), ("/export", {})):
        answer = browser.post(path, data={"queue": QUEUE, **form, **fields})
        assert answer.status_code == 400
        assert text in plain(answer.text)
    assert len(broker.queues[QUEUE]) == 10


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("selected", ["", " "])
def test_selected_letters_without_a_name_are_not_all_letters(page: Page, broker: MemoryBroker, selected: str) -> None:
    browser = page(allow_changes=True)
    for path, fields in (("/replay", {"go": "replay"}), ("/purge", {"go": "purge", "name": QUEUE}), ("/export", {})):
        answer = browser.post(path, data={"queue": QUEUE, "which": "selected", "letter": selected, **fields})
        assert answer.status_code == 400
        assert "no letter is selected" in plain(answer.text)
    assert len(broker.queues[QUEUE]) == 10


def test_an_unfinished_line_of_another_process_spoils_no_entry(tmp_path: Path) -> None:
    """The process was killed, or the disk was full."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.write("begun", "first", {})
    for name, writer in (("second", AuditLog(path)), ("third", log)):
        with path.open("ab") as file:
            file.write(b'{"at": "2026-')
        writer.write("begun", name, {})
    assert [entry["id"] for entry in AuditLog(path).latest()] == ["third", "second", "first"]


def test_an_operation_that_is_forgotten_is_said_so(page: Page) -> None:
    browser = page()
    for path in ("/job?id=x", "/file?id=x", "/job?id=x&part=progress"):
        assert browser.get(path).status_code == 404
