"""The Prefect UI in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page, expect, sync_playwright

#: Of one thing that is waited for; a run of the quickstart takes a while on a busy machine.
WITHIN_MS = 180_000
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    # What a page asks of other hosts than the stack's is not let out.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

expect.set_options(timeout=WITHIN_MS)


def chromium() -> str:
    """The browser's path: `CHROMIUM`, or the first on the path.

    Raises: AssertionError, with the remedy, where there is none.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    assert found, "There is no chromium: apt-get install chromium, or set CHROMIUM to its path."
    return found


@contextmanager
def browser(*, width: int = 1400, height: int = 1000) -> Iterator[BrowserContext]:
    """A browser of somebody who has never seen the UI. It keeps what it has loaded: a page is slow
    the first time."""
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
    """What somebody does in the UI, and sees, who has logged in."""

    def __init__(self, page: Page, url: str, password: str) -> None:
        self.page = page
        self._url = url
        login = b64encode(password.encode()).decode()
        # As its login page does.
        page.add_init_script(f"localStorage.setItem('prefect-password', '{login}')")

    def open(self, path: str = "/") -> Page:
        """A page by its path; it may go on loading."""
        self.page.goto(f"{self._url}{path}", wait_until="commit")
        return self.page

    def open_run(self, id: str, tab: str | None = None) -> Page:
        """A run's page, at one of its tabs or at what it shows first."""
        return self.open(f"/v2/runs/flow-run/{id}{f'?tab={tab}' if tab else ''}")

    def open_form(self, deployment_id: str) -> Locator:
        """The form of a custom run, once it is drawn."""
        self.open(f"/v2/deployments/deployment/{deployment_id}/run")
        expect(self.field("name")).not_to_have_value("")
        expect(self.page.get_by_text("environment (Optional)")).to_be_visible()
        return self.page.locator("form")

    def field(self, label: str, within: Locator | None = None) -> Locator:
        """The first field of the form with this label."""
        return (within or self.page).get_by_label(label, exact=True).first

    def sees(self, *texts: str) -> None:
        """Each of the texts is on the page, or comes to be, in small letters or capital ones: after
        a reload too, since not every part of a page is refreshed by itself."""
        for text in texts:
            self.until(lambda text=text: text.lower() in self.text().lower(), f"{text!r}")  # type: ignore[misc]

    def text(self) -> str:
        """All that the page says, with blanks for line ends."""
        return " ".join(self.page.locator("body").inner_text().split())

    def until(self, condition: Any, what: str) -> None:
        """Wait for the page to show something, reloading it at times."""
        for _ in range(3):
            for _ in range(WITHIN_MS // 3_000):
                if condition():
                    return
                self.page.wait_for_timeout(1_000)
            self.page.reload(wait_until="commit")
        raise AssertionError(f"the page does not show {what}: {self.text()}")

    def pictures(self) -> list[int]:
        """The widths, as drawn, of the pictures with a `data:` address; 0: it is broken."""
        found: list[int] = self.page.evaluate(
            "[...document.images].filter(one => one.src.startsWith('data:'))"
            ".map(one => one.complete ? one.naturalWidth : 0)"
        )
        return found

    def shot(self, path: Path, *, whole: bool = False) -> Path:
        """A picture of what is seen, or of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, full_page=whole)
        return path
