"""The Prefect UI in a real browser: Debian's chromium, which playwright controls."""

from __future__ import annotations

import os
import shutil
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page, expect, sync_playwright

#: Time limit of each wait, in milliseconds. On a busy machine, a run of the quickstart takes long.
WITHIN_MS = 180_000
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    # The browser may reach only 127.0.0.1, so pages cannot load anything from other hosts.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

expect.set_options(timeout=WITHIN_MS)


def chromium() -> str:
    """Return the path of the browser: from the variable `CHROMIUM`, or from the PATH.

    Raises:
        AssertionError: No browser was found. The message says how to install or select a browser.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    browser_path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    assert browser_path, (
        "There is no chromium: apt-get install chromium, or set CHROMIUM to its path."
    )
    return browser_path


@contextmanager
def browser(*, width: int = 1400, height: int = 1000) -> Iterator[BrowserContext]:
    """Yield a browser without stored settings or cookies, as on the first visit of the UI.

    The browser keeps its cache between pages, because a page loads slowly the first time.
    """
    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=chromium(), args=list(_ARGUMENTS))
        context = chrome.new_context(
            viewport={"width": width, "height": height}, locale="en-GB", timezone_id="UTC"
        )
        context.set_default_timeout(WITHIN_MS)
        context.set_default_navigation_timeout(WITHIN_MS)
        try:
            yield context
        finally:
            chrome.close()


class Ui:
    """The actions of a logged-in user in the UI, and the text that the page shows."""

    def __init__(self, page: Page, url: str, password: str) -> None:
        self.page = page
        self._url = url
        login = b64encode(password.encode()).decode()
        # Log in: store the password in the browser's local storage, under the key that Prefect's
        # login page uses.
        page.add_init_script(f"localStorage.setItem('prefect-password', '{login}')")

    def open(self, path: str = "/") -> Page:
        """Open the page with this path, and return it. The page may still be loading."""
        self.page.goto(f"{self._url}{path}", wait_until="commit")
        return self.page

    def open_run(self, id: str, tab: str | None = None) -> Page:
        """Open the page of a run at the given tab, or at the default tab, and return the page."""
        return self.open(f"/v2/runs/flow-run/{id}{f'?tab={tab}' if tab else ''}")

    def open_form(self, deployment_id: str) -> Locator:
        """Open the form of a custom run, wait until its fields are filled, and return the form."""
        self.open(f"/v2/deployments/deployment/{deployment_id}/run")
        expect(self.field("name")).not_to_have_value("")
        expect(self.page.get_by_text("environment (Optional)")).to_be_visible()
        return self.page.locator("form")

    def field(self, label: str, within: Locator | None = None) -> Locator:
        """Return the first field with this label: in the element `within`, or on the whole page."""
        return (within or self.page).get_by_label(label, exact=True).first

    def sees(self, *texts: str) -> None:
        """Check that each text appears on the page, in upper or lower case.

        The page is reloaded at intervals, because some parts of the page do not refresh themselves.
        """
        for text in texts:
            self.until(lambda text=text: text.lower() in self.text().lower(), f"{text!r}")  # type: ignore[misc]

    def text(self) -> str:
        """Return the whole text of the page, with single spaces instead of line breaks."""
        return " ".join(self.page.locator("body").inner_text().split())

    def until(self, condition: Any, what: str) -> None:
        """Wait until the condition is true, and reload the page at intervals.

        Args:
            condition: Function that returns a true value when the page shows the expected content.
            what: Description of the expected content, for the message of a failure.
        """
        for _ in range(3):
            for _ in range(WITHIN_MS // 3_000):
                if condition():
                    return
                self.page.wait_for_timeout(1_000)
            self.page.reload(wait_until="commit")
        raise AssertionError(f"the page does not show {what}: {self.text()}")

    def pictures(self) -> list[int]:
        """Return the width in pixels of each picture with a `data:` URL on the page.

        The width of a broken picture is 0.
        """
        widths: list[int] = self.page.evaluate(
            "[...document.images].filter(image => image.src.startsWith('data:'))"
            ".map(image => image.complete ? image.naturalWidth : 0)"
        )
        return widths

    def shot(self, path: Path, *, whole: bool = False) -> Path:
        """Save a screenshot of the page, and return the path of the picture.

        Args:
            path: Path of the picture.
            whole: True for the whole page. False for the part that the window shows.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, full_page=whole)
        return path
