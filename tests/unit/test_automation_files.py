"""The automations of deployments/automations/, as far as they can be judged without a server."""

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
        # without a block, that it has fired is an event all the same
        ((), ["do-nothing"]),
        # two of the name, of different types
        ((UUID(int=1), UUID(int=2)), ["send-notification", "send-notification"]),
    ],
)
def test_each_file_is_an_automation_that_the_server_takes(
    path: Path, blocks: tuple[UUID, ...], actions: list[str]
) -> None:
    automation = read(path, blocks)

    content = automation.model_dump(mode="json", exclude_unset=True)
    taken = AutomationCreate.model_validate(content)
    assert [action.type for action in taken.actions] == actions
    assert taken.name.startswith("Muster: ")


def test_a_digest_tells_what_an_automation_does_not_whether_it_is_on() -> None:
    wanted = read(FILES[0], ())
    same = AutomationCore.model_validate({**wanted.model_dump(mode="json"), "id": str(uuid4())})
    off = wanted.model_copy(update={"enabled": False, "tags": ["theirs"]})
    other = wanted.model_copy(update={"description": "theirs"})

    assert digest(same) == digest(off) == digest(wanted) != digest(other)


@pytest.mark.parametrize(
    "text",
    [
        # no YAML
        "name: [",
        # nothing at all
        "",
        # nothing to be told
        "name: a\ntrigger: {type: event}\n",
        # no such trigger
        "name: a\ntrigger: {type: dance}\nnotification: {subject: s, body: b}\n",
        # less than Prefect takes
        "name: a\ntrigger: {posture: Proactive, within: 3}\nnotification: {subject: s, body: b}\n",
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    with pytest.raises(BadAutomation, match=r"broken\.yaml"):
        read(path, ())


def test_without_a_server_nothing_is_started_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code = main([])

    assert code == 1
    assert "PREFECT_API_URL" in capsys.readouterr().err
