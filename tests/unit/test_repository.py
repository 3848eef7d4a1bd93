"""Tests of untrusted git repositories: they are not used, and their programs do not run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from tasks.command import main
from tasks.record.code_store import check_out, describe_versions, read_code, store_project
from tasks.record.repository import find_repository
from tasks.spec.loading import find_project_root
from tasks.spec.ownership import UntrustedPath, refuse_foreign_settings
from tasks.spec.programs import find_interpreter
from tests.support.shared_places import ATTACKER, attack, needs_another_user, shared_folder

pytestmark = pytest.mark.usefixtures("muster_home")


def git(root: Path, *words: str) -> str:
    """Run git in `root` and return its output."""
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ("git", "-C", str(root), *settings, *words), check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder, like `/tmp`, in which every user may write."""
    with shared_folder() as place:
        yield place


@pytest.fixture
def proof(shared: Path) -> Path:
    """Return the path of a file that exists if a program of the attacker was started."""
    return shared / "proof"


def planted_program(place: Path, proof: Path) -> Path:
    """Create a program that writes to `proof` and copies its input to its output."""
    program = place / "planted.sh"
    program.write_text(f"#!/bin/sh\nid -u >> {proof}\ncat\n")
    program.chmod(0o755)
    return program


def own_project(place: Path) -> Path:
    """Create the project of the attacked user: a folder with a spec and a script, without git."""
    project = place / "victim" / "project"
    project.mkdir(parents=True)
    (project / "train.py").write_text("print(1)\n")
    (project / "muster.yaml").write_text("name: a\n")
    return project


def planted_repository(at: Path, program: Path) -> None:
    """Create a git repository of the attacker. Many of its settings name the attacker's program."""
    attack("git", "init", "-q", at)
    for setting in (
        "filter.evil.clean",
        "filter.evil.process",
        "core.fsmonitor",
        "diff.external",
        "diff.evil.textconv",
        "diff.evil.command",
        "core.pager",
        "core.sshCommand",
    ):
        attack("git", "-C", at, "config", setting, str(program))
    script = f"echo '* filter=evil diff=evil' > {at}/.gitattributes"
    attack("sh", "-c", script)


@needs_another_user
@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_planted_git_above_a_project_runs_no_program_and_is_not_the_root(
    shared: Path, proof: Path, caplog: pytest.LogCaptureFixture, is_file: bool
) -> None:
    """An attacker creates `.git` in a folder that contains the project (CVE-2022-24765)."""
    project = own_project(shared)
    program = shared / "evil.sh"
    attack("sh", "-c", f"printf '#!/bin/sh\\nid -u >> {proof}\\ncat\\n' > {program}")
    attack("chmod", "755", program)
    if is_file:
        attack("mkdir", shared / "elsewhere")
        planted_repository(shared / "elsewhere", program)
        attack("sh", "-c", f"echo gitdir: {shared}/elsewhere/.git > {shared}/.git")
        attack("cp", shared / "elsewhere" / ".gitattributes", shared)
    else:
        attack("mkdir", shared / ".probe")
        attack("git", "init", "-q", shared / ".probe")
        attack("mv", shared / ".probe" / ".git", shared / ".git")
        for setting in ("filter.evil.clean", "core.fsmonitor", "diff.external"):
            attack("git", "config", "--file", shared / ".git" / "config", setting, str(program))
        attack("sh", "-c", f"echo '* filter=evil' > {shared}/.gitattributes")
    # git tracks the file `victim`, which has changed. To compare the file, git would run the
    # attacker's filter program.
    environment = {
        "GIT_DIR": str(shared / ".git"),
        "GIT_WORK_TREE": str(shared),
        "GIT_OPTIONAL_LOCKS": "0",
        "HOME": "/nonexistent",
    }
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    track = ("-c", "filter.evil.clean=cat", "-c", "core.fsmonitor=false", "add", "victim")
    attack("git", *who, *track, env=environment, cwd=shared)
    attack("git", *who, "commit", "-qm", "x", env=environment, cwd=shared)
    proof.unlink(missing_ok=True)
    (project / "train.py").write_text("print(2)\n")

    root = find_project_root(project / "muster.yaml")
    code = read_code(store_project(root))
    described = describe_versions(None, root, Path("python"))

    assert not proof.exists()
    assert root == project
    assert (code.commit, code.diff) == ("", "")
    assert "commit" not in described
    assert f"{shared}/.git is not used: {shared}/.git belongs to" in caplog.text
    assert str(ATTACKER) in caplog.text


@needs_another_user
@pytest.mark.parametrize("mark", [".git", "pyproject.toml"])
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777], ids=["theirs", "open to all", "sticky"])
def test_search_for_a_root_ends_at_a_folder_of_another_user(
    shared: Path, mark: str, mode: int
) -> None:
    outer = shared / "outer"
    attack("mkdir", outer)
    attack("touch", outer / mark)
    project = outer / "mine"
    project.mkdir()
    # Cases: the attacker owns the folder, or root owns the folder and every user may write there.
    outer.chmod(mode)
    if mode != 0o755:
        os.chown(outer, 0, 0)

    root = find_project_root(project / "muster.yaml")

    assert root == project
    assert find_repository(project) is None


@needs_another_user
def test_project_owned_by_root_is_trusted_by_every_user(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = own_project(shared)
    git(project, "init", "-q")
    monkeypatch.setattr(os, "geteuid", lambda: ATTACKER + 1)

    repository = find_repository(project)

    assert repository is not None and repository.work_tree == project
    assert find_project_root(project / "runs" / "a.yaml") == project


@needs_another_user
@pytest.mark.parametrize("part", [".venv", ".venv/bin", ".venv/bin/python"])
def test_interpreter_of_another_user_is_not_run(
    shared: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    project = own_project(shared)
    program = project / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    os.chown(project / part, ATTACKER, ATTACKER)

    python = find_interpreter(project, {}).path

    assert not python.startswith(str(project))
    assert f"{project}/.venv is not used" in caplog.text


@needs_another_user
@pytest.mark.parametrize(
    "part",
    ["gitdir", "commondir", "alternates", "config", "index", "objects", ".git"],
)
def test_repository_with_a_part_of_another_user_is_not_used(
    shared: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    project = own_project(shared)
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    theirs = shared / "theirs"
    attack("git", "init", "-q", theirs)
    match part:
        case "gitdir":
            shutil.rmtree(project / ".git")
            (project / ".git").write_text(f"gitdir: {theirs}/.git\n")
        case "commondir":
            (project / ".git" / "commondir").write_text(f"{theirs}/.git\n")
        case "alternates":
            listed = project / ".git" / "objects" / "info" / "alternates"
            listed.write_text(f"{theirs}/.git/objects\n")
        case ".git":
            os.chown(project / ".git", ATTACKER, ATTACKER)
        case _:
            os.chown(project / ".git" / part, ATTACKER, ATTACKER)

    code = read_code(store_project(project))
    check_out(code, shared / "out")

    assert code.commit == ""
    assert "is not used: " in caplog.text and caplog.text.count("\n") <= 2
    # Muster does not use a git directory of another user, but copies the files without git.
    assert {path.name for path in (shared / "out").iterdir()} >= {"train.py", "muster.yaml"}


@pytest.mark.parametrize("kind", ["empty folder", "empty file", "leads nowhere"])
def test_project_with_a_broken_repository_is_copied_without_git(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    project = own_project(tmp_path)
    match kind:
        case "empty folder":
            (project / ".git").mkdir()
        case "empty file":
            (project / ".git").touch()
        case "leads nowhere":
            (project / ".git").write_text("gitdir: ../gone\n")

    code = read_code(store_project(project))
    check_out(code, tmp_path / "out")

    assert (code.commit, code.diff) == ("", "")
    assert f"{project}/.git is not used: the repository is incomplete" in caplog.text
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"train.py", "muster.yaml"}


@pytest.mark.parametrize(
    "setting",
    [
        "filter.evil.clean",
        "filter.evil.process",
        "core.fsmonitor",
        "diff.external",
        "diff.evil.textconv",
        "diff.evil.command",
        "core.pager",
        "core.sshCommand",
        "core.askPass",
        "credential.helper",
        "gpg.program",
        "submodule.inner.update",
    ],
)
@pytest.mark.parametrize("where", ["config", "included", "environment"])
def test_programs_named_by_the_user_s_repository_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, where: str
) -> None:
    project = own_project(tmp_path)
    proof = tmp_path / "proof"
    program = str(planted_program(tmp_path, proof))
    git(project, "init", "-q")
    (project / ".gitattributes").write_text("*.py filter=evil diff=evil\n[attr]evil filter=evil\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    value = f"!{program}" if setting == "submodule.inner.update" else program
    match where:
        case "config":
            git(project, "config", setting, value)
        case "included":
            git(project, "config", "--file", str(tmp_path / "more"), setting, value)
            git(project, "config", "include.path", str(tmp_path / "more"))
        case "environment":
            monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
            monkeypatch.setenv("GIT_CONFIG_KEY_0", setting)
            monkeypatch.setenv("GIT_CONFIG_VALUE_0", value)
            monkeypatch.setenv("GIT_EXTERNAL_DIFF", program)
            monkeypatch.setenv("GIT_PAGER", program)
    (project / "train.py").write_text("print(2)\n")
    (project / "muster.yaml").write_text("name: b\n")
    proof.unlink(missing_ok=True)

    code = read_code(store_project(project))

    assert not proof.exists()
    assert len(code.commit) == 40
    assert "+name: b\n" in code.diff
    # train.py is not compared, because git would run the attacker's filter program to compare it.
    assert "train.py: this file was not compared" in code.diff and "print(2)" not in code.diff


def test_hooks_and_settings_of_nested_repositories_do_not_run(tmp_path: Path) -> None:
    project = own_project(tmp_path)
    proof = tmp_path / "proof"
    program = planted_program(tmp_path, proof)
    git(project, "init", "-q")
    inner = project / "inner"
    inner.mkdir()
    (inner / "a.txt").write_text("a")
    (inner / ".gitattributes").write_text("* filter=evil\n")
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "first")
    git(project, "submodule", "add", "-q", str(inner), "sub")
    git(project, "commit", "-qm", "first")
    for place in (project, inner, project / "sub"):
        hooks = Path(git(place, "rev-parse", "--absolute-git-dir").strip()) / "hooks"
        for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
            shutil.copy(program, hooks / hook)
        for setting in ("filter.evil.clean", "core.fsmonitor"):
            git(place, "config", setting, str(program))
    (project / "sub" / "a.txt").write_text("b")
    (inner / "a.txt").write_text("c")
    proof.unlink(missing_ok=True)

    code = read_code(store_project(project))
    check_out(code, tmp_path / "out")

    assert not proof.exists()
    assert (tmp_path / "out" / "sub" / "a.txt").read_text() == "b"
    assert (tmp_path / "out" / "inner" / "a.txt").read_text() == "c"


def test_environment_variables_of_git_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = own_project(tmp_path / "a")
    other = own_project(tmp_path / "b")
    for place in (project, other):
        git(place, "init", "-q")
        git(place, "add", ".")
        git(place, "commit", "-qm", "first")
    (other / "secret.txt").write_text("secret")
    git(other, "add", ".")
    git(other, "commit", "-qm", "second")
    commit = git(project, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other / ".git" / "objects"))

    code = read_code(store_project(project))

    assert (code.commit, code.diff) == (commit, "")


def test_work_tree_in_the_settings_of_git_is_ignored(tmp_path: Path) -> None:
    project = own_project(tmp_path / "a")
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret.txt").write_text("secret")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    git(project, "config", "core.worktree", str(other))

    code = read_code(store_project(project))
    check_out(code, tmp_path / "out")

    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.py", "muster.yaml"}
    assert code.diff == ""


def lfs_project(place: Path) -> tuple[Path, Path]:
    """Create a project with weights under git-lfs, without running git-lfs.

    Returns:
        The folder of the project, and its file of weights.
    """
    project = own_project(place)
    weights = project / "weights.bin"
    content = b"\x00weights\xff" * 100
    pointer = "version https://git-lfs.github.com/spec/v1\n"
    pointer += f"oid sha256:{sha256(content).hexdigest()}\nsize {len(content)}\n"
    git(project, "init", "-q")
    weights.write_text(pointer)
    git(project, "add", ".")
    (project / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    git(project, "add", ".gitattributes")
    git(project, "commit", "-qm", "first")
    weights.write_bytes(content)
    return project, weights


def test_files_of_git_lfs_are_compared_by_hash(tmp_path: Path) -> None:
    project, weights = lfs_project(tmp_path)
    (project / "train.py").write_text("print(2)\n")

    unchanged = read_code(store_project(project)).diff
    weights.write_bytes(b"other")
    changed = read_code(store_project(project)).diff
    weights.unlink()
    removed = read_code(store_project(project)).diff

    assert "+print(2)\n" in unchanged and "weights" not in unchanged
    assert changed.endswith(
        "weights.bin: the content of this Git LFS file differs from the commit\n"
    )
    assert removed.endswith("weights.bin: this Git LFS file was removed\n")
    assert "+print(2)\n" in changed and "git-lfs.github.com" not in changed


def test_linked_work_tree_has_its_own_commit_and_index(tmp_path: Path) -> None:
    project = own_project(tmp_path)
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    (project / ".git" / "info" / "exclude").write_text("*.secret\n")
    git(project, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    (tmp_path / "side" / "train.py").write_text("print(3)\n")
    git(tmp_path / "side", "commit", "-qam", "second")
    (tmp_path / "side" / "muster.yaml").write_text("name: c\n")
    (tmp_path / "side" / "key.secret").write_text("secret")

    code = read_code(store_project(tmp_path / "side"))
    check_out(code, tmp_path / "out")

    assert code.commit == git(tmp_path / "side", "rev-parse", "HEAD").strip()
    assert "+name: c\n" in code.diff and "print(3)" not in code.diff
    assert (tmp_path / "out" / "key.secret").is_symlink()


@pytest.mark.parametrize("kind", ["sha256", "split index", "sparse", "crlf", "own excludes"])
def test_formats_and_settings_of_a_repository_do_not_change_the_diff(
    tmp_path: Path, kind: str
) -> None:
    project = own_project(tmp_path)
    git(project, "init", "-q", *(["--object-format=sha256"] if kind == "sha256" else []))
    if kind == "crlf":
        git(project, "config", "core.autocrlf", "true")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    match kind:
        case "split index":
            git(project, "update-index", "--split-index")
        case "sparse":
            git(project, "sparse-checkout", "set", "--no-cone", "/*", "!/muster.yaml")
        case "crlf":
            (project / "muster.yaml").write_bytes(b"name: a\r\n")
        case "own excludes":
            (tmp_path / "ignored").write_text("*.key\n")
            git(project, "config", "core.excludesFile", str(tmp_path / "ignored"))
            (project / "a.key").write_text("secret")
    (project / "train.py").write_text("print(2)\n")

    code = read_code(store_project(project))
    check_out(code, tmp_path / "out")

    assert code.commit == git(project, "rev-parse", "HEAD").strip()
    assert "+print(2)\n" in code.diff and "name: a" not in code.diff
    assert code.diff.count("diff --git") == 1
    assert not (tmp_path / "out" / "a.key").is_file() or (tmp_path / "out" / "a.key").is_symlink()


def test_diff_of_a_project_in_a_subfolder_excludes_the_other_files(tmp_path: Path) -> None:
    project = own_project(tmp_path)
    git(tmp_path, "init", "-q")
    (tmp_path / "other.txt").write_text("a\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "other.txt").write_text("b\n")
    (project / "train.py").write_text("print(2)\n")
    (tmp_path / "link").symlink_to(project)

    codes = [read_code(store_project(place)) for place in (project, tmp_path / "link")]

    assert all("+print(2)\n" in code.diff and "other.txt" not in code.diff for code in codes)
    assert codes[0].tree == codes[1].tree


def test_too_long_diff_is_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    project = own_project(tmp_path)
    for number in range(310):
        (project / f"f{number:03}.txt").write_text("a\n")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    for number in range(310):
        (project / f"f{number:03}.txt").write_text("b\n")

    diff = read_code(store_project(project)).diff

    assert diff.startswith("diff --git a/f000.txt")
    assert "characters more" in diff


@needs_another_user
@pytest.mark.parametrize(
    ("name", "content", "is_refused"),
    [
        (".env", "prefect_logging_settings_path=/tmp/evil.yml", True),
        ("prefect.toml", "[api]\nurl = 'http://127.0.0.1:1/api'", True),
        ("pyproject.toml", "tool.\"\\u0070refect\".api.url = 'http://127.0.0.1:1'", True),
        (".env", "EDITOR=vi", False),
        ("pyproject.toml", "project.dependencies = ['prefect']", False),
    ],
)
def test_prefect_settings_of_another_user_in_the_working_folder_are_rejected(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
    is_refused: bool,
) -> None:
    (shared / name).write_text(content)
    os.chown(shared / name, ATTACKER, ATTACKER)
    monkeypatch.chdir(shared)

    if not is_refused:
        refuse_foreign_settings(shared)
        return
    with pytest.raises(UntrustedPath):
        refuse_foreign_settings(shared)
    assert main(["ls"]) == 2

    assert f"{shared}/{name} belongs to" in capsys.readouterr().err


def test_prefect_settings_of_the_user_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "prefect.toml").write_text("[api]\nurl = 'http://127.0.0.1:1/api'")

    refuse_foreign_settings(tmp_path)
