"""Tests that a MUSTER_HOME which another user made, or may write to, is rejected before its use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks.command import main
from tasks.queue import forked_commands
from tasks.record.places import (
    keep_private,
    kept_secret,
    make_server_password,
    muster_home,
    read_own_file,
    server_password,
)
from tasks.spec import ownership
from tasks.spec.ownership import UntrustedPath
from tests.support.shared_places import (
    ATTACKER,
    attack,
    attackers_socket,
    attacking,
    needs_another_user,
    shared_folder,
)

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hf-token-of-the-victim"
SPEC = {
    "name": "victim",
    "workload": "sft",
    "components": {"trainer": {"command": ["sh", "-c", "true"]}},
}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which every user may write, like `/tmp`. MUSTER_HOME is the subfolder `home`."""
    with shared_folder() as place:
        monkeypatch.setenv("MUSTER_HOME", str(place / "home"))
        monkeypatch.delenv("MUSTER_UMASK", raising=False)
        monkeypatch.delenv("MUSTER_HOME_OWNER", raising=False)
        yield place


@pytest.fixture
def home(shared: Path) -> Path:
    """The victim's MUSTER_HOME, in a sticky folder in which every user may write."""
    home = shared / "home"
    home.mkdir(mode=0o700)
    return home


def refusal() -> str:
    """Return the message with which MUSTER_HOME is rejected."""
    with pytest.raises(UntrustedPath) as error_info:
        muster_home()
    assert error_info.value.exit_code == 2
    return str(error_info.value)


def test_home_that_is_a_file_is_rejected(shared: Path) -> None:
    (shared / "home").write_text("")

    assert f"{shared}/home is not a directory" in refusal()


@needs_another_user
def test_home_of_another_user_is_rejected(shared: Path) -> None:
    attack("mkdir", "-m", "755", shared / "home")

    message = refusal()

    assert f"{shared}/home belongs to" in message
    assert str(ATTACKER) in message and "0755" in message and "set MUSTER_HOME" in message


@needs_another_user
@pytest.mark.parametrize("kind", ["folder above", "link", "link above", "link within"])
def test_folder_or_link_of_another_user_on_the_path_is_rejected(
    shared: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (shared / "mine" / "home").mkdir(parents=True)
    match kind:
        case "folder above":
            attack("mkdir", "-m", "777", shared / "above")
            (shared / "above" / "home").mkdir()
            monkeypatch.setenv("MUSTER_HOME", str(shared / "above" / "home"))
        case "link":
            attack("ln", "-s", shared / "mine" / "home", shared / "home")
        case "link above":
            attack("ln", "-s", shared / "mine", shared / "link")
            monkeypatch.setenv("MUSTER_HOME", str(shared / "link" / "home"))
        case "link within":
            attack("mkdir", "-m", "777", shared / "theirs")
            (shared / "home").mkdir()
            (shared / "home" / "runs").symlink_to(shared / "theirs")

    message = refusal()

    assert "belongs to" in message and str(ATTACKER) in message


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_home_writable_by_other_users_is_rejected(home: Path, mode: int) -> None:
    if os.geteuid() == 0:
        os.chown(home, 0, 4711)
    elif mode == 0o770:
        pytest.skip("only root can give a folder to another group")
    home.chmod(mode)

    message = refusal()

    assert f"may write to {home}" in message
    assert f"mode {mode:04o}" in message and f"chmod go-w {home}" in message


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_parent_folder_writable_by_other_users_is_rejected(
    shared: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    above = shared / "above"
    (above / "home").mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(above, 0, 4711)
    elif mode == 0o770:
        pytest.skip("only root can give a folder to another group")
    above.chmod(mode)
    monkeypatch.setenv("MUSTER_HOME", str(above / "home"))

    message = refusal()

    assert f"may write to {above} " in message


@needs_another_user
@pytest.mark.parametrize(
    "entry",
    ["password", "ray-token", "agents.key", "zygote", "live", "runs", "stack", "code", "prefect"],
)
@pytest.mark.parametrize("fault", ["owner", "mode", "link"])
def test_entry_made_by_or_writable_by_another_user_is_rejected(
    home: Path, entry: str, fault: str
) -> None:
    path = home / entry
    if "." in entry:
        path.write_text("x")
    else:
        path.mkdir()
    match fault:
        case "owner":
            os.chown(path, ATTACKER, ATTACKER)
        case "mode":
            path.chmod(0o777)
        case "link":
            path.rename(home.parent / "elsewhere")
            path.symlink_to(home.parent / "elsewhere")
            os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)

    message = refusal()

    assert str(path) in message


def test_own_home_in_a_sticky_folder_is_accepted(home: Path) -> None:
    assert muster_home() == home


@needs_another_user
def test_home_made_by_another_user_after_a_first_check_is_rejected(shared: Path) -> None:
    # A missing folder belongs to no other user, so `muster_home` accepts its path.
    assert muster_home() == shared / "home"

    attack("mkdir", shared / "home")

    assert "belongs to" in refusal()


@needs_another_user
def test_home_of_root_writable_by_a_group_without_other_members_is_accepted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The directory belongs to root's group, which may write to the directory. This group has no
    # other member, so only root can write.
    home.chmod(0o770)
    monkeypatch.setattr(os, "geteuid", lambda: ATTACKER)

    assert muster_home() == home


@needs_another_user
def test_group_rights_of_an_access_control_list_are_rejected(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.chmod(0o770)
    monkeypatch.setattr(ownership.os, "getxattr", lambda *_args, **_kinds: b"\2\0\0\0")

    assert "group 0 may write to" in refusal()


@needs_another_user
def test_home_of_the_user_in_muster_home_owner_is_accepted(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack("mkdir", shared / "home")
    attack("sh", "-c", f"echo user:guess > {shared}/home/password")

    monkeypatch.setenv("MUSTER_HOME_OWNER", str(ATTACKER))
    home = muster_home()
    monkeypatch.setenv("MUSTER_HOME_OWNER", "no-such-user")
    message = refusal()

    assert home == shared / "home"
    assert "MUSTER_HOME_OWNER=no-such-user" in message


@needs_another_user
@pytest.mark.parametrize("kind", ["owner", "mode", "link", "fifo", "folder"])
def test_file_in_the_home_of_another_user_is_not_read(home: Path, kind: str) -> None:
    path = home / "password"
    match kind:
        case "owner":
            path.write_text("user:guess")
            os.chown(path, ATTACKER, ATTACKER)
        case "mode":
            path.write_text("user:guess")
            path.chmod(0o666)
        case "link":
            (home.parent / "guess").write_text("user:guess")
            path.symlink_to(home.parent / "guess")
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()

    with pytest.raises(OSError):
        read_own_file(path)
    with pytest.raises(OSError):
        kept_secret(path, lambda: "made")


@needs_another_user
def test_password_written_by_another_user_is_not_used(home: Path) -> None:
    (home / "password").write_text("muster:known-to-the-attacker\n")
    os.chown(home / "password", ATTACKER, ATTACKER)

    with pytest.raises(UntrustedPath):
        make_server_password()
    with pytest.raises(UntrustedPath):
        server_password()


@pytest.mark.parametrize("mask", ["000", "002", "007", "020", "0", "750"])
def test_umask_that_lets_other_users_write_is_rejected(
    home: Path, monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    monkeypatch.setenv("MUSTER_UMASK", mask)
    previous_umask = os.umask(0o022)
    os.umask(previous_umask)

    with pytest.raises(UntrustedPath, match=f"MUSTER_UMASK={mask} would let other users write"):
        keep_private()

    current_umask = os.umask(previous_umask)
    assert current_umask == previous_umask


def test_verbs_do_nothing_in_an_untrusted_home_and_exit_with_2(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.chmod(0o777)

    codes = [main([verb]) for verb in ("ls", "up", "train", "down")]

    assert codes == [2] * 4
    assert "Nothing was done." in capsys.readouterr().err
    assert list(home.iterdir()) == []


@needs_another_user
@pytest.mark.parametrize("owner", ["theirs", "sticky", "open"])
def test_attacker_s_fork_server_receives_no_data_of_a_training(
    shared: Path, tmp_path: Path, owner: str
) -> None:
    home = shared / "home"
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(SPEC))
    if owner == "theirs":
        attack("mkdir", "-m", "777", home)
    else:
        home.mkdir()
        home.chmod(0o1777 if owner == "sticky" else 0o777)

    with attackers_socket(home / "zygote") as received_bytes:
        done = subprocess.run(
            (sys.executable, "-m", "tasks.command", "train", str(file)),
            cwd=ROOT,
            env={**os.environ, "MUSTER_HOME": str(home), "HF_TOKEN": SECRET},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        received = received_bytes()

    assert SECRET.encode() not in received
    assert received == b""
    assert done.returncode == 2, done.stderr
    assert str(home) in done.stderr


@needs_another_user
def test_fork_server_of_another_user_receives_nothing_even_if_the_victim_owns_its_socket_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Muster asks the kernel which user listens on the socket of the fork server.

    The fork server is the process from which `muster` commands are forked. The owner of the socket
    file does not matter.
    """
    monkeypatch.setenv("HF_TOKEN", SECRET)
    home.chmod(0o777)
    with attackers_socket(home / "zygote") as received_bytes:
        os.chown(home / "zygote", 0, 0)
        (home / "zygote").chmod(0o700)
        home.chmod(0o700)

        code = forked_commands.run_in_fork(["train", "spec.yaml"])
        taken_over = forked_commands.open_listener()
        received = received_bytes()

    assert code is None
    assert received == b""
    # Muster replaces the attacker's socket with its own socket.
    assert taken_over is not None
    taken_over.close()


@needs_another_user
def test_fork_server_rejects_a_request_of_another_user(shared: Path) -> None:
    place = shared / "door"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    place.chmod(0o777)
    listener.listen()

    def send_request() -> None:
        """Act as the attacker, and send the fork server a request to run `muster ls`."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(place))
            content = json.dumps(
                {
                    "words": ["ls"],
                    "argv": ["muster"],
                    "env": {},
                    "cwd": "/",
                    "made_of": forked_commands._describe_code(),
                }
            )
            socket.send_fds(connection, [content.encode() + b"\n"], [0, 1, 2])
            connection.recv(1)

    with attacking(send_request):
        connection, _ = listener.accept()
        with connection, pytest.raises(PermissionError, match=str(ATTACKER)):
            forked_commands.Caller.receive(connection)
    listener.close()
