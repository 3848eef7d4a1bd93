"""Tests of the access rights in MUSTER_HOME: only its user reads it, unless MUSTER_UMASK is set."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.record.disk import write_json
from tasks.record.places import (
    CALLERS_UMASK,
    callers_umask,
    keep_private,
    make_server_password,
    password_file,
    server_password,
)
from tasks.spec.own_settings import InvalidVariable

NOBODY = 65534


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A MUSTER_HOME that was created with umask 022, in a folder that every user can enter."""
    previous_umask = os.umask(0o022)
    place = Path(tempfile.mkdtemp(prefix="muster-private-", dir="/tmp"))
    place.chmod(0o755)
    home = place / "home"
    attempt = home / "runs" / "run-1" / "attempt-01"
    attempt.mkdir(parents=True)
    (attempt / "trainer.log").write_text("loss 0.1\n")
    (attempt / "save.sh").write_text("exit\n")
    (attempt / "save.sh").chmod(0o755)
    (home / "prefect").mkdir()
    (home / "prefect" / "prefect.db").write_text("")
    (home / "stack").mkdir()
    monkeypatch.setenv("MUSTER_HOME", str(home))
    monkeypatch.delenv("MUSTER_UMASK", raising=False)
    yield home
    os.umask(previous_umask)
    shutil.rmtree(place)


def modes(home: Path) -> dict[str, str]:
    """Return a mapping from the path of each file and folder in `home` to its octal mode."""
    paths = (home, *sorted(home.rglob("*")))
    return {str(path.relative_to(home)): f"{stat.S_IMODE(path.stat().st_mode):o}" for path in paths}


def read_by_another(home: Path, *, group: int = NOBODY) -> list[str]:
    """Return the files and folders that another user with the group `group` can read."""
    find = ("find", str(home), "-readable")
    listing = subprocess.run(
        find, user=NOBODY, group=group, extra_groups=(), capture_output=True, text=True, cwd="/"
    )
    return listing.stdout.splitlines()


def test_readable_home_becomes_private_with_its_content(home: Path) -> None:
    keep_private()

    assert modes(home) == {
        ".": "700",
        "prefect": "700",
        "prefect/prefect.db": "600",
        "runs": "700",
        "runs/run-1": "700",
        "runs/run-1/attempt-01": "700",
        "runs/run-1/attempt-01/save.sh": "700",
        "runs/run-1/attempt-01/trainer.log": "600",
        "stack": "700",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_read_nothing(home: Path) -> None:
    readable_before = read_by_another(home)

    keep_private()

    assert len(readable_before) == 9
    assert read_by_another(home) == []


def test_new_files_are_private_and_so_are_files_of_child_processes(home: Path) -> None:
    keep_private()

    write_json(home / "runs" / "run-1" / "run.json", {})
    new = home / "runs" / "run-2"
    subprocess.run(("sh", "-c", f"mkdir {new}; echo > {new}/metrics.jsonl"), check=True)

    home_modes = modes(home)
    assert home_modes["runs/run-1/run.json"] == home_modes["runs/run-2/metrics.jsonl"] == "600"
    assert home_modes["runs/run-2"] == "700"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_group_can_read_runs_but_not_the_password_with_a_group_umask(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_UMASK", "027")
    os.chown(home, -1, 4711)
    os.chown(home / "runs", -1, 4711)

    keep_private()
    make_server_password()
    (home / "runs" / "run.txt").write_text("")
    os.chown(home / "runs" / "run.txt", -1, 4711)

    assert read_by_another(home, group=4711) == [
        str(home),
        str(home / "runs"),
        str(home / "runs" / "run.txt"),
    ]
    assert read_by_another(home) == []


def test_private_home_is_opened_to_the_group_by_a_group_umask(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_private()
    monkeypatch.setenv("MUSTER_UMASK", "027")

    keep_private()

    home_modes = modes(home)
    assert (home_modes["."], home_modes["runs"]) == ("750", "750")
    assert (home_modes["prefect"], home_modes["stack"]) == ("700", "700")


def test_invalid_umask_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_UMASK", "group")

    with pytest.raises(InvalidVariable, match="MUSTER_UMASK=group"):
        keep_private()


def test_only_muster_s_folders_become_private_in_the_user_s_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "theirs").mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(home))

    keep_private()

    home_modes = modes(home)
    assert (home_modes["."], home_modes["theirs"]) == ("755", "755")
    assert home_modes["runs"] == "700"
    assert home_modes["runs/run-1/attempt-01/trainer.log"] == "600"


def test_targets_of_links_in_a_home_keep_their_modes(home: Path) -> None:
    shared = home.parent / "dataset"
    shared.mkdir(mode=0o755)
    (shared / "rows").write_text("")
    (home / "runs" / "run-1" / "data").symlink_to(shared)

    keep_private()

    assert modes(shared) == {".": "755", "rows": "644"}


def test_umask_of_the_caller_is_remembered_after_muster_has_changed_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CALLERS_UMASK, raising=False)
    assert callers_umask() is None
    os.umask(0o027)

    keep_private()
    keep_private()

    assert callers_umask() == 0o027


def test_password_is_created_once_and_readable_only_by_its_user(home: Path) -> None:
    assert server_password() == ""

    password = make_server_password()

    assert password.startswith("muster:") and len(password) > 30
    assert make_server_password() == server_password() == password
    assert stat.S_IMODE(password_file().stat().st_mode) == 0o600
    assert [path.name for path in home.glob("password*")] == ["password"]
