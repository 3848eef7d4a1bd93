"""`muster secret set` creates the Secret blocks that a run spec names."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.command import do
from tasks.server.server import read_secrets
from tasks.spec.run import RunSpec

pytestmark = pytest.mark.thorough

VALUE = "s3cret value "


@pytest.fixture
def name(prefect_url: str, muster_home: object) -> str:
    return f"token-{uuid4().hex[:6]}"


def set_secret(
    monkeypatch: pytest.MonkeyPatch, prefect_url: str, name: str, text: str, *options: str
) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        return do(["secret", "set", name, *options])


def read_block(prefect_url: str, name: str) -> str:
    """Return the value of the Prefect Secret block `name`, as Muster reads it for a run."""
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "workload": "sft",
            "env": {"TOKEN": {"secret": name}},
            "components": {"trainer": {"command": ["true"]}},
        }
    )
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        return read_secrets(client, spec)[name]


def test_secret_from_standard_input_reaches_a_run(
    prefect_url: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = set_secret(monkeypatch, prefect_url, name, f"{VALUE}\n")

    printed = capsys.readouterr()
    assert code == 0
    assert read_block(prefect_url, name) == VALUE
    assert VALUE not in printed.out + printed.err
    assert f"{{secret: {name}}}" in printed.out


def test_existing_secret_is_replaced_only_with_overwrite(
    prefect_url: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_secret(monkeypatch, prefect_url, name, "first") == 0

    refused = set_secret(monkeypatch, prefect_url, name, "second")

    assert refused == 2
    assert "To replace its value, add --overwrite" in capsys.readouterr().err
    assert read_block(prefect_url, name) == "first"
    assert set_secret(monkeypatch, prefect_url, name, "second", "--overwrite") == 0
    assert read_block(prefect_url, name) == "second"


def test_list_has_names_without_values(
    prefect_url: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_secret(monkeypatch, prefect_url, name, VALUE) == 0
    capsys.readouterr()

    with temporary_settings({PREFECT_API_URL: prefect_url}):
        code = do(["secret", "ls", "--json"])

    output = capsys.readouterr().out
    assert code == 0
    assert name in json.loads(output)
    assert VALUE not in output


@pytest.mark.parametrize(
    ("name_and_text", "message"),
    [
        (("HF_TOKEN", "x"), "lower-case letters, digits and dashes, but the name is 'HF_TOKEN'"),
        (("hf-token", "\n"), "the value for the secret hf-token is empty"),
        (
            ("hf-token", "a\0b"),
            "the value for the secret hf-token is empty or contains a zero byte",
        ),
    ],
)
def test_invalid_name_or_value_is_refused(
    prefect_url: str,
    name_and_text: tuple[str, str],
    message: str,
    muster_home: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = set_secret(monkeypatch, prefect_url, *name_and_text)

    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_terminal_does_not_show_the_value(prefect_url: str, name: str) -> None:
    terminal, program_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.command", "secret", "set", name],
        stdin=program_end,
        stdout=program_end,
        stderr=program_end,
        start_new_session=True,
        preexec_fn=lambda: os.login_tty(0) if hasattr(os, "login_tty") else None,
        env={**os.environ, "PREFECT_API_URL": prefect_url},
    )
    os.close(program_end)
    output = b""
    with pytest.raises(OSError):
        # After the end of the program, reading from its terminal raises EIO.
        while chunk := os.read(terminal, 4096):
            output += chunk
            if output.endswith(f"Value of {name}: ".encode()):
                os.write(terminal, f"{VALUE}\n".encode())
    os.close(terminal)

    assert process.wait(30) == 0, output
    assert VALUE.encode() not in output
    assert read_block(prefect_url, name) == VALUE
