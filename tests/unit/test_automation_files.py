"""Checks of the automations of deployments/automations/ that need no Prefect server."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.events.schemas.automations import AutomationCore
from prefect.server.events.schemas.automations import AutomationCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.automations.apply import FOLDER, BadAutomation, digest, main, read

FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("blocks", "actions"),
    [
        # No notification block exists, so the action of the automation is `do-nothing`.
        ((), ["do-nothing"]),
        # Two notification blocks exist, for example for Slack and for e-mail. The automation sends
        # a message to both blocks.
        ((UUID(int=1), UUID(int=2)), ["send-notification", "send-notification"]),
    ],
)
def test_each_file_is_an_automation_that_the_server_accepts(
    path: Path, blocks: tuple[UUID, ...], actions: list[str]
) -> None:
    automation = read(path, blocks)

    content = automation.model_dump(mode="json", exclude_unset=True)
    accepted = AutomationCreate.model_validate(content)
    assert [action.type for action in accepted.actions] == actions
    assert accepted.name.startswith("Muster: ")


def test_digest_depends_on_the_content_but_not_on_the_enabled_state() -> None:
    automation = read(FILES[0], ())
    with_id = {**automation.model_dump(mode="json"), "id": str(uuid4())}
    same = AutomationCore.model_validate(with_id)
    disabled = automation.model_copy(update={"enabled": False, "tags": ["theirs"]})
    other = automation.model_copy(update={"description": "theirs"})

    assert digest(same) == digest(disabled) == digest(automation) != digest(other)


@pytest.mark.parametrize(
    "text",
    [
        # the file is invalid YAML
        "name: [",
        # the file is empty
        "",
        # the file has no notification
        "name: a\ntrigger: {type: event}\n",
        # the type of the trigger is unknown
        "name: a\ntrigger: {type: dance}\nnotification: {subject: s, body: b}\n",
        # a trigger period of 3 s, which Prefect rejects as too short
        "name: a\ntrigger: {posture: Proactive, within: 3}\nnotification: {subject: s, body: b}\n",
    ],
)
def test_error_about_an_invalid_file_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    with pytest.raises(BadAutomation, match=r"broken\.yaml"):
        read(path, ())


def test_apply_fails_if_no_server_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code = main([])

    assert code == 1
    assert "PREFECT_API_URL" in capsys.readouterr().err
