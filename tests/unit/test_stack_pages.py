"""Pages and settings of the UI of a Prefect server that Muster starts."""

from __future__ import annotations

import os
from pathlib import Path

import prefect
import pytest
from prefect.settings import Settings

from deployments.stack.env import NODES_PAGE, POOL, QUEUE_PAGE
from tasks.queue.tables import artifact_keys
from tasks.server.server import make_server_command


def test_pages_of_the_queue_and_the_nodes_show_their_artifacts() -> None:
    pages = [f"/v2/artifacts/key/{key}" for key in artifact_keys(POOL)]

    assert pages == [QUEUE_PAGE, NODES_PAGE]


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
