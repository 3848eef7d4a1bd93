"""The documents' commands, typed in their order on a stack of the tests' own.

A block ```console is typed, line by line; what it shows as the output of a block ```console exact
has to be that. What can't be typed here is in `NOT_TYPED`, with the reason.
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
from tests.support.documents import ROOT, Block, Document, documents

#: Why a command is not typed: by its document, and what it begins with.
NOT_TYPED: dict[tuple[str, str], str] = {
    (
        "docs/ray.md",
        ".venv/bin/muster train deployments/runs/verl-grpo.yaml",
    ): "wants a cluster with GPUs and verl",
    ("docs/events.md", ".venv/bin/python -c"): "asks for the address of a webhook",
    ("README.md", "make test"): "is what runs this very test",
}
#: Of commands that say something by it: by what they begin with.
EXITS: dict[str, int] = {}
#: How long one command may take on a machine that does much else.
WITHIN_S = 400.0

PAGES = [page for page in documents() if page.commands("console")]


def why_not_typed(page: Document, command: str) -> str:
    """Empty where it is typed."""
    found = [
        why
        for (name, begin), why in NOT_TYPED.items()
        if name == str(page) and command.startswith(begin)
    ]
    return found[0] if found else ""


def test_what_is_not_typed_is_in_the_documents() -> None:
    said = {(str(page), one.command) for page in PAGES for one in page.commands("console")}

    stale = [
        (name, begin)
        for name, begin in NOT_TYPED
        if not any(name == page and command.startswith(begin) for page, command in said)
    ]

    assert not stale


@dataclass
class Reader:
    """Somebody who types what the documents say."""

    #: MUSTER_HOME and PREFECT_HOME.
    home: Path
    #: Of the Prefect server.
    port: int
    env: dict[str, str] = field(default_factory=dict)
    dashboard: str = "http://127.0.0.1:8265"

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """Type a command in the checkout, and wait for its end."""
        if match := re.fullmatch(r"export (\w+)=(\S+)", command):
            self.env[match[1]] = shlex.split(self._here(match[2]))[0]
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.run(
            ("bash", "-c", self._here(command)),
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WITHIN_S,
        )

    def _here(self, command: str) -> str:
        """With the ports and the names of this stack, and a run in place of RUN."""
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
        """The name of the flow run of `train` that began last; what a schedule will start some day
        is no run."""
        question = {
            "flows": {"name": {"any_": ["train"]}},
            "flow_runs": {"start_time": {"is_null_": False}},
            "sort": "START_TIME_DESC",
            "limit": 1,
        }
        login = b64encode((self.home / "muster/password").read_bytes().strip()).decode()
        request = urllib.request.Request(
            f"{self.api_url}/flow_runs/filter",
            data=json.dumps(question).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Basic {login}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            [found] = json.load(answer)
        return str(found["name"])


_NOT_THE_READERS = ("PREFECT_", "RAY_AUTH", "MAKE", "MFLAGS", "ARGS")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A stack with logical GPUs, on which the quickstart has run once."""
    home = tmp_path_factory.mktemp("reader")
    ports = PortsReserved(["server.api"])
    port = ports.numbers["server.api"]
    ports.close()
    # A part of the machine's: what the session says of Prefect is not the reader's, nor what the
    # make that may have begun this was told.
    env = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_THE_READERS)}
    env |= {"MUSTER_HOME": str(home / "muster"), "PREFECT_HOME": str(home / "prefect")}
    reader = Reader(home=home, port=port, env=env)
    try:
        up = reader.type("make up GPUS=2x8")
        assert up.returncode == 0, up.stdout
        [reader.dashboard] = re.findall(r"Ray dashboard +(\S+)", up.stdout)
        ran = reader.type(
            f"PREFECT_API_URL={reader.api_url} .venv/bin/prefect deployment run train/quickstart "
            "--watch"
        )
        assert ran.returncode == 0, ran.stdout
        yield reader
    finally:
        down = reader.type("make down")
    assert down.returncode == 0, down.stdout


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_of_a_document_works(page: Document, stack: Reader) -> None:
    env = dict(stack.env)
    if page.path.name != "README.md":
        # Whoever reads on has the stack of the README, and has set this.
        env["PREFECT_API_URL"] = stack.api_url
    reader = Reader(home=stack.home, port=stack.port, env=env, dashboard=stack.dashboard)

    wrong = []
    for said in page.commands("console"):
        if why_not_typed(page, said.command):
            continue
        done = reader.type(said.command)
        expected = next((EXITS[key] for key in EXITS if said.command.startswith(key)), 0)
        if done.returncode != expected:
            tail = "\n".join(done.stdout.splitlines()[-25:])
            wrong.append(f"line {said.line}: {said.command}\nexit {done.returncode}\n{tail}")
        elif (shown := _shown(page, said.line)) is not None and shown not in done.stdout:
            wrong.append(f"line {said.line}: {said.command}\nprints\n{done.stdout}")

    assert not wrong, "\n\n".join(wrong)


def _shown(page: Document, line: int) -> str | None:
    """What a block ```console exact shows after its only command."""
    blocks: list[Block] = [
        block for block in page.blocks if block.info == "console exact" and block.line + 1 == line
    ]
    return blocks[0].text.partition("\n")[2] if blocks else None
