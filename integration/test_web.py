"""The page for dead letters in a browser.

It is tested by keyboard, with axe, with hostile messages, and while brokers die.
"""

from __future__ import annotations

import http.client
import json
import signal
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

import pytest

from integration.support.browser import SIZES, Visitor, chromium, served
from integration.support.command_line import run_cli, start_cli
from integration.support.seeds import soaking
from reliable_mq import Message, Publisher, Queue
from reliable_mq.core import headers
from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from integration.support.processes import Process
    from reliable_mq.testing import Audit, VirtualHost

pytestmark = pytest.mark.timeout(600)  # a browser on a busy machine
ORDERS = Queue("orders")
DEAD = "orders.dead"
LETTERS = f"/letters?queue={DEAD}"
TOKEN = "a-token-of-some-length"
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' autofocus onfocus=alert(1) x='",
    "</title></textarea></pre></style><svg/onload=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "javascript:alert(1)",
    "{{constructor.constructor('alert(1)')()}}",
    "<b hx-get=/purge hx-trigger=load hx-on::load=alert(1)>",
    "<style>*{display:none}</style><base href=//evil.example/>",
    "\x1b[2J\x1b]0;evil\x07\u202eevil\u2066\u2028",
    "a" * 250,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def letters(count: int) -> list[Message]:
    return [
        Message(
            f'{{"order":{number}}}'.encode(),
            message_id=f"id-{number}",
            content_type="application/json",
            headers={
                headers.FORMAT: 1,
                headers.ORIGINAL_QUEUE: "orders",
                headers.DEAD_LETTER_REASON: "5 of 5 attempts failed",
                headers.EXCEPTION_TYPE: "shop.PaymentTimeout" if number % 3 == 0 else "ValueError",
                headers.EXCEPTION_MESSAGE: f"no {number}",
                headers.ATTEMPTS: 5,
                "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            },
        )
        for number in range(count)
    ]


def publish(vhost: VirtualHost, messages: list[Message]) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        assert publisher.publish_many(messages, routing_key=DEAD).ok


@contextmanager
def started(vhost: VirtualHost, *options: str) -> Iterator[tuple[Process, str]]:
    """Run ``reliable-mq web`` on a free port; return the process and the address."""
    with start_cli("web", vhost.url, "--port", "0", *options) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().decode().split()[0]
        finally:
            process.kill()


def asked(address: str, path: str, form: dict[str, str] | None = None, **headers: str) -> tuple[int, str, str]:
    """Request a page or send a form; return status, final address and page."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(address).port, timeout=60)
    data = None if form is None else urlencode(form)
    sent = {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-origin", **headers}
    connection.request("GET" if data is None else "POST", path, data, sent)
    answer = connection.getresponse()
    told = answer.status, answer.getheader("Location", ""), answer.read().decode()
    connection.close()
    return told


@pytest.mark.soak
def test_each_task_is_done_by_keyboard_alone(vhost: VirtualHost, browser: Browser, tmp_path: Path) -> None:
    """Browse, filter, open, export, replay, edit and delete by key presses."""
    publish(vhost, letters(12))
    log = tmp_path / "audit.jsonl"
    options = {"allow_changes": True, "allow_editing": True, "audit_log": log}
    with served(vhost.url, [DEAD], **options) as address, Visitor(browser, address) as user:
        user.go("/")
        user.press(DEAD)
        user.wait_for_reading()
        user.type_into("Exception", "*Timeout")
        user.enter()
        assert "exception=*Timeout" in user.page.url.replace("%2A", "*")
        assert user.page.locator("table.letters tbody tr").count() == 4
        user.tab_to("Select letter 1")
        user.page.keyboard.press("Space")
        user.tab_to("Select letter 4")
        user.page.keyboard.press("Space")
        assert user.page.locator("#selected").inner_text() == "2 selected"
        user.press("Replay selected…")
        user.press("Dry run")
        user.wait_until_idle()
        user.press("Replay 2 now")
        user.wait_until_idle()
        user.wait_for_text("confirmed, and out of the queue")
        assert vhost.live_counts()["orders"] == 2

        user.press("Back to the letters")
        user.wait_for_reading()
        user.press("id-1")
        assert user.page.get_by_text("4bf92f3577b34da6a3ce929d0e0e4736", exact=True).count() == 1
        user.press("hex")
        assert "7b 22 6f 72 64 65 72 22" in user.page.locator("pre.body").inner_text()
        user.press("Edit and replay…")
        user.tab_to("Body")
        user.page.keyboard.press("Control+A")
        user.page.keyboard.type('{"order": "mended"}')
        user.press("Replay with this body")
        user.wait_until_idle()
        with DeadLetterQueue(vhost.url, "orders") as queue:
            assert {message.body for message in queue.browse()} == {
                b'{"order":0}',
                b'{"order":3}',
                b'{"order": "mended"}',
            }

        user.press("Back to the letters")
        user.wait_for_reading()
        user.press("Export all 9")
        user.wait_until_idle()
        lines = user.download("Download 9 letters").path().read_text().splitlines()
        exported = {json.loads(line)["message_id"] for line in lines}
        assert exported == {f"id-{number}" for number in range(12)} - {"id-0", "id-3", "id-1"}

        user.press(DEAD)
        user.wait_for_reading()
        user.press("Delete all 9…")
        user.type_into(f"Type the name of the queue, {DEAD}, to delete", DEAD)
        user.enter()
        user.wait_until_idle()
        user.wait_for_text("deleted for good")
        assert vhost.live_counts()[DEAD] == 0
        user.press("Audit log")
        told = user.page.locator("table").inner_text()
        assert all(f"{each} ended" in told for each in ("replay", "export", "purge"))
        assert not user.complaints
    events = [json.loads(line) for line in log.read_text().splitlines()]
    ended = [event["operation"] for event in events if event["event"] == "ended"]
    assert ended == ["replay", "replay", "export", "purge"]


@pytest.mark.soak
def test_every_other_task_is_done_by_keyboard_alone(vhost: VirtualHost, browser: Browser) -> None:
    """The remaining tasks work by key presses, too.

    These are signing in, opening, turning pages, choosing a group, replaying with all options, stopping, reading
    again, selecting, and signing out.
    """
    publish(vhost, letters(60))
    with Publisher(vhost.url, topology=[Queue("retries")]):
        pass
    options = {"any_queue": True, "allow_changes": True, "token": TOKEN}
    with served(vhost.url, [], **options) as address, Visitor(browser, address) as user:
        shown = user.page.locator
        user.go("/")
        user.type_into("Your name, for the audit log", "Ada")
        user.type_into("Token", TOKEN)
        user.enter()
        user.type_into("Open a queue by its name", DEAD)
        user.enter()
        user.wait_for_reading()
        user.press("Next →")
        assert shown("table.letters tbody tr").count() == 10
        user.press("← Previous")
        assert shown("table.letters tbody tr").count() == 50
        user.press("shop.PaymentTimeout")
        assert shown("#letters").inner_text().startswith("20 letters")
        user.press("id-0")
        user.press("Next →")
        assert shown("h1").inner_text() == "id-3"
        user.press("← Previous")
        assert shown("h1").inner_text() == "id-0"
        user.press(DEAD)

        user.press("Replay all 20…")
        user.type_into("Name of the other queue", "retries")
        user.type_into("Letters per second, at most", "0.5")
        user.type_into("Number of letters, at most", "19")
        user.press("Replay")
        user.wait_for_text("· to retries · 0.5 per second · 19 at most")
        wait_until(lambda: vhost.live_counts()["retries"] > 1, timeout=60, what="two letters")
        user.press("Stop")
        user.wait_until_idle()
        assert shown(".state").inner_text().startswith("Stopped")
        replayed = vhost.live_counts()["retries"]
        assert replayed < 19
        assert vhost.live_counts()[DEAD] == 60 - replayed

        user.press("Back to the letters")
        user.wait_for_reading()
        assert shown("#letters").inner_text().startswith(f"{20 - replayed} letters")
        publish(vhost, letters(61)[60:])
        user.press("Read again")
        assert shown("#letters").inner_text().startswith(f"{21 - replayed} letters")

        user.press("Show all")
        first_two = shown("table.letters tbody a").all_inner_texts()[:2]
        for number in (1, 2):
            user.tab_to(f"Select letter {number}")
            user.page.keyboard.press("Space")
        user.press("Export selected")
        user.wait_until_idle()
        lines = user.download("Download 2 letters").path().read_text().splitlines()
        assert [json.loads(line)["message_id"] for line in lines] == first_two
        user.press("Back to the letters")
        user.wait_for_reading()
        user.tab_to("Select all letters on this page")
        user.page.keyboard.press("Space")
        assert shown("#selected").inner_text() == "50 selected"
        user.page.keyboard.press("Space")
        first = shown("table.letters tbody a").first.inner_text()
        user.tab_to("Select letter 1")
        user.page.keyboard.press("Space")
        user.press("Delete selected…")
        user.type_into(f"Type the name of the queue, {DEAD}, to delete", DEAD)
        user.enter()
        user.wait_until_idle()
        user.wait_for_text("1 deleted for good")
        with DeadLetterQueue(vhost.url, DEAD) as queue:
            left = {message.message_id for message in queue.browse()}
        assert len(left) == 60 - replayed
        assert first not in left
        user.press("Audit log")
        assert "Ada (127.0.0.1)" in shown("table").inner_text()
        user.press("Sign out")
        assert shown("h1").inner_text() == "Sign in"
        assert user.go("/audit").locator("h1").inner_text() == "Sign in"
        assert not user.complaints


@pytest.mark.soak
@pytest.mark.parametrize("size", ["narrow", "wide"])
@pytest.mark.parametrize("dark", [True, False])
def test_axe_finds_nothing(vhost: VirtualHost, browser: Browser, dark: bool, size: str) -> None:
    """No page, in any state, is wider than the window."""
    publish(vhost, letters(60))
    vhost_with_mail = [DEAD, "orders", "missing.dead"]
    passed = []
    options = {"allow_changes": True, "allow_editing": True}
    with (
        served(vhost.url, vhost_with_mail, **options) as address,
        Visitor(browser, address, dark=dark, size=size) as user,
    ):
        assert user.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == dark
        user.go(LETTERS)
        user.wait_for_reading()
        one = user.page.locator("input[name=letter]").first.get_attribute("value")
        user.page.locator("input[name=letter]").first.check()
        passed.append(user.check_accessibility())
        for path in (
            "/",
            f"{LETTERS}&exception=*Timeout&page=1",
            f"{LETTERS}&group=exception%3Dshop.PaymentTimeout%26reason%3D5+of+5+attempts+failed",
            f"{LETTERS}&older-than=soon",
            f"{LETTERS}&reason=nothing",
            f"/letter?queue={DEAD}&id={one}",
            f"/letter?queue={DEAD}&id=0",
            f"/edit?queue={DEAD}&id={one}",
            "/letters?queue=orders",
            "/letters?queue=missing.dead",
            "/audit",
            "/nothing",
        ):
            user.go(path)
            passed.append(user.check_accessibility())
        for button in ("Replay…", "Delete…"):
            user.go(f"/letter?queue={DEAD}&id={one}")
            user.page.get_by_role("button", name=button, exact=True).click()
            passed.append(user.check_accessibility())
        user.go(LETTERS)
        user.page.get_by_role("button", name="Replay all 60…").click()
        user.page.get_by_role("button", name="Dry run").click()
        user.wait_until_idle()
        passed.append(user.check_accessibility())
    with (
        served(vhost.url, [DEAD], token=TOKEN) as address,
        Visitor(browser, address, dark=dark, size=size) as user,
    ):
        user.go("/")
        passed.append(user.check_accessibility())
        user.page.get_by_label("Your name").fill("Ada")
        user.page.get_by_label("Token").fill(TOKEN)
        user.page.get_by_role("button", name="Sign in").click()
        user.page.get_by_role("link", name=DEAD).wait_for()
        passed.append(user.check_accessibility())
    assert len(passed) == 18
    assert min(passed) > 10
    print(f"axe: {len(passed)} pages, {sum(passed)} rules passed, no violation")


def test_a_telephone_loses_nothing_of_a_table(vhost: VirtualHost, browser: Browser) -> None:
    """Rows are shown as lists on a narrow screen.

    All can be selected, empty cells have no label, and values are aligned.
    """
    publish(vhost, letters(3))
    with served(vhost.url, [DEAD, "missing.dead"]) as address, Visitor(browser, address, size="narrow") as user:
        user.go(LETTERS)
        user.wait_for_reading()
        user.page.get_by_text("All on this page").click()
        assert user.page.locator("#selected").inner_text() == "3 selected"
        indents = user.page.locator(".letters td[data-label]").evaluate_all("""cells => cells.map(cell => {
            const text = document.createRange();
            text.selectNodeContents(cell);
            return text.getBoundingClientRect().left - cell.getBoundingClientRect().left;
        })""")
        assert len(indents) == 3 * 7
        assert len(set(indents)) == 1, indents
        user.go("/")
        assert user.page.get_by_role("row").filter(has_text="missing.dead").locator("td:visible").count() == 1


def test_hostile_messages_run_no_script(vhost: VirtualHost, browser: Browser) -> None:
    """Wherever the text is, it makes no request and hides nothing."""
    messages = []
    for text in HOSTILE:
        table: dict[str, object] = {
            headers.FORMAT: 1,
            headers.ORIGINAL_QUEUE: text,
            headers.ORIGINAL_EXCHANGE: text,
            headers.DEAD_LETTER_REASON: text,
            headers.EXCEPTION_TYPE: text,
            headers.EXCEPTION_MESSAGE: text * 3,
            headers.CONSUMER: text,
            text[:100]: [{text[:100]: text}, text.encode() + b"\xff"],
        }
        messages.append(
            Message(text.encode(), headers=table, message_id=text, content_type=text, type=text, app_id=text)  # type: ignore[arg-type]
        )
        messages.append(Message(json.dumps({text: [text]}).encode(), headers=table, message_id=text))  # type: ignore[arg-type]
    publish(vhost, messages)
    pages = 0
    options = {"allow_changes": True, "allow_editing": True}
    with (
        served(vhost.url, [DEAD], **options) as address,
        Visitor(browser, address, size="narrow") as user,
    ):
        user.go(LETTERS)
        user.wait_for_reading()
        assert user.page.locator("table.letters tbody tr").count() == len(messages)
        too_wide = "document.scrollingElement.scrollWidth - window.innerWidth"
        ids = [box.get_attribute("value") for box in user.page.locator("input[name=letter]").all()]
        forms = [f"letter?queue={DEAD}&as=json", f"letter?queue={DEAD}&as=text", f"edit?queue={DEAD}"]
        paths = [f"/{form}&id={one}" for one in ids for form in forms]
        if not soaking():
            del paths[::2]  # each text is in two letters, and each form shows one of them
        for path in ["/", LETTERS, *paths]:
            user.go(path)
            pages += 1
            assert user.page.evaluate(too_wide) <= 0, path
        links = user.go(LETTERS).locator("table.groups a").evaluate_all("links => links.map(link => link.href)")
        assert links
        for link in links:
            user.page.goto(link)
            pages += 1
            assert user.page.locator("table.letters tbody tr").count() == 2
            assert user.page.evaluate(too_wide) <= 0, link
        user.go(LETTERS).get_by_role("button", name=f"Replay all {len(messages)}…").click()
        user.page.get_by_role("button", name="Replay", exact=True).click()
        user.wait_until_idle()
        assert user.page.locator("h2", has_text="What failed").count() == 1
        user.go("/audit")
        refused = [each for each in user.complaints if "409" not in each]
        assert not refused
    assert vhost.live_counts()[DEAD] == len(messages)
    print(f"{len(messages)} hostile messages on {pages} pages: no script ran")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_100_000_letters_are_read_in_proportion(vhost: VirtualHost, browser: Browser, size: str) -> None:
    publish(vhost, letters(100_000))
    with served(vhost.url, [DEAD], allow_changes=True) as address, Visitor(browser, address, size=size) as user:
        user.go(LETTERS)
        user.wait_for_text("Reading the queue")
        user.page.locator("table.letters").wait_for(timeout=600_000)
        user.go(f"{LETTERS}&exception=*Timeout&page=600")
        assert user.page.locator("#letters").inner_text().startswith("33,334 letters")
        user.go(LETTERS).get_by_role("button", name="Export all 100,000").click()
        user.page.get_by_role("link", name="Download 100,000 letters").wait_for(timeout=600_000)


@pytest.mark.soak
def test_a_broker_that_dies_in_mid_replay_loses_nothing(
    private_vhost: VirtualHost, browser: Browser, checker: Audit
) -> None:
    """The replay continues, or reports its end and is started again."""
    messages = letters(1500)
    publish(private_vhost, messages)
    for message in messages:
        checker.attempted(message.message_id)
        checker.confirmed(message.message_id)
    with served(private_vhost.url, [DEAD], allow_changes=True) as address, Visitor(browser, address) as user:
        user.go(LETTERS)
        user.wait_for_reading()
        user.page.get_by_role("button", name="Replay all 1,500…").click()
        user.page.get_by_label("Letters per second, at most").fill("200")
        user.page.get_by_role("button", name="Replay", exact=True).click()
        wait_until(lambda: "of 1,500 letters read" in user.page.content(), timeout=60, what="progress")
        private_vhost.broker.kill()
        private_vhost.broker.start()
        for _ in range(5):
            user.wait_until_idle()
            if user.page.locator(".state.done").count():
                break
            user.wait_for_text("replay again to go on")
            user.page.get_by_role("button", name="Change the options…").click()
            user.page.get_by_label("Letters per second, at most").fill("")
            user.page.get_by_role("button", name="Replay", exact=True).click()
    checker.drain(private_vhost, ["orders"], dead_letters=[DEAD])
    assert len(checker.close().duplicated) <= 5 * 200


def test_a_page_that_is_killed_in_mid_replay_loses_nothing(vhost: VirtualHost, checker: Audit) -> None:
    """Each letter is in its queue or its target, and a second page continues."""
    messages = letters(1200)
    publish(vhost, messages)
    for message in messages:
        checker.attempted(message.message_id)
        checker.confirmed(message.message_id)
    form = {"queue": DEAD, "choice": "", "go": "replay"}
    with started(vhost, DEAD, "--allow-changes") as (process, address):
        assert asked(address, "/replay", {**form, "rate": "50"})[0] == 303  # it takes longer than any pause
        wait_until(lambda: vhost.live_counts()["orders"] >= 75, timeout=60, what="the middle of the replay")
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    vhost.wait_for_consumers(DEAD, 0)
    with DeadLetterQueue(vhost.url, DEAD) as left, DeadLetterQueue(vhost.url, "orders") as replayed:
        found = [{message.message_id for message in queue.browse()} for queue in (left, replayed)]
    assert found[0] | found[1] == {message.message_id for message in messages}
    assert all(found)
    with started(vhost, DEAD, "--allow-changes") as (_, address):
        _, job, _ = asked(address, "/replay", form)
        wait_until(lambda: ">Done<" in asked(address, job)[2], timeout=60, what="the end of the replay")
        assert f"Replayed</dt><dd><strong>{len(found[0])}<" in asked(address, job)[2].replace(",", "")
    checker.drain(vhost, ["orders"], dead_letters=[DEAD])
    assert len(checker.close().duplicated) <= 50


@pytest.mark.soak
def test_two_people_replay_at_once(vhost: VirtualHost, browser: Browser, checker: Audit) -> None:
    """Replays run one after another in a process, and together in two processes.

    Each letter is replayed once.
    """
    messages = letters(900)
    publish(vhost, messages)
    for message in messages:
        checker.attempted(message.message_id)
        checker.confirmed(message.message_id)
    with (
        served(vhost.url, [DEAD], allow_changes=True) as here,
        served(vhost.url, [DEAD], allow_changes=True) as there,
        Visitor(browser, here) as ada,
        Visitor(browser, here) as grace,
        Visitor(browser, there) as mary,
    ):
        people = (ada, grace, mary)
        for person in people:
            person.go(LETTERS)
            person.wait_for_reading()
            person.page.locator("button[value=all]").first.click()
            person.page.get_by_label("Letters per second, at most").fill("300")
        for person in people:
            person.page.get_by_role("button", name="Replay", exact=True).click()
        for person in people:
            person.wait_until_idle()
            assert person.page.locator(".state.done").count() == 1, person.page.content()
        ada.go(LETTERS)
        ada.wait_for_reading()
        while ada.page.locator(".empty").count() == 0:
            ada.page.locator("button[value=all]").first.click()
            ada.page.get_by_role("button", name="Replay", exact=True).click()
            ada.wait_until_idle()
            ada.go(LETTERS)
            ada.wait_for_reading()
    checker.drain(vhost, ["orders"], dead_letters=[DEAD])
    balance = checker.close()
    assert not balance.duplicated


def test_the_command_serves_the_page_until_a_signal(vhost: VirtualHost) -> None:
    """Without names, the page lists the queues of the management API.

    It ends cleanly on SIGTERM and on Ctrl-C. An IPv4-mapped address is the IPv4 address in it.
    """
    publish(vhost, letters(3))
    management = ("--management-url", vhost.broker.management.url)
    for host, number, status in (("127.0.0.1", signal.SIGTERM, 0), ("::ffff:127.0.0.1", signal.SIGINT, 130)):
        with start_cli("web", vhost.url, "--host", host, "--port", "0", *management) as process:
            assert process.stdout is not None
            address = process.stdout.readline().decode().split()[0]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=60) as answer:
                page = answer.read().decode()
            assert DEAD in page
            assert "guest:guest" not in page
            process.send_signal(number)
            assert process.wait(60) == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::ffff:0.0.0.0"])
def test_the_command_listens_elsewhere_with_a_token_only(vhost: VirtualHost, host: str) -> None:
    done = run_cli("web", vhost.url, DEAD, "--host", host, "--port", "0")
    assert done.returncode == 2
    assert "is not a loopback address: set RELIABLE_MQ_WEB_TOKEN" in " ".join(
        done.stderr.decode().replace("│", " ").split()
    )


def test_the_options_of_the_command_are_in_effect(vhost: VirtualHost, tmp_path: Path) -> None:
    """All addresses, a token, a name, changes, editing and an audit log are set."""
    publish(vhost, letters(3))
    log, secret = tmp_path / "audit.jsonl", tmp_path / "token"
    secret.write_text(f"{TOKEN}\n")
    options = (DEAD, "--host", "0.0.0.0", "--allow-changes", "--allow-editing", "--audit-log", str(log))
    known = {"Host": "shop.example", "Authorization": f"Bearer {TOKEN}"}
    form = {"queue": DEAD, "choice": "message-id=id-1", "go": "replay"}
    with started(vhost, *options, "--token-file", str(secret), "--allowed-host", "shop.example") as (process, address):
        assert asked(address, "/", **{**known, "Host": "evil.example"})[0] == 421
        assert asked(address, "/", Host="shop.example")[:2] == (303, "/sign-in")
        assert asked(address, "/replay", form, Host="shop.example")[0] == 401
        wait_until(lambda: "id-1" in asked(address, LETTERS, **known)[2], timeout=60, what="the letters")
        with DeadLetterQueue(vhost.url, DEAD) as dead:
            one = next(iter(dead.browse())).fingerprint
        assert "Replay with this body" in asked(address, f"/edit?queue={DEAD}&id={one}", **known)[2]
        assert not log.read_text()
        for more in ({"target": "queue", "to": "nowhere"}, {}):
            status, job, _ = asked(address, "/replay", form | more, **known)
            assert status == 303
            wait_until(lambda: ">Done<" in asked(address, job, **known)[2], timeout=60, what="the end of a replay")  # noqa: B023
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""  # the page shows the errors
    assert vhost.bodies("orders") == [("id-1", b'{"order":1}')]
    begun, ended = map(json.loads, log.read_text().splitlines()[2:])
    assert (begun["event"], begun["operation"], begun["user"]) == ("begun", "replay", "bearer of the token (127.0.0.1)")
    assert (ended["event"], ended["outcome"], ended["replayed"]) == ("ended", "done", 1)


def test_a_button_that_is_pressed_twice_acts_once(vhost: VirtualHost, browser: Browser) -> None:
    """Otherwise a slow first answer would let a replay exceed its limit."""
    publish(vhost, letters(5))
    with served(vhost.url, [DEAD], allow_changes=True) as address, Visitor(browser, address) as user:
        user.go(LETTERS)
        user.wait_for_reading()
        with user.page.expect_navigation():  # its end is also that of the page's script
            user.page.get_by_role("button", name="Replay all 5…").click()
        stopped = user.page.get_by_role("button", name="Replay", exact=True).evaluate("""button => {
            const stopped = [];
            addEventListener("submit", event => { stopped.push(event.defaultPrevented); event.preventDefault(); });
            button.click();
            button.click();
            return stopped;
        }""")
        assert stopped == [False, True]


def test_a_page_says_its_server_is_gone_and_goes_on_afterwards(vhost: VirtualHost, browser: Browser) -> None:
    """Otherwise an operator would wait for a replay that seems to run forever."""
    publish(vhost, letters(5))
    form = {"queue": DEAD, "choice": "", "go": "replay", "rate": "0.001"}
    with started(vhost, DEAD, "--allow-changes") as (process, address), Visitor(browser, address.rstrip("/")) as user:
        user.go(asked(address, "/replay", form)[1])
        user.wait_for_text("Running")
        assert not user.page.locator("#silent").is_visible()
        process.kill()
        user.page.locator("#silent").wait_for()
        with started(vhost, DEAD, "--port", str(urlsplit(address).port)):
            user.wait_for_text("This page no longer keeps this operation.")


def test_reading_counts_as_dlq_list_does(vhost_40: VirtualHost) -> None:
    """RabbitMQ 4.0 counts each read against a delivery limit.

    Any number of pages is one read.
    """
    with vhost_40.connect() as connection:
        arguments = {"x-queue-type": "quorum"}  # with RabbitMQ's limit of 20
        connection.channel().queue_declare(DEAD, durable=True, arguments=arguments)
    with Publisher(vhost_40.url) as publisher:
        assert publisher.publish_many(letters(5), routing_key=DEAD).ok
    with served(vhost_40.url, [DEAD]) as address:
        for path in ("/", "/?part=list", LETTERS, "/", f"{LETTERS}&exception=*Timeout", f"{LETTERS}&page=2"):
            with urllib.request.urlopen(address + path, timeout=60) as answer:
                assert answer.status == 200
        wait_until(lambda: "id-0" in asked(address, LETTERS)[2], timeout=60, what="the end of the reading")
    with DeadLetterQueue(vhost_40.url, DEAD) as dead:
        assert {message.delivery_count for message in dead.browse()} == {1}
