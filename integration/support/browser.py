"""Headless Chromium, and a server for the dead-letter page."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from integration.support.set_up import set_up
from reliable_mq.testing.waiting import wait_until
from reliable_mq.web import DeadLetterApp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser, Download, Page

__all__ = ["SIZES", "Visitor", "chromium", "served"]

_PROGRAM: Final = "/usr/bin/chromium"
_OPTIONS: Final = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
_TIMEOUT: Final = 60_000.0  # milliseconds
SIZES: Final = {"wide": (1200, 900), "narrow": (360, 740)}

# Returns the label of the focused element, and whether the focus is visible.
_FOCUSED: Final = """() => {
    const element = document.activeElement;
    const labelled = (element.labels && element.labels[0]) || element;
    const label = element.getAttribute("aria-label") || labelled.innerText || "";
    const style = getComputedStyle(element);
    return [label.trim(), element.matches(":focus-visible") && style.outlineStyle !== "none"];
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser."""
    set_up("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_PROGRAM, args=_OPTIONS.split(), timeout=_TIMEOUT)
        yield browser
        browser.close()


@contextmanager
def served(url: str, queues: Sequence[str], **options: Any) -> Iterator[str]:
    """Serve the page on a free local port; yield its URL without a trailing slash."""
    app = DeadLetterApp(url, queues, **options)
    config = uvicorn.Config(app, log_config=None, access_log=False, proxy_headers=False, lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert app.close(60)


class Visitor:
    """A user with a separate browser context.

    Args:
        browser: Runs the context. Cookies and cache are not shared.
        address: The URL of the served page.
        dark: Whether the user prefers a dark page.
        size: One of `SIZES`.

    Attributes:
        page: The Playwright page.
        complaints: What the browser reported: errors, refused scripts and styles, dialogs, requests to other servers.
    """

    def __init__(self, browser: Browser, address: str, *, dark: bool = False, size: str = "wide") -> None:
        width, height = SIZES[size]
        self._context = browser.new_context(
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": height},
            accept_downloads=True,
        )
        self._address = address
        self._context.set_default_timeout(_TIMEOUT)
        self.page: Page = self._context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self._complain(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self._check_request(request.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def go(self, path: str) -> Page:
        """Open a path of the page."""
        self.page.goto(self._address + path)
        return self.page

    def tab_to(self, name: str, *, back: bool = False) -> None:
        """Press Tab until the element with this label has the focus; it must be visible."""
        seen = []
        for _ in range(150):
            self.page.keyboard.press("Shift+Tab" if back else "Tab")
            label, visible = self.page.evaluate(_FOCUSED)
            label = " ".join(label.split())
            seen.append(label)
            if label == name:
                assert visible, f"the focus on {name!r} cannot be seen"
                return
        raise AssertionError(f"Tab never came to {name!r}, but to {seen}")

    def press(self, name: str) -> None:
        """Go to a link or button with Tab, press Enter, and wait for the next page."""
        self.tab_to(name)
        self.enter()

    def enter(self) -> None:
        """Press Enter on the focused element, and wait for the next page."""
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")

    def type_into(self, name: str, text: str) -> None:
        """Go to a field with Tab, and type a text."""
        self.tab_to(name)
        self.page.keyboard.type(text)

    def download(self, name: str) -> Download:
        """Go to a link with Tab, press Enter, and return the download."""
        self.tab_to(name)
        with self.page.expect_download() as downloading:
            self.page.keyboard.press("Enter")
        return downloading.value

    def wait_for_text(self, text: str, *, timeout: float = 60) -> None:
        """Wait until the page shows a text, without a reload."""
        self.page.get_by_text(text).first.wait_for(timeout=timeout * 1000)

    def wait_for_reading(self) -> None:
        """Wait until the page lists the dead letters, or shows that there are none.

        Its script has then run, too.
        """
        self.page.locator("table.letters, .empty").first.wait_for()
        self.page.wait_for_load_state()

    def check_accessibility(self) -> int:
        """Check the page with axe-core, and return the number of rules that passed.

        The page must not be wider than the window.
        """
        results = Axe().run(self.page, options={"resultTypes": ["violations", "passes"]})
        assert not results.response["violations"], f"{self.page.url}\n{results.generate_report()}"
        too_wide = self.page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
        assert too_wide <= 0, f"{self.page.url} is {too_wide} pixels too wide"
        return len(results.response["passes"])

    def wait_until_idle(self) -> None:
        """Wait until the operation on the page has ended."""
        wait_until(self._is_over, timeout=90, what="the end of the operation")

    def _is_over(self) -> bool:
        self.page.wait_for_timeout(100)  # Playwright handles browser events during this wait
        return self.page.locator("text=Back to the letters").count() > 0

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning", "assert"):
            self.complaints.append(text)

    def _check_request(self, url: str) -> None:
        if not url.startswith(self._address + "/"):
            self.complaints.append(f"a request to {url}")
