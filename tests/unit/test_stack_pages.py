"""Pages and settings of the UI of a Prefect server that Muster starts."""

from __future__ import annotations

import os
from pathlib import Path

import prefect
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_UI_URL, Settings, temporary_settings

from deployments.stack.env import NODES_PAGE, POOL, QUEUE_PAGE
from tasks.queue.tables import artifact_keys
from tasks.server.server import find_page_url, make_server_command


def test_pages_of_the_queue_and_the_nodes_show_their_artifacts() -> None:
    pages = [f"/v2/artifacts/key/{key}" for key in artifact_keys(POOL)]

    assert pages == [QUEUE_PAGE, NODES_PAGE]


@pytest.mark.parametrize(
    ("ui_url", "page"),
    [
        ("http://h:4200", "http://h:4200/v2/runs/flow-run/1"),
        ("http://h:4200/", "http://h:4200/v2/runs/flow-run/1"),
        ("http://h/prefect", "http://h/prefect/v2/runs/flow-run/1"),
        ("http://h:4200/v2", "http://h:4200/v2/runs/flow-run/1"),
        # Prefect Cloud has only one UI.
        (
            "https://app.prefect.cloud/account/a/workspace/b",
            "https://app.prefect.cloud/account/a/workspace/b/runs/flow-run/1",
        ),
    ],
)
def test_page_of_a_run_is_in_the_ui_with_a_login_form(ui_url: str, page: str) -> None:
    with temporary_settings({PREFECT_UI_URL: ui_url}):
        assert find_page_url("flow-run", 1) == page


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        ("flow-run", "/runs/flow-run/$id"),
        ("deployment", "/deployments/deployment/$id"),
    ],
)
@pytest.mark.parametrize(("password", "login"), [(None, ""), ("user:secret", "/login?redirectTo=")])
def test_ui_of_the_installed_prefect_has_the_pages_to_which_muster_links(
    kind: str, route: str, password: str | None, login: str
) -> None:
    with temporary_settings({PREFECT_UI_URL: "http://h", PREFECT_API_AUTH_STRING: password}):
        page = find_page_url(kind, "$id")

    scripts = Path(prefect.__ui_v2_static_path__).glob("assets/*.js")

    assert page == f"http://h/v2{login}{route}"
    assert any(f"`{route}`" in script.read_text() for script in scripts)


def test_ui_of_the_installed_prefect_has_a_page_for_an_artifact_key() -> None:
    scripts = Path(prefect.__ui_v2_static_path__).glob("assets/*.js")

    assert any("`/artifacts/key/$key`" in script.read_text() for script in scripts)


def test_server_sends_no_usage_data_and_shows_no_advertisements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (name for name in os.environ if name.startswith("PREFECT_")):
        monkeypatch.delenv(name)
    for name, value in make_server_command(tmp_path, 4200).env.items():
        monkeypatch.setenv(name, value)

    server = Settings().server

    assert (server.analytics_enabled, server.ui.show_promotional_content) == (False, False)
