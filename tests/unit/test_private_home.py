"""Who may read what is in a MUSTER_HOME: its user alone, unless MUSTER_UMASK says otherwise."""

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
    keep_private,
    make_server_password,
    password_file,
    server_password,
)

NOBODY = 65534


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One that was made with the usual umask, in a place that everybody can enter."""
    before = os.umask(0o022)
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
    os.umask(before)
    shutil.rmtree(place)


def modes(home: Path) -> dict[str, str]:
    found = (home, *sorted(home.rglob("*")))
    return {str(path.relative_to(home)): f"{stat.S_IMODE(path.stat().st_mode):o}" for path in found}


def read_by_another(home: Path, *, group: int = NOBODY) -> list[str]:
    """The files and folders that another user can read."""
    find = ("find", str(home), "-readable")
    found = subprocess.run(
        find, user=NOBODY, group=group, extra_groups=(), capture_output=True, text=True, cwd="/"
    )
    return found.stdout.splitlines()


def test_an_open_home_is_closed_with_all_that_is_in_it(home: Path) -> None:
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
def test_another_user_reads_nothing(home: Path) -> None:
    before = read_by_another(home)

    keep_private()

    assert len(before) == 9
    assert read_by_another(home) == []


def test_what_is_written_from_then_on_is_private_and_so_is_what_a_child_writes(home: Path) -> None:
    keep_private()

    write_json(home / "runs" / "run-1" / "run.json", {})
    new = home / "runs" / "run-2"
    subprocess.run(("sh", "-c", f"mkdir {new}; echo > {new}/metrics.jsonl"), check=True)

    found = modes(home)
    assert found["runs/run-1/run.json"] == found["runs/run-2/metrics.jsonl"] == "600"
    assert found["runs/run-2"] == "700"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_group_reads_runs_where_that_is_set_but_no_key_to_the_server(
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


def test_a_closed_home_is_opened_to_the_group_once_that_is_set(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_private()
    monkeypatch.setenv("MUSTER_UMASK", "027")

    keep_private()

    found = modes(home)
    assert (found["."], found["runs"], found["prefect"], found["stack"]) == (
        *("750", "750"),
        *("700", "700"),
    )


def test_a_setting_that_is_no_umask_opens_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MUSTER_UMASK", "group")

    keep_private()

    assert modes(home)["."] == "700"
    assert "MUSTER_UMASK=group" in caplog.text


def test_of_a_persons_home_only_what_is_musters_is_closed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "theirs").mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(home))

    keep_private()

    found = modes(home)
    assert (found["."], found["theirs"]) == ("755", "755")
    assert found["runs"] == "700"
    assert found["runs/run-1/attempt-01/trainer.log"] == "600"


def test_what_a_link_in_a_home_leads_to_stays_as_it_is(home: Path) -> None:
    shared = home.parent / "dataset"
    shared.mkdir(mode=0o755)
    (shared / "rows").write_text("")
    (home / "runs" / "run-1" / "data").symlink_to(shared)

    keep_private()

    assert modes(shared) == {".": "755", "rows": "644"}


def test_the_password_is_made_once_and_for_its_user_alone(home: Path) -> None:
    assert server_password() == ""

    made = make_server_password()

    assert made.startswith("muster:") and len(made) > 30
    assert make_server_password() == server_password() == made
    assert stat.S_IMODE(password_file().stat().st_mode) == 0o600
    assert [path.name for path in home.glob("password*")] == ["password"]
