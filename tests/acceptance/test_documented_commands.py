"""All commands of the documents work when they are typed in their order, on a stack of the tests.

The tests type each line of a block ```console. The output of a block ```console exact must match.
`NOT_TYPED` names the commands that cannot run here, with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tasks.processes.ports import PortsReserved
from tests.support.documents import ROOT, Block, Document, list_documents

#: Commands that the test does not run. A key is the path of a document and the beginning of the
#: command. The value is the reason.
NOT_TYPED: dict[tuple[str, str], str] = {
    (
        "docs/ray.md",
        ".venv/bin/muster train deployments/runs/verl-grpo.yaml",
    ): "needs a cluster with GPUs and verl",
    ("docs/notifications.md", ".venv/bin/python -c"): "needs the address of a webhook",
    ("README.md", "make test"): "would run this test again",
}
#: Mapping from the beginning of a documented command to its expected exit code. All other commands
#: must exit with 0.
EXITS: dict[str, int] = {}
#: Time limit of a command in seconds. The limit is long enough for a busy machine.
WITHIN_S = 400.0

PAGES = [page for page in list_documents() if page.commands("console")]


def find_reason_not_to_type(page: Document, command: str) -> str:
    """Return the reason why the test must not run a command of a page.

    Returns:
        The reason, or an empty string if the test must run the command.
    """
    reasons = [
        reason
        for (name, beginning), reason in NOT_TYPED.items()
        if name == str(page) and command.startswith(beginning)
    ]
    return reasons[0] if reasons else ""


def test_every_exception_names_a_command_of_the_documents() -> None:
    documented_commands = {
        (str(page), console_command.command)
        for page in PAGES
        for console_command in page.commands("console")
    }

    stale = [
        (name, beginning)
        for name, beginning in NOT_TYPED
        if not any(
            name == page and command.startswith(beginning) for page, command in documented_commands
        )
    ]

    assert not stale


@dataclass
class Reader:
    """A simulated reader, who types the commands of the documents into a shell."""

    #: Directory that contains MUSTER_HOME and PREFECT_HOME.
    home: Path
    #: Port of the Prefect server.
    port: int
    env: dict[str, str] = field(default_factory=dict)
    dashboard: str = "http://127.0.0.1:8265"

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command with a shell in the root of the project, and wait for its end."""
        if match := re.fullmatch(r"export (\w+)=(\S+)", command):
            self.env[match[1]] = shlex.split(self._adapt(match[2]))[0]
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.run(
            ("bash", "-c", self._adapt(command)),
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WITHIN_S,
        )

    def _adapt(self, command: str) -> str:
        """Return a documented command with changed ports and names.

        The new ports are the ports of this stack. The name of the newest run replaces the word RUN.
        """
        command = command.replace("127.0.0.1:4200", f"127.0.0.1:{self.port}")
        command = command.replace("http://127.0.0.1:8265", self.dashboard)
        command = re.sub(r"^(make (?:up|down))\b", rf"\1 PORT={self.port}", command)
        command = re.sub(r"^(\S*muster (?:up|down))\b", rf"\1 --port {self.port}", command)
        if "runs/quickstart-ray.yaml" in command:
            command += f" --set ray.address={self.dashboard}"
        if re.search(r"\bRUN\b", command):
            command = re.sub(r"\bRUN\b", self._last_run(), command)
        return command

    def _last_run(self) -> str:
        """Return the name of the flow run of `train` that started last.

        Flow runs that are only scheduled do not count.
        """
        query = {
            "flows": {"name": {"any_": ["train"]}},
            "flow_runs": {"start_time": {"is_null_": False}},
            "sort": "START_TIME_DESC",
            "limit": 1,
        }
        login = b64encode((self.home / "muster/password").read_bytes().strip()).decode()
        request = urllib.request.Request(
            f"{self.api_url}/flow_runs/filter",
            data=json.dumps(query).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Basic {login}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            [flow_run] = json.load(answer)
        return str(flow_run["name"])


_PREFIXES_TO_REMOVE = ("PREFECT_", "RAY_AUTH", "MAKE", "MFLAGS", "ARGS")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Yield a simulated reader, who types commands into a shell.

    The commands use a running stack with simulated GPUs. The quickstart has run once on this stack.
    """
    home = tmp_path_factory.mktemp("reader")
    ports = PortsReserved(["server.api"])
    port = ports.numbers["server.api"]
    ports.close()
    # The commands of the documents must behave as in a user's terminal. So remove the variables of
    # Prefect and `make` that this test process has inherited.
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(_PREFIXES_TO_REMOVE)
    }
    env |= {"MUSTER_HOME": str(home / "muster"), "PREFECT_HOME": str(home / "prefect")}
    reader = Reader(home=home, port=port, env=env)
    try:
        up_result = reader.type("make up GPUS=2x8")
        assert up_result.returncode == 0, up_result.stdout
        [reader.dashboard] = re.findall(r"Ray dashboard +(\S+)", up_result.stdout)
        quickstart_result = reader.type(
            f"PREFECT_API_URL={reader.api_url} .venv/bin/prefect deployment run train/quickstart "
            "--watch"
        )
        assert quickstart_result.returncode == 0, quickstart_result.stdout
        yield reader
    finally:
        down_result = reader.type("make down")
    assert down_result.returncode == 0, down_result.stdout


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_of_a_document_works(page: Document, stack: Reader) -> None:
    env = dict(stack.env)
    if page.path.name != "README.md":
        # All documents except the README assume that the stack of the README is running, and that
        # PREFECT_API_URL is set.
        env["PREFECT_API_URL"] = stack.api_url
    reader = Reader(home=stack.home, port=stack.port, env=env, dashboard=stack.dashboard)

    failures = []
    for console_command in page.commands("console"):
        if find_reason_not_to_type(page, console_command.command):
            continue
        result = reader.type(console_command.command)
        expected = next((EXITS[key] for key in EXITS if console_command.command.startswith(key)), 0)
        if result.returncode != expected:
            tail = "\n".join(result.stdout.splitlines()[-25:])
            failures.append(
                f"line {console_command.line}: {console_command.command}\n"
                f"exit {result.returncode}\n{tail}"
            )
        elif (
            expected_output := _find_expected_output(page, console_command.line)
        ) is not None and expected_output not in result.stdout:
            failures.append(
                f"line {console_command.line}: {console_command.command}\nprints\n{result.stdout}"
            )

    assert not failures, "\n\n".join(failures)


def _find_expected_output(page: Document, line: int) -> str | None:
    """Return the output that a document shows for a command. The actual output must match exactly.

    Return None if the command is not in a block of the kind `console exact`. The output in other
    blocks is only an example.

    Args:
        page: The document.
        line: Number of the line with the command.
    """
    blocks: list[Block] = [
        block for block in page.blocks if block.info == "console exact" and block.line + 1 == line
    ]
    return blocks[0].text.partition("\n")[2] if blocks else None
