"""The files for production name only existing settings, commands and files."""

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
from tests.support.host_environment import ROOT
from tests.support.production import PRODUCTION, read_variables

ENV_FILES = ("server.env", "muster.env", "secrets.env.example")
UNITS = sorted((PRODUCTION / "systemd").iterdir())
CHECKOUT = "/opt/muster"
#: Muster's own environment variables in the files of `deployments/production`.
MUSTER_SETTINGS = {
    "MUSTER_HOME",
    "MUSTER_HOME_OWNER",
    "MUSTER_UMASK",
    "MUSTER_PRUNE_DAYS",
    "MUSTER_PRUNE_OUTPUTS",
}
#: Environment variables that neither Muster nor Prefect reads. The files of
#: `deployments/production` contain these variables.
OTHER_SETTINGS = {"DO_NOT_TRACK", "PYTHONUNBUFFERED", "POSTGRES_PASSWORD"}


def prefect_settings(model: type[BaseModel] = Settings) -> Iterator[str]:
    """Yield the names of all environment variables that Prefect reads as settings."""
    prefix = str(model.model_config.get("env_prefix", ""))
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from prefect_settings(field.annotation)
        else:
            yield f"{prefix}{name}".upper()
        if isinstance(field.validation_alias, AliasChoices):
            yield from (c.upper() for c in field.validation_alias.choices if isinstance(c, str))


def read_unit(path: Path) -> dict[str, list[str]]:
    """Return a mapping from each key of a systemd unit to its values, without the section names."""
    values: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            values.setdefault(key, []).append(value)
    return values


def read_commands(path: Path) -> list[list[str]]:
    """Return the words of each command of a systemd unit."""
    keys = ("ExecStart", "ExecStartPre", "ExecStop")
    return [shlex.split(line) for key in keys for line in read_unit(path).get(key, [])]


@pytest.mark.parametrize("name", ENV_FILES)
def test_every_variable_is_a_setting(name: str) -> None:
    known_settings = {*prefect_settings(), *MUSTER_SETTINGS, *OTHER_SETTINGS}

    variables = read_variables(PRODUCTION / name, switched_off=True)

    assert variables
    assert set(variables) <= known_settings


@pytest.mark.parametrize("name", ENV_FILES)
def test_prefect_and_muster_accept_every_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = read_variables(PRODUCTION / name)
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)

    settings = Settings()
    retention = Retention.of_environment(values)

    if name == "server.env":
        assert settings.server.services.db_vacuum.enabled_vacuum_types == {"events", "orphans"}
        assert settings.server.database.sqlalchemy.pool_size == 20
        assert not settings.server.database.migrate_on_start
        assert settings.server.api.cors_allowed_origins != "*"
    if name == "muster.env":
        assert settings.client.retry_extra_codes == {500, 504}
        # The file muster.env sets the same values as the defaults in the code.
        assert retention == Retention()


def test_files_contain_no_real_password() -> None:
    passwords = [
        value
        for name in ENV_FILES
        for variable, value in read_variables(PRODUCTION / name).items()
        if re.search("AUTH|PASSWORD|CONNECTION_URL", variable)
    ]

    assert passwords
    assert all("CHANGE-ME" in value for value in passwords)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_command_of_a_unit_exists(path: Path) -> None:
    for program, *arguments in read_commands(path):
        relative_path = program.removeprefix(f"{CHECKOUT}/")
        assert relative_path != program, program
        if relative_path == ".venv/bin/python":
            assert arguments[0] == "-m"
            assert find_spec(arguments[1]) is not None
        elif relative_path.startswith(".venv/bin/"):
            assert (Path(sys.executable).parent / Path(relative_path).name).exists()
        else:
            assert os.access(ROOT / relative_path, os.X_OK)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_command_of_a_unit_accepts_its_options(path: Path) -> None:
    for program, *arguments in read_commands(path):
        if arguments[:1] == ["-m"] and arguments[1] == "deployments.stack.runs":
            words = ["" if word == "${MAINPID}" else word for word in arguments]
            result = subprocess.run([sys.executable, *words], cwd=ROOT, timeout=60)
            assert result.returncode == 0, program


def test_stop_of_a_worker_gives_its_runs_time_to_end() -> None:
    unit = read_unit(PRODUCTION / "systemd" / "muster-worker.service")
    [stop] = unit["ExecStop"]
    [limit] = unit["TimeoutStopSec"]

    words = shlex.split(stop)
    within_s = float(words[words.index("--within-s") + 1])

    assert within_s < float(limit.removesuffix("s"))


def test_death_of_a_worker_kills_no_run() -> None:
    unit = read_unit(PRODUCTION / "systemd" / "muster-worker.service")

    assert unit["KillMode"] == ["process"]
    assert unit["Delegate"] == ["yes"]
    assert unit["OOMPolicy"] == ["continue"]
    # Each of these options would hide files, devices or cgroups that Muster or a run needs.
    harmful = {"PrivateTmp", "PrivateDevices", "ProtectControlGroups", "RestrictNamespaces"}
    assert not harmful & set(unit)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        content = path.read_text().replace(CHECKOUT, str(ROOT))
        content = content.replace(f"{ROOT}/.venv/bin", str(Path(sys.executable).parent))
        (tmp_path / path.name).write_text(content)

    result = subprocess.run(
        ("systemd-analyze", "verify", "--man=no", *sorted(map(str, tmp_path.iterdir()))),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if "muster" in line.partition(":")[0]]
    assert not warnings


def test_compose_file_names_existing_files_services_and_settings() -> None:
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


def test_compose_file_publishes_ports_only_on_loopback() -> None:
    content = yaml.safe_load((PRODUCTION / "compose.yaml").read_text())

    ports = [port for service in content["services"].values() for port in service.get("ports", [])]

    assert ports == ["127.0.0.1:4200:4200"]
