"""Secrets of a run reach its programs, but appear nowhere in the files and messages of Muster."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support.prefect_api import send_request

pytestmark = pytest.mark.slow

#: Three secrets in the spec: two in environment variables with the name HF_TOKEN, and one in a
#: command-line option.
OF_API = "hf-1st-of-the-api"
OF_TRAINER = "hf-2nd-of-the-trainer"
OF_OPTION = "sk-3rd-option"
#: A secret that is not in the spec, but in a Secret block on the Prefect server.
OF_BLOCK = "4th-'of'-\"a block\" ${x}"
#: Beginnings of the secrets. The test searches for these beginnings, so that it also finds escaped
#: or shortened copies of the secrets.
FORMS = ("hf-1st", "hf-2nd", "sk-3rd", "4th-")
API = "import os, time; print('up', os.environ['HF_TOKEN'], flush=True); time.sleep(600)"
TRAINER = """
import os, sys
print(os.environ["DSN"] == sys.stdin.read() or os.environ["DSN"], flush=True)
raise ValueError({"all": [os.environ["HF_TOKEN"], os.environ["DSN"]], "and": sys.argv[1:]})
"""


@pytest.fixture
def block(api: str) -> str:
    """Create a Secret block on the Prefect server, and return its name."""
    name = f"dsn-{uuid4().hex[:8]}"
    with temporary_settings({PREFECT_API_URL: api}):
        Secret(value=OF_BLOCK).save(name)
    return name


def build_spec(block: str) -> dict[str, Any]:
    """Return a spec with secrets for its components. The trainer prints its secrets and fails.

    `block` is the name of the Secret block that contains a further secret.
    """
    return {
        "name": "quiet",
        "workload": "grpo",
        "components": {
            "api": {
                "command": ["python", "-c", API],
                "env": {"HF_TOKEN": OF_API},
                "ready": {"log": "up"},
            },
            "trainer": {
                "command": ["python", "-c", TRAINER, OF_API, "--api-key", OF_OPTION],
                "env": {"HF_TOKEN": OF_TRAINER, "DSN": {"secret": block}},
            },
        },
    }


def test_no_secret_is_in_files_on_the_server_or_on_the_terminal(
    start_run: Callable[..., Any], api: str, block: str
) -> None:
    run = start_run(build_spec(block))

    assert run.wait(within_s=240.0) == 1, run.text()

    flow_run = run.flow_run()
    run_filter = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    # As docs/security.md says, the parameters of a flow run contain all secrets of the spec except
    # the secret of the Secret block. So check the parameters separately, and only for this secret.
    parameters = json.dumps(flow_run.pop("parameters"))
    event_filter = {"related": {"id": [f"prefect.flow-run.{flow_run['id']}"]}}
    published = {
        "flow run": flow_run,
        "task runs": run.task_runs(),
        "states": send_request("GET", f"{api}/flow_run_states/?flow_run_id={flow_run['id']}"),
        "artifacts": send_request("POST", f"{api}/artifacts/filter", run_filter),
        "logs": send_request(
            "POST", f"{api}/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}}
        ),
        "events": send_request("POST", f"{api}/events/filter", {"filter": event_filter}),
        "terminal": run.text(),
    }
    published_texts = {name: json.dumps(content) for name, content in published.items()}
    files = [path for path in run.home.rglob("*") if path.is_file()]
    logs = {path for path in files if path.name in ("api.log", "trainer.log")}
    published_texts |= {str(path): path.read_text(errors="replace") for path in {*files} - logs}
    for name, text in published_texts.items():
        assert not [form for form in FORMS if form in text], f"{name}: {text}"
    assert OF_BLOCK.split()[0] not in parameters and OF_BLOCK[:4] not in parameters
    assert "***" in published_texts["flow run"] and "***" in published_texts["terminal"]
    assert published["events"]["total"] and published["logs"] and published["artifacts"]
    [trainer] = [path.read_text() for path in logs if path.name == "trainer.log"]
    assert OF_BLOCK in trainer.splitlines()


@pytest.mark.thorough
def test_missing_secret_block_is_a_fault_of_the_spec(start_run: Callable[..., Any]) -> None:
    run = start_run(build_spec("no-such-block"))

    assert run.wait() == 2, run.text()
    assert "components.trainer.env.DSN: there is no Prefect Secret block 'no-such-bl" in run.text()
    assert not run.home.exists()


@pytest.mark.thorough
def test_secret_block_without_a_server_is_a_fault_of_the_spec(
    start_run: Callable[..., Any],
) -> None:
    run = start_run(build_spec("a-block"), server=None)

    assert run.wait() == 2, run.text()
    assert "no Prefect server is set" in run.text() and "muster up" in run.text()
    assert not run.home.exists()
