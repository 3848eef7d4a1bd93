"""One stack for all tests of the UI, and a browser page for each test.

If a test fails, a screenshot of its page is kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext

pytest.register_assert_rewrite("tests.ui.browsing", "tests.ui.ui_stack")

from tests.ui import browsing  # noqa: E402
from tests.ui.browsing import Ui  # noqa: E402
from tests.ui.ui_stack import UiStack, stack_up  # noqa: E402

_SHOTS = Path(os.environ.get("UI_SHOTS", f"{tempfile.gettempdir()}/muster-ui-shots"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stack", metavar="HOME", help="use the running stack of this MUSTER_HOME")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[UiStack]:
    """Yield a running stack whose work pool has a single node with 2 made-up GPUs."""
    if home := request.config.getoption("--stack"):
        running_stack = UiStack(home=Path(home))
        running_stack.set_nodes()
        yield running_stack
        return
    with stack_up(tmp_path_factory.mktemp("home")) as stack:
        yield stack


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserContext]:
    """Yield a browser for all tests of the session."""
    with browsing.browser() as context:
        yield context


@pytest.fixture
def ui(stack: UiStack, browser: BrowserContext, request: pytest.FixtureRequest) -> Iterator[Ui]:
    """Yield a new page of the browser; if the test fails, save a screenshot of the page."""
    failures_before = request.session.testsfailed
    with closing(browser.new_page()) as page:
        ui = Ui(page, stack.url, stack.password)
        yield ui
        if request.session.testsfailed > failures_before:
            screenshot = ui.shot(_SHOTS / f"{request.node.name}.png", whole=True)
            print(f"screenshot of the page: {screenshot}")
