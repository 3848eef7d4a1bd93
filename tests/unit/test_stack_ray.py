"""The directory and the session of the Ray cluster of a stack, without a cluster."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.stack import ray_session
from deployments.stack.ray_directory import (
    RAY_TEMP_PREFIX,
    LockedRayDirectory,
    create_ray_directory,
    delete_ray_directory,
    make_temp_dir_option,
)
from deployments.stack.ray_session import find_session_problem
from deployments.stack.state import Stack
from tasks.ray.dashboard import NoAnswer


@pytest.fixture
def short_home() -> Iterator[Path]:
    """Yield a directory with a short path for MUSTER_HOME.

    The kernel limits the length of the paths of Ray's sockets, and pytest's directories have long
    paths.
    """
    home = Path(tempfile.mkdtemp(prefix="m-", dir="/tmp"))
    yield home
    shutil.rmtree(home)


@pytest.mark.parametrize("length", [30, 34])
def test_ray_directory_is_in_a_home_with_a_short_path(short_home: Path, length: int) -> None:
    home = short_home / ("x" * (length - len(str(short_home)) - 1))
    home.mkdir()

    directory = create_ray_directory(home)

    assert len(str(home)) == length
    assert directory == home / "ray"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert list(directory.iterdir()) == []


def test_ray_directory_of_a_home_with_a_long_path_is_below_tmp(short_home: Path) -> None:
    home = short_home / ("x" * (35 - len(str(short_home)) - 1))
    home.mkdir()

    directory = create_ray_directory(home)

    assert len(str(home)) == 35
    assert str(directory).startswith(f"/tmp/{RAY_TEMP_PREFIX}")
    assert list(home.iterdir()) == []
    delete_ray_directory(directory, home)
    assert not directory.exists()


def test_longest_socket_of_ray_can_be_bound_in_the_longest_home(short_home: Path) -> None:
    home = short_home / ("x" * (34 - len(str(short_home)) - 1))
    home.mkdir()
    own_directory = Path(make_temp_dir_option(create_ray_directory(home)).partition("=")[2])
    sockets = own_directory / "session_2026-11-27_00-05-14_592207_4194304" / "sockets"
    sockets.mkdir(parents=True)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(sockets / "plasma_store.16"))


def test_ray_directory_that_other_users_may_enter_is_refused(short_home: Path) -> None:
    directory = short_home / "ray"
    directory.mkdir()
    directory.chmod(0o755)

    with pytest.raises(PermissionError, match=r"drwxr-xr-x.*Delete /"):
        create_ray_directory(short_home)


def test_ray_directory_is_locked_against_a_clean_up_of_temporary_files(short_home: Path) -> None:
    directory = create_ray_directory(short_home)
    locked = LockedRayDirectory(directory)

    locked.restore()

    assert not can_lock(directory)


def test_deleted_ray_directory_is_private_and_locked_after_its_restore(short_home: Path) -> None:
    directory = create_ray_directory(short_home)
    locked = LockedRayDirectory(directory)
    locked.restore()
    directory.rmdir()

    locked.restore()

    assert directory.stat().st_mode & 0o777 == 0o700
    assert not can_lock(directory)


def can_lock(directory: Path) -> bool:
    """Return True if a clean-up program such as systemd-tmpfiles can lock the directory now."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.fixture
def session(short_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the directory of a simulated Ray session, with two sockets that accept connections."""
    directory = short_home / "session_x"
    for name in ("sockets", "logs", "runtime_resources"):
        (directory / name).mkdir(parents=True)
    paths = [str(directory / "sockets" / name) for name in ("raylet", "plasma_store")]
    node = SimpleNamespace(raylet_socket_name=paths[0], object_store_socket_name=paths[1])

    async def list_nodes(gcs_address: str) -> list[Any]:
        return [node]

    monkeypatch.setattr(ray_session, "list_living_nodes", list_nodes)
    listeners = [socket.socket(socket.AF_UNIX) for _ in paths]
    for listener, path in zip(listeners, paths, strict=True):
        listener.bind(path)
        listener.listen()
    yield directory
    for listener in listeners:
        listener.close()


def make_stack() -> Stack:
    # The code under test reads only these two fields of the stack.
    return Stack.model_construct(ray_auth={}, ray_address="127.0.0.1:6379")


def test_complete_ray_session_has_no_problem(session: Path) -> None:
    assert find_session_problem(make_stack()) == ""


@pytest.mark.parametrize("name", ["", "logs", "runtime_resources", "sockets"])
def test_missing_directory_of_the_ray_session_is_named(session: Path, name: str) -> None:
    shutil.rmtree(session / name)

    problem = find_session_problem(make_stack())

    assert problem == (
        f"Ray's session directory {session / name} is missing, so new Ray jobs fail. To restart "
        "the Ray cluster, run `muster up`"
    )


def test_missing_socket_of_the_ray_session_is_named(session: Path) -> None:
    path = session / "sockets" / "plasma_store"
    path.unlink()

    assert find_session_problem(make_stack()).startswith(f"Ray's session socket {path} is missing")


def test_ray_socket_without_a_listener_is_named(session: Path) -> None:
    path = session / "sockets" / "raylet"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))

    problem = find_session_problem(make_stack())

    assert problem.startswith(f"Ray's session socket {path} does not answer")


def test_silent_control_store_of_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(gcs_address: str) -> list[Any]:
        raise NoAnswer(f"the Ray control store at {gcs_address} does not answer: UNAVAILABLE")

    monkeypatch.setattr(ray_session, "list_living_nodes", fail)

    problem = find_session_problem(make_stack())

    assert problem == (
        "does not answer: the Ray control store at 127.0.0.1:6379 does not answer: UNAVAILABLE"
    )
