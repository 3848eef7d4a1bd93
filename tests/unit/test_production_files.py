"""The files for production name only what exists: settings of Prefect and of Muster, commands,
files beside them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from prefect.settings import Settings
from pydantic import AliasChoices, BaseModel

from tasks.upkeep.prune import Retention
from tests.support.ground import ROOT
from tests.support.production import PRODUCTION, variables_in

ENV_FILES = ("server.env", "muster.env", "secrets.env.example")
UNITS = sorted((PRODUCTION / "systemd").iterdir())
CHECKOUT = "/opt/muster"
OURS = {
    *("MUSTER_HOME", "MUSTER_HOME_OWNER", "MUSTER_UMASK"),
    *("MUSTER_PRUNE_DAYS", "MUSTER_PRUNE_OUTPUTS"),
}
#: Of programs that are neither Prefect nor Muster.
OTHERS = {"DO_NOT_TRACK", "PYTHONUNBUFFERED", "POSTGRES_PASSWORD"}


def prefect_settings(model: type[BaseModel] = Settings) -> Iterator[str]:
    """The names of all environment variables that Prefect reads as settings."""
    prefix = str(model.model_config.get("env_prefix", ""))
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from prefect_settings(field.annotation)
        else:
            yield f"{prefix}{name}".upper()
        if isinstance(field.validation_alias, AliasChoices):
            yield from (c.upper() for c in field.validation_alias.choices if isinstance(c, str))


def entries(path: Path) -> dict[str, list[str]]:
    """`values[key]` of a unit, all sections together."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, is_set, value = line.partition("=")
        if is_set and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def commands(path: Path) -> list[list[str]]:
    keys = ("ExecStart", "ExecStartPre", "ExecStop")
    return [shlex.split(line) for key in keys for line in entries(path).get(key, [])]


@pytest.mark.parametrize("name", ENV_FILES)
def test_every_variable_is_a_setting(name: str) -> None:
    known = {*prefect_settings(), *OURS, *OTHERS}

    named = variables_in(PRODUCTION / name, switched_off=True)

    assert named
    assert set(named) <= known


@pytest.mark.parametrize("name", ENV_FILES)
def test_prefect_and_muster_take_every_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = variables_in(PRODUCTION / name)
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)

    settings = Settings()
    keep = Retention.of_environment(values)

    if name == "server.env":
        assert settings.server.services.db_vacuum.enabled_vacuum_types == {"events", "orphans"}
        assert settings.server.database.sqlalchemy.pool_size == 20
        assert not settings.server.database.migrate_on_start
        assert settings.server.api.cors_allowed_origins != "*"
    if name == "muster.env":
        assert settings.client.retry_extra_codes == {500, 504}
        # What the file says is what holds where nothing is said.
        assert keep == Retention()


def test_no_secret_is_shipped() -> None:
    passwords = [
        value
        for name in ENV_FILES
        for variable, value in variables_in(PRODUCTION / name).items()
        if re.search("AUTH|PASSWORD|CONNECTION_URL", variable)
    ]

    assert passwords
    assert all("CHANGE-ME" in value for value in passwords)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_command_of_a_unit_exists(path: Path) -> None:
    for program, *arguments in commands(path):
        place = program.removeprefix(f"{CHECKOUT}/")
        assert place != program, program
        if place == ".venv/bin/python":
            assert arguments[0] == "-m"
            assert find_spec(arguments[1]) is not None
        elif place.startswith(".venv/bin/"):
            assert (Path(sys.executable).parent / Path(place).name).exists()
        else:
            assert os.access(ROOT / place, os.X_OK)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_command_of_a_unit_takes_its_options(path: Path) -> None:
    for program, *arguments in commands(path):
        if arguments[:1] == ["-m"] and arguments[1] == "deployments.stack.runs":
            filled = ["" if word == "${MAINPID}" else word for word in arguments]
            done = subprocess.run([sys.executable, *filled], cwd=ROOT, timeout=60)
            assert done.returncode == 0, program


def test_a_worker_has_time_for_its_runs_before_it_is_killed() -> None:
    unit = entries(PRODUCTION / "systemd" / "muster-worker.service")
    [stop] = unit["ExecStop"]
    [limit] = unit["TimeoutStopSec"]

    words = shlex.split(stop)
    within_s = float(words[words.index("--within-s") + 1])

    assert within_s < float(limit.removesuffix("s"))


def test_a_worker_s_death_kills_no_run() -> None:
    unit = entries(PRODUCTION / "systemd" / "muster-worker.service")

    assert unit["KillMode"] == ["process"]
    assert unit["Delegate"] == ["yes"]
    assert unit["OOMPolicy"] == ["continue"]
    # Each would take away something that Muster or a run needs.
    assert not {"PrivateTmp", "PrivateDevices", "ProtectControlGroups", "RestrictNamespaces"} & {
        *unit
    }


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        there = path.read_text().replace(CHECKOUT, str(ROOT))
        there = there.replace(f"{ROOT}/.venv/bin", str(Path(sys.executable).parent))
        (tmp_path / path.name).write_text(there)

    done = subprocess.run(
        ("systemd-analyze", "verify", "--man=no", *sorted(map(str, tmp_path.iterdir()))),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if "muster" in line.partition(":")[0]]
    assert not ours


def test_the_compose_file_names_what_exists() -> None:
    content = yaml.safe_load((PRODUCTION / "compose.yaml").read_text())
    constraints = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )

    for service in content["services"].values():
        for name in service.get("env_file", []):
            assert (PRODUCTION / name).exists() or (PRODUCTION / f"{name}.example").exists()
        for name in service.get("depends_on", {}):
            assert name in content["services"]
        for variable in service.get("environment", {}):
            assert variable.startswith("POSTGRES_") or variable in set(prefect_settings())
    image = content["services"]["server"]["image"]
    assert image.startswith(f"prefecthq/prefect:{constraints['prefect']}-")
    assert content["services"]["migrate"]["image"] == image


def test_the_compose_file_publishes_nothing_but_on_loopback() -> None:
    content = yaml.safe_load((PRODUCTION / "compose.yaml").read_text())

    ports = [port for s in content["services"].values() for port in s.get("ports", [])]

    assert ports == ["127.0.0.1:4200:4200"]
