"""Tests of the code store: it keeps a copy of a project for each run and checks it out again."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.record import code_store, empty_folders, project_size
from tasks.record.code_store import (
    PROJECT,
    NoCode,
    check_out,
    read_code,
    read_files,
    store_project,
)
from tasks.server.artifacts import (
    delete_unused_code,
    download_code,
    store_submitted_code,
    upload_code,
)
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.train.plan import component_env
from tests.support.submitting import SubmitServer

pytestmark = pytest.mark.usefixtures("muster_home")


def git(root: Path, *words: str) -> None:
    """Run git in `root`."""
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(("git", "-C", str(root), *settings, *words), check=True, capture_output=True)


def write(root: Path, **files: str) -> None:
    """Write files below `root`. In a keyword, `__` stands for `/`, and `_py` for `.py`."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git repository with a commit, ignored data, and changes that are not committed."""
    root = tmp_path / "project"
    write(root, train_py="old", gone_py="gone", src__pkg__a_py="a", data__big="weights")
    (root / ".gitignore").write_text("/data/\n*.log\n__pycache__/\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (root / "gone.py").unlink()
    write(root, train_py="new", untracked_py="u")
    (root / "here").symlink_to("src/pkg")
    return root


def files_in(place: Path) -> dict[str, str]:
    """Return a mapping from the relative path of each file in a folder to the text of the file.

    For a link, the mapping contains `-> TARGET` instead of a text.
    """
    contents = {}
    for folder, folders, names in os.walk(place):
        for path in (Path(folder, name) for name in (*folders, *names)):
            if path.is_symlink():
                contents[str(path.relative_to(place))] = f"-> {os.readlink(path)}"
            elif path.is_file():
                contents[str(path.relative_to(place))] = path.read_text()
    return contents


def test_checkout_restores_the_work_tree_and_links_ignored_files(
    project: Path, tmp_path: Path
) -> None:
    code = read_code(store_project(project))
    write(project, train_py="newer", src__pkg__b_py="later")

    check_out(code, tmp_path / "out")

    assert files_in(tmp_path / "out") == {
        ".gitignore": "/data/\n*.log\n__pycache__/\n",
        "train.py": "new",
        "untracked.py": "u",
        "src/pkg/a.py": "a",
        "run.sh": "#!/bin/sh\n",
        "here": "-> src/pkg",
        "data": f"-> {project}/data",
    }
    modes = [(tmp_path / "out" / name).stat().st_mode & 0o100 for name in ("run.sh", "train.py")]
    assert modes == [0o100, 0]
    assert len(code.commit) == 40 and "-old\n" in code.diff and "+new\n" in code.diff


@pytest.mark.parametrize("is_repository", [True, False])
def test_checkpoints_in_the_folder_that_the_spec_names_are_not_copied(
    tmp_path: Path, is_repository: bool
) -> None:
    root = tmp_path / "project"
    root.mkdir()
    if is_repository:
        git(root, "init", "-q")
    write(root, train_py="a", out__step_1="weights", out2__x="b")

    check_out(
        read_code(store_project(root, ["out"])), tmp_path / "copy", outputs=["out", "missing"]
    )

    assert files_in(tmp_path / "copy") == {"train.py": "a", "out2/x": "b"}
    # A script may write into the folder without creating it.
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "out",
        "out2",
        "train.py",
    ]


@pytest.mark.parametrize("pattern", ["*.pt", "out/*", "out/"])
@pytest.mark.parametrize("is_repository", [True, False])
def test_copy_has_no_links_to_ignored_checkpoints_in_the_folder_that_the_spec_names(
    tmp_path: Path, pattern: str, is_repository: bool
) -> None:
    root = tmp_path / "project"
    root.mkdir()
    if is_repository:
        git(root, "init", "-q")
    (root / ".gitignore").write_text(f"{pattern}\ndata\n")
    write(root, train_py="a", out__step_1="weights", data__x="b")
    (root / "out" / "step_1").rename(root / "out" / "step_1.pt")
    copy = tmp_path / "copy"

    check_out(read_code(store_project(root, ["out"])), copy, outputs=["out"])

    assert (copy / "data").is_symlink()
    if pattern == "out/":
        # git ignores the folder itself. The runs share the folder, as documented.
        assert (copy / "out").is_symlink()
    else:
        assert not (copy / "out").is_symlink() and [*(copy / "out").iterdir()] == []


def test_folder_of_checkpoints_with_files_in_git_is_copied(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    write(root, train_py="a", models__base="weights", models__step_1="new")
    git(root, "add", "models/base")

    check_out(read_code(store_project(root, ["models"])), tmp_path / "copy")

    assert set(files_in(tmp_path / "copy")) == {"train.py", "models/base", "models/step_1"}


def test_checkpoints_do_not_count_against_the_limit_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_CODE_MIB", "0.01")
    write(tmp_path, train_py="a", out__step_1="x" * 20_000)

    with pytest.raises(InvalidSpec, match="step_1"):
        store_project(tmp_path)
    assert store_project(tmp_path, ["out"])


def test_many_checkpoints_do_not_count_against_the_limit_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a project with many files, Muster counts the files before git lists them.
    monkeypatch.setattr("tasks.record.project_size._SMALL_PROJECT", 5)
    monkeypatch.setenv("MUSTER_CODE_MIB", "0.01")
    write(tmp_path, train_py="a", **{f"lib__{number}": "b" for number in range(10)})
    write(tmp_path, **{f"lib__out__{number}": "x" * 5000 for number in range(10)})

    code = read_code(store_project(tmp_path, ["lib/out"]))

    assert set(read_files(code.tree)) == {"train.py", *(f"lib/{number}" for number in range(10))}
    with pytest.raises(InvalidSpec, match="Muster stopped counting"):
        store_project(tmp_path)


def test_name_of_the_code_depends_only_on_the_files(project: Path, tmp_path: Path) -> None:
    tree = read_code(store_project(project)).tree
    git(tmp_path, "clone", "-q", str(project), "other")
    other = tmp_path / "other"
    (other / "gone.py").unlink()
    write(other, train_py="new", untracked_py="u", data__more="other data", x__y_log="")
    (other / "here").symlink_to("src/pkg")
    (other / "x" / "y_log").rename(other / "x" / "y.log")

    assert read_code(store_project(other)).tree == tree
    git(other, "commit", "-qam", "second")
    assert read_code(store_project(other)).tree == tree
    for change in ("train.py", "run mode", "here"):
        match change:
            case "train.py":
                write(other, train_py="wen")
            case "run mode":
                (other / "train.py").chmod(0o755)
            case "here":
                (other / "here").unlink()
        previous_tree = tree
        tree = read_code(store_project(other)).tree
        assert tree != previous_tree, change


def test_nested_repositories_are_included(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "library", b_py="b", c_log="c")
    (tmp_path / "library" / "c_log").rename(tmp_path / "library" / "c.log")
    (tmp_path / "library" / ".gitignore").write_text("*.log\n")
    git(tmp_path / "library", "init", "-q")
    git(tmp_path / "library", "add", "b.py", ".gitignore")
    git(tmp_path / "library", "commit", "-qm", "first")
    git(project, "submodule", "add", "-q", str(tmp_path / "library"), "sub")
    git(project, "clone", "-q", str(tmp_path / "library"), "cloned")
    write(project, sub__b_py="changed", sub__d_log="d")
    (project / "sub" / "d_log").rename(project / "sub" / "d.log")

    check_out(read_code(store_project(project)), tmp_path / "out")

    contents = files_in(tmp_path / "out")
    assert (contents["sub/b.py"], contents["cloned/b.py"]) == ("changed", "b")
    assert contents["sub/d.log"] == f"-> {project}/sub/d.log"


@pytest.mark.parametrize("is_ignored", [False, True])
def test_folder_without_git_is_copied_without_environments_and_outputs(
    tmp_path: Path, is_ignored: bool
) -> None:
    root = tmp_path / "outer" / "plain"
    write(root, a_py="a", **{".venv__bin__python": "", "wandb__x": "", "out__big": "w"})
    (root / ".gitignore").write_text("out/\n")
    if is_ignored:
        # The folder is inside another git repository, which ignores the folder.
        git(root.parent, "init", "-q")
        (root.parent / ".gitignore").write_text("*\n")

    code = read_code(store_project(root))
    check_out(code, tmp_path / "out")

    linked = {name: f"-> {root}/{name}" for name in (".venv", "wandb", "out")}
    assert files_in(tmp_path / "out") == {".gitignore": "out/\n", "a.py": "a", **linked}
    assert code.commit == ""


def empty_folders_in(place: Path) -> set[str]:
    """Return the relative paths of the empty folders in a folder. Links are not followed."""
    walk = os.walk(place)
    return {
        str(Path(folder).relative_to(place))
        for folder, folders, names in walk
        if not (folders or names)
    }


@pytest.mark.parametrize("has_git", [True, False])
def test_empty_folders_of_the_project_are_in_the_copy(
    project: Path, tmp_path: Path, has_git: bool
) -> None:
    if not has_git:
        shutil.rmtree(project / ".git")
    # No file is directly in the folder `src` or `plots`.
    empty = {"out", "src/pkg/logs", "src/logs", "plots/a/b", "plots/c"}
    for name in empty:
        (project / name).mkdir(parents=True)

    check_out(read_code(store_project(project)), tmp_path / "out")

    assert empty_folders_in(tmp_path / "out") == empty


@pytest.mark.parametrize("has_git", [True, False])
def test_empty_folders_in_environments_caches_and_ignored_folders_are_not_in_the_copy(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_git: bool
) -> None:
    if not has_git:
        shutil.rmtree(project / ".git")
    # git ignores the folder `data`, so the copy has a link to this folder. The copy has no link to
    # `state`, although git ignores this folder, because `state` contains Muster's home directory.
    monkeypatch.setenv("MUSTER_HOME", str(project / "state" / "home"))
    (project / ".gitignore").write_text("/data/\n/state/\n__pycache__/\n")
    write(project, environment__pyvenv="", conda__python="", state__home__spec="")
    (project / "environment" / "pyvenv").rename(project / "environment" / "pyvenv.cfg")
    for name in (
        "data/a",
        "state/b",
        "state/home/c",
        "environment/include",
        "conda/conda-meta",
        "conda/include",
        "__pycache__/d",
        ".mypy_cache/e",
        "src/out",
    ):
        (project / name).mkdir(parents=True)

    check_out(read_code(store_project(project)), tmp_path / "out")

    assert empty_folders_in(tmp_path / "out") == {"src/out"}
    assert files_in(tmp_path / "out")["data"] == f"-> {project}/data"


def test_copy_has_no_link_to_a_folder_that_contains_only_an_ignored_folder(
    project: Path, tmp_path: Path
) -> None:
    (project / ".gitignore").write_text("logs/\n")
    (project / "results" / "logs").mkdir(parents=True)

    check_out(read_code(store_project(project)), tmp_path / "out")

    # git lists both `results/` and `results/logs/` as ignored, but ignores only `results/logs/`.
    assert files_in(tmp_path / "out" / "results") == {"logs": f"-> {project}/results/logs"}


def test_unreadable_folder_does_not_end_the_search_for_empty_folders(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/out", "b/out", "c/out", "out"):
        (project / name).mkdir(parents=True)
    name = store_project(project)
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path) == str(project / "b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    check_out(read_code(name), tmp_path / "out")
    monkeypatch.undo()

    assert empty_folders_in(tmp_path / "out") == {"a/out", "c/out", "out"}


def test_search_for_empty_folders_has_a_limit(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/b/c/d/out", "out"):
        (project / name).mkdir(parents=True)
    monkeypatch.setattr(empty_folders, "_MOST_FOLDERS", 5)

    check_out(read_code(store_project(project)), tmp_path / "out")

    # Folders near the root are read first.
    assert empty_folders_in(tmp_path / "out") == {"out"}


def test_empty_folder_does_not_replace_a_file_or_link_of_the_copy(
    project: Path, tmp_path: Path
) -> None:
    write(project, results="text", notes="text")
    (project / "linked").symlink_to("src")
    name = store_project(project)
    for file in ("results", "notes", "linked"):
        (project / file).unlink()
    for folder in ("results/a", "notes", "linked/a"):
        (project / folder).mkdir(parents=True)

    check_out(read_code(name), tmp_path / "out")

    assert (tmp_path / "out" / "results").read_text() == "text"
    assert (tmp_path / "out" / "notes").read_text() == "text"
    assert (tmp_path / "out" / "linked").is_symlink()
    assert not (tmp_path / "out" / "src" / "a").exists()


def test_links_out_of_the_project_keep_their_targets(project: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    write(tmp_path, secret__key="key")
    (project / "out").symlink_to("../secret")
    (project / "abs").symlink_to(tmp_path / "secret")
    # Symbolic links to files of the project. In the copy, the links must point to the copied files.
    (project / "within").symlink_to(project / "train.py")
    (project / "back").symlink_to(f"../{project.name}/data")
    (project / "..hidden").symlink_to("..odd")
    # Git tracks a file in the folder `src/pkg`. Replace this folder with a symbolic link.
    (project / "src" / "pkg" / "a.py").unlink()
    (project / "src" / "pkg").rmdir()
    (project / "src" / "pkg").symlink_to(tmp_path / "secret")
    write(tmp_path, **{"secret__a_py": "not of the project"})

    check_out(read_code(store_project(project)), tmp_path / "co")

    contents = files_in(tmp_path / "co")
    assert "src/pkg/a.py" not in contents and "src/pkg/key" not in contents
    assert (tmp_path / "co" / "out" / "key").read_text() == "key"
    assert contents["abs"] == f"-> {tmp_path}/secret"
    within = (contents["within"], contents["back"], contents["..hidden"])
    assert within == ("-> train.py", "-> data", "-> ..odd")


@pytest.mark.parametrize("is_touched", [False, True], ids=["same time", "later time"])
def test_files_of_another_tree_with_the_same_size_are_replaced(
    project: Path, tmp_path: Path, is_touched: bool
) -> None:
    """A changed file keeps its size, and all checked-out files have the same modification time.

    So only the content shows that the file has changed.
    """
    place = tmp_path / "out"
    check_out(read_code(store_project(project)), place)
    if is_touched:
        os.utime(place / "train.py")
    write(project, train_py="abc")

    check_out(read_code(store_project(project)), place)

    assert (place / "train.py").read_text() == "abc"


def test_unchanged_files_are_not_written_again(project: Path, tmp_path: Path) -> None:
    code = read_code(store_project(project))
    place = tmp_path / "out"
    check_out(code, place)
    inode = (place / "train.py").stat().st_ino

    check_out(code, place)

    assert (place / "train.py").stat().st_ino == inode


def test_next_attempt_gets_the_original_code_and_keeps_files_of_the_run(
    project: Path, tmp_path: Path
) -> None:
    code = read_code(store_project(project))
    place = tmp_path / "out"
    outside = tmp_path / "outside"
    check_out(code, place)
    (place / "train.py").write_text("wen")
    (place / "run.sh").unlink()
    write(place, outputs__step="1")
    (place / "untracked.py").unlink()
    write(place, untracked_py__own="kept")
    outside.mkdir()
    (place / "src" / "pkg" / "a.py").unlink()
    (place / "src" / "pkg").rmdir()
    (place / "src" / "pkg").symlink_to(outside)

    check_out(code, place)

    contents = files_in(place)
    assert (contents["train.py"], contents["src/pkg/a.py"], contents["outputs/step"]) == (
        "new",
        "a",
        "1",
    )
    assert (place / "run.sh").stat().st_mode & 0o100
    [moved] = place.glob("untracked.py.*")
    assert (contents["untracked.py"], (moved / "own").read_text()) == ("u", "kept")
    assert files_in(outside) == {}
    assert set(code_store.measure_unchanged_files(place)) == {
        ".gitignore",
        "train.py",
        "untracked.py",
        "src/pkg/a.py",
        "run.sh",
    }


@pytest.mark.parametrize("is_behind_a_link", ["home", "project"])
def test_muster_home_within_the_project_is_not_copied(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind_a_link: str
) -> None:
    (tmp_path / "link").symlink_to(project)
    places = {"home": project, "project": project, is_behind_a_link: tmp_path / "link"}
    monkeypatch.setenv("MUSTER_HOME", str(places["home"] / "home"))
    write(project, home__password="muster:secret", home__runs__a="a", gitignore="runs/\n")
    (project / "gitignore").rename(project / ".gitignore")

    names = {store_project(places["project"]) for _ in range(2)}

    assert len(names) == 1
    check_out(read_code(*names), tmp_path / "out")
    assert not [name for name in files_in(tmp_path / "out") if name.startswith("home")]


def test_files_deleted_during_the_copy_are_left_out(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_files = code_store._files

    def list_deleted_file(root: Path, left_out: Set[str]) -> code_store._ProjectFiles:
        files = list_files(root, left_out)
        return replace(files, names=files.names | {"was/here.tmp"})

    monkeypatch.setattr(code_store, "_files", list_deleted_file)

    name = store_project(project)

    assert "was/here.tmp" not in code_store.hash_files(read_code(name).tree)


def test_too_large_project_is_rejected_with_its_largest_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_CODE_MIB", "1")
    store_project(project)
    (project / "model.bin").write_bytes(bytes(2 << 20))

    with pytest.raises(InvalidSpec) as error_info:
        store_project(project)

    assert "The largest files: model.bin 2.0 MiB" in str(error_info.value)
    assert "code: live" in str(error_info.value)


@pytest.mark.parametrize("has_repository", [True, False])
def test_huge_folder_is_rejected_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_repository: bool
) -> None:
    monkeypatch.setenv("MUSTER_CODE_MIB", "1")
    monkeypatch.setattr(project_size, "_SMALL_PROJECT", 50)
    root = tmp_path / "home"
    (root / "a" / "b").mkdir(parents=True)
    (root / "data").mkdir()
    (root / ".gitignore").write_text("/data/\n")
    (root / "data" / "ignored.bin").write_bytes(bytes(3 << 20))
    (root / "a" / "model.bin").write_bytes(bytes(2 << 20))
    for number in range(60):
        (root / "a" / "b" / str(number)).touch()
    if has_repository:
        git(root, "init", "-q")
    monkeypatch.setattr(code_store, "_files", lambda *_: pytest.fail("git has read the folder"))

    with pytest.raises(InvalidSpec) as error_info:
        store_project(root)

    message = str(error_info.value)
    assert "has more than 1 MiB of files (Muster stopped counting at 2 MiB in 2 files)" in message
    assert "The largest files: a/model.bin 2.0 MiB" in message
    assert "ignored.bin" not in message


def test_folder_with_many_ignored_files_is_stored(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_CODE_MIB", "1")
    monkeypatch.setattr(project_size, "_SMALL_PROJECT", 50)
    (project / "data" / "model.bin").write_bytes(bytes(2 << 20))
    for number in range(60):
        (project / "data" / str(number)).touch()

    name = store_project(project)

    assert "train.py" in code_store.hash_files(read_code(name).tree)


def test_damaged_code_is_rejected_and_replaced(project: Path, muster_home: Path) -> None:
    name = store_project(project)
    path = muster_home / "code" / f"{read_code(name).tree}.gz"
    whole = path.read_bytes()
    for damaged in (whole[:-20], b"", gzip.compress(b"other")):
        path.write_bytes(damaged)
        with pytest.raises(NoCode, match="Submit or deploy the run again"):
            check_out(read_code(name), muster_home / "out")

    assert store_project(project) == name
    check_out(read_code(name), muster_home / "out")


#: Program that stores the code of a project. The program is killed after it has written half of
#: the first file.
KILLED = """
import os, pathlib, signal, sys
from tasks.record.code_store import store_project
whole = pathlib.Path.write_bytes
def half(path, data):
    whole(path, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.write_bytes = half
store_project(pathlib.Path(sys.argv[1]))
"""


def test_concurrent_and_killed_writers_leave_one_complete_code(
    project: Path, muster_home: Path
) -> None:
    killed = subprocess.run((sys.executable, "-c", KILLED, str(project)))
    leftover = [path.name for path in (muster_home / "code").iterdir()]

    with ThreadPoolExecutor(4) as pool:
        [name] = set(pool.map(store_project, [project] * 4))

    assert killed.returncode == -signal.SIGKILL
    assert len(leftover) == 1 and leftover[0].startswith(".")
    check_out(read_code(name), muster_home / "out")
    assert files_in(muster_home / "out")["train.py"] == "new"


def test_host_with_another_home_gets_the_code_from_the_server(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SubmitServer()
    monkeypatch.setattr("tasks.server.artifacts._PART_BYTES", 100)
    name = store_submitted_code(server, None, project)  # type: ignore[arg-type]
    count = len(server.artifacts)
    upload_code(server, name)  # type: ignore[arg-type]
    assert len(server.artifacts) == count > 4
    assert {artifact.key for artifact in server.artifacts} == {None}

    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "there"))
    with pytest.raises(NoCode, match="Submit or deploy the run again"):
        read_code(name)
    code = read_code(name, lambda key: download_code(server, key))  # type: ignore[arg-type]
    check_out(code, tmp_path / "out", lambda key: download_code(server, key))  # type: ignore[arg-type]

    assert files_in(tmp_path / "out")["train.py"] == "new"


def test_unreferenced_code_is_deleted_after_one_day(
    project: Path, muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SubmitServer()
    old = store_submitted_code(server, None, project)  # type: ignore[arg-type]
    write(project, train_py="submitted again")
    submitted_again = store_submitted_code(server, None, project)  # type: ignore[arg-type]
    write(project, train_py="newest")
    new = store_submitted_code(server, None, project)  # type: ignore[arg-type]
    named = code_store.find_entry_names(f"spec: {{code: {new}}}")
    assert code_store.delete_unused(named) == {}

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 24 * 3600)
    for artifact in server.artifacts:
        assert artifact.updated is not None
        artifact.updated = artifact.updated.replace(year=2020)
    upload_code(server, submitted_again)  # type: ignore[arg-type]
    deleted = code_store.delete_unused(named)
    delete_unused_code(server, named)  # type: ignore[arg-type]

    assert len(deleted) == 4
    read_code(new)
    assert download_code(server, submitted_again)  # type: ignore[arg-type]
    with pytest.raises(NoCode):
        read_code(old)
    assert download_code(server, new) and not download_code(server, old)  # type: ignore[arg-type]


def test_import_path_replaces_editable_installs_by_the_copy(project: Path, tmp_path: Path) -> None:
    environment = project / ".venv"
    site = environment / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "_a.pth").write_text(f"{project.resolve()}/src\n/elsewhere\n{project}-too/lib2\n")
    (tmp_path / "link").symlink_to(project)
    (site / "__editable___b_finder.py").write_text(f"MAPPING = {{'b': '{project}/lib/b'}}\n")

    import_path = code_store.list_import_folders(project, tmp_path / "out", environment)

    assert sorted(import_path) == [f"{tmp_path}/out/lib", f"{tmp_path}/out/src"]
    assert code_store.list_import_folders(tmp_path / "link", tmp_path / "out", environment)


def test_python_of_the_project_imports_editable_installs_from_the_copy(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = project / ".venv"
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", venv), check=True)
    [site] = venv.glob("lib/python*/site-packages")
    (site / "_mine.pth").write_text(f"{project}/src\n")
    (project / ".gitignore").write_text(".venv/\n")
    write(project, src__mine_py="WORD = 'submitted'", src__other_py="")
    check_out(read_code(store_project(project)), tmp_path / "out")
    write(project, src__mine_py="WORD = 'edited'")
    component = {"command": ["python", "-c", "pass"], "env": {"PYTHONPATH": f"{project}/src"}}
    spec = parse_spec({"name": "a", "workload": "sft", "components": {"trainer": component}})
    monkeypatch.chdir(tmp_path / "out")
    monkeypatch.setenv(PROJECT, str(project))

    env = component_env(spec, "trainer", "run", 1)
    line = "import mine, sys; print(mine.WORD, sys.prefix)"
    done = subprocess.run(("python", "-c", line), env=env, capture_output=True, text=True, cwd="/")

    assert done.stdout.split() == ["submitted", str(venv)], done.stderr
    assert env["UV_NO_SYNC"] == "1"
