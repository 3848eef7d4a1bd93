"""Ask git about the files, the last commit and the changes of a project.

The settings of a git repository can name programs: filters, hooks, file monitors, diff viewers and
transports. git would run them, even if another person wrote the settings. Therefore git does not
read these settings here. It works in a git directory that Muster creates, with a copy of the
repository's index and access to its objects. git gets only the settings and attributes that this
module lists.

A repository is used only if all its files belong to this user or to root; see `find_repository`.
Source: CVE-2022-24765, gitrepository-layout(5), git-config(1), gitattributes(5).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.spec.errors import MusterError
from tasks.spec.formatting import format_count
from tasks.spec.ownership import find_folder_fault, find_marker_fault, is_present, warn_ignored

#: Time limit for a git command, in seconds.
_ANSWERS_WITHIN_S = 60.0
#: Largest number of object stores in a chain. An object store of git can refer to another object
#: store, called its alternate. git has the same limit.
_ALTERNATES_DEPTH = 5
#: Largest number of files in a patch. More are not needed, because a patch is cut after 16,384
#: characters.
_PATCHED_FILES = 300
#: Largest number of changed files with a git filter, such as git-lfs, that are compared with the
#: last commit. Each comparison runs a git command, so further files are only listed by name.
_COMPARED_FILES = 100

#: Names of the settings of a repository that are passed to git. git never executes the values of
#: these settings as programs.
_SETTINGS = (
    *("core.autocrlf", "core.eol", "core.excludesfile", "core.filemode", "core.ignorecase"),
    *("core.symlinks", "core.sparsecheckout", "core.sparsecheckoutcone"),
)
#: Settings for each git command. These settings override those of the user and of the machine, so
#: that git does not run other programs.
_SWITCHED_OFF = (
    *("core.fsmonitor=false", "core.untrackedCache=false", "core.hooksPath=/dev/null"),
    *("core.pager=cat", "core.askPass=", "core.sshCommand=false", "credential.helper="),
    *("core.attributesFile=/dev/null", "diff.external=", "diff.submodule=short"),
    *("diff.ignoreSubmodules=dirty", "submodule.recurse=false", "protocol.allow=never"),
    *("gpg.program=false", "gc.auto=0", "maintenance.auto=false", "advice.detachedHead=false"),
)
#: Content of the file `info/attributes` in Muster's own git directory. The line `* -filter`
#: switches off all filters, so that git does not run their programs. Other attributes in
#: `.gitattributes` files still apply.
_ATTRIBUTES = "* -filter\n"
#: Matches the text that git-lfs commits in place of a large file. Source: git-lfs, docs/spec.md.
_LFS_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-[^\n]*\n)*"
    rb"oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)


class GitFailed(MusterError):
    """A git command failed, because git is missing, is too slow, or rejects the repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A git repository whose files belong to this user or to root."""

    #: Absolute path of the folder that contains `.git`, with symbolic links resolved.
    work_tree: Path
    #: Path of the git directory for this work tree. The directory contains HEAD and the index.
    git_dir: Path
    #: Path of the git directory with the objects, branches and settings that all work trees share.
    #: Differs from `git_dir` only for work trees that `git worktree` created.
    common_dir: Path


def find_repository(folder: Path) -> Repository | None:
    """Return the git repository that contains a folder, or None if there is no trusted repository.

    The folder and its parent folders are searched. The search stops at a folder that belongs to
    another user or is writable for other users. If a repository is not trusted, the reason is
    logged.
    """
    place = folder.resolve()
    for above in (place, *place.parents):
        mark = above / ".git"
        try:
            if fault := find_folder_fault(above):
                if is_present(mark):
                    warn_ignored(mark, fault)
                return None
        except OSError:
            return None
        if is_present(mark):
            return repository_at(above)
    return None


def repository_at(work_tree: Path) -> Repository | None:
    """Return the git repository whose `.git` is directly in a folder.

    Return None if the repository is incomplete or not trusted. The reason is logged.
    """
    mark = work_tree / ".git"
    try:
        if fault := find_marker_fault(mark):
            warn_ignored(mark, fault)
            return None
        git_dir = mark if mark.is_dir() else _named_in(mark, "gitdir: ")
        common_dir = git_dir
        if is_present(git_dir / "commondir"):
            common_dir = _named_in(git_dir / "commondir", "")
        if not is_present(git_dir / "HEAD") or not (common_dir / "objects").is_dir():
            raise ValueError("the file `HEAD` or the folder `objects` is missing")
        if fault := _fault_of(git_dir, common_dir):
            warn_ignored(mark, fault)
            return None
    except (OSError, ValueError) as error:
        warn_ignored(mark, f"the repository is incomplete: {error}")
        return None
    return Repository(work_tree=work_tree.resolve(), git_dir=git_dir, common_dir=common_dir)


def _named_in(file: Path, prefix: str) -> Path:
    """Return the folder whose path is in a file such as `.git`.

    Args:
        file: The file, which belongs to a git repository.
        prefix: Text before the path in the file, such as `gitdir: `.

    Raises:
        OSError: The file could not be read, or belongs to another user.
        ValueError: The file does not contain the path of a folder.
    """
    if fault := find_marker_fault(file):
        raise PermissionError(fault)
    text = os.fsdecode(file.read_bytes()).rstrip("\n")
    if not text.startswith(prefix) or len(text) == len(prefix):
        raise ValueError(f"{file} does not contain the path of a folder")
    return (file.parent / text.removeprefix(prefix)).resolve()


def _fault_of(git_dir: Path, common_dir: Path) -> str:
    """Return the reason why a repository is not trusted, or an empty string if it is trusted.

    Raises:
        OSError: A file of the repository could not be checked.
    """
    own = ("HEAD", "index", "config.worktree")
    shared = ("config", "objects", "refs", "packed-refs", "info", "info/exclude")
    parts = [git_dir, common_dir]
    parts += [git_dir / name for name in own]
    parts += [common_dir / name for name in shared]
    for part in parts:
        if is_present(part) and (fault := find_marker_fault(part)):
            return fault
    return _alternates_fault(common_dir / "objects", 0)


def _alternates_fault(objects: Path, depth: int) -> str:
    """Return the reason why an alternate object store is not trusted, or an empty string.

    git also searches for objects in alternate object stores, which belong to other repositories.

    Args:
        objects: An object store that may refer to alternate stores.
        depth: Number of stores in the chain before this store, 0 for the repository's own store.

    Raises:
        OSError: A file could not be checked.
    """
    listed = objects / "info" / "alternates"
    if not is_present(listed):
        return ""
    if fault := find_marker_fault(listed):
        return fault
    if depth == _ALTERNATES_DEPTH:
        return (
            "the chain of Git object stores (objects/info/alternates) is longer than "
            f"{_ALTERNATES_DEPTH}; the last file of the chain is {listed}"
        )
    for line in os.fsdecode(listed.read_bytes()).splitlines():
        if not line or line.startswith("#"):
            continue
        store = objects / line.strip('"')
        if is_present(store):
            fault = find_marker_fault(store) or _alternates_fault(store, depth + 1)
            if fault:
                return f"the repository uses the Git objects of {store}, and {fault}"
    return ""


class GitView:
    """Runs git commands that read a folder. The function `git_view` creates an instance."""

    def __init__(self, folder: Path, repository: Repository | None, place: Path) -> None:
        """
        Args:
            folder: Folder whose files are compared with a commit.
            repository: Git repository that contains the folder, or None. Without a repository, git
                treats all files as new.
            place: Empty folder that becomes Muster's own git directory.
        """
        self._folder = folder
        self._repository = repository
        self._work_tree = repository.work_tree if repository else folder.resolve()
        self._git_dir = place
        self._settings: tuple[str, ...] = ()
        self._lend()

    def list(self, *options: str) -> set[str]:
        """Return the paths that `git ls-files` lists, relative to the folder. Raises: GitFailed."""
        words = ("ls-files", "-z", "--exclude-standard", *options)
        return {name for name in self._ask(self._folder, *words).split("\0") if name}

    def list_ignored(self, names: Collection[str]) -> set[str]:
        """Return the files and folders that git ignores.

        Args:
            names: Paths of the files and folders, relative to the folder of this `GitView`.

        Raises:
            GitFailed: The command failed.
        """
        if not names:
            return set()
        # Add the prefix `./` to each path. Otherwise, git would read a path such as `:(top)x` as a
        # pattern. `git check-ignore` does not support the option `--literal-pathspecs`.
        listed_names = "".join(f"./{name}\0" for name in names)
        words = ("--no-literal-pathspecs", "check-ignore", "-z", "--stdin")
        # The command exits with 1 if git ignores none of the paths.
        output = self._ask(self._folder, *words, input=listed_names, successes=(0, 1))
        return {name.removeprefix("./") for name in output.split("\0") if name}

    def commit(self) -> str:
        """Return the hash of the last commit, or an empty string if there is no commit."""
        if self._repository is None:
            return ""
        with suppress(GitFailed):
            # Let git itself find the last commit in the repository's git directory, because
            # branches are stored in several formats. The command `git rev-parse` is safe: it runs
            # no programs from the repository's settings.
            git_dir = self._repository.git_dir
            words = ("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
            return self._run(self._work_tree, (f"--git-dir={git_dir}",), *words).strip()
        return ""

    def diff(self, commit: str) -> str:
        """Return the changes of the tracked files since a commit, as a patch.

        Files with a git filter, such as git-lfs, are not part of the patch. The patch is followed
        by a line for each of these files that has changed or was not compared.

        Raises:
            GitFailed: A git command failed.
        """
        folder = os.path.relpath(self._folder.resolve(), self._work_tree)
        options = (
            *("diff", "--no-color", "--no-ext-diff", "--no-textconv"),
            *("--submodule=short", "--ignore-submodules=dirty", commit),
        )
        names = self._ask(
            self._work_tree, *options, "--name-only", "-z", "--no-renames", "--", folder
        )
        changed = [name for name in names.split("\0") if name]
        filters = self._filters_of(changed)
        compared = [name for name in changed if name not in filters]
        patch = ""
        if compared:
            first = compared[:_PATCHED_FILES]
            patch = self._ask(self._work_tree, *options, "--", *first)
        if len(compared) > _PATCHED_FILES:
            patch += f"... and {format_count(len(compared) - _PATCHED_FILES, 'file')} more\n"
        lines = (self._filtered_line(commit, name, at) for at, name in enumerate(filters))
        return patch + "".join(lines)

    def _filters_of(self, names: Sequence[str]) -> dict[str, str]:
        """Return a mapping from file paths to the names of their git filters.

        Files without a git filter are omitted.
        """
        if not names:
            return {}
        # The file `info/attributes` switches off all filters, so git would report no filters.
        # Remove the file while this git command runs, and write it again afterwards.
        attributes = self._git_dir / "info" / "attributes"
        attributes.unlink()
        try:
            listed_names = "".join(f"{name}\0" for name in names)
            words = ("check-attr", "-z", "--stdin", "filter")
            fields = self._ask(self._work_tree, *words, input=listed_names).split("\0")
        finally:
            attributes.write_text(_ATTRIBUTES)
        values = zip(fields[::3], fields[2::3], strict=False)
        return {name: value for name, value in values if value not in ("unspecified", "unset")}

    def _filtered_line(self, commit: str, name: str, position: int) -> str:
        """Return a line that says how a file with a git filter differs from a commit.

        Args:
            commit: Hash of the commit with which the file is compared.
            name: Path of the file in the work tree.
            position: Index of the file among the changed files with a git filter. Only the first
                `_COMPARED_FILES` of these files are compared.

        Returns:
            The line with a newline, or an empty string if the file is unchanged. If the file was
            not compared, the line says so.
        """
        if position >= _COMPARED_FILES:
            return f"{name}: this file was not compared, because a Git filter creates its content\n"
        path = self._work_tree / name
        try:
            pointer = self._ask(self._work_tree, "cat-file", "blob", f"{commit}:{name}")
        except GitFailed:
            return f"{name}: this new file is not shown, because a Git filter creates its content\n"
        match = _LFS_POINTER.fullmatch(os.fsencode(pointer))
        if match is None:
            return f"{name}: this file was not compared, because a Git filter creates its content\n"
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name}: this Git LFS file is not a regular file any more\n"
            with path.open("rb") as file:
                if file.read(len(pointer) + 1) == os.fsencode(pointer):
                    # The file still contains the pointer text of git-lfs instead of the real
                    # content, so the file does not differ from the commit.
                    return ""
                file.seek(0)
                is_same = status.st_size == int(match[2])
                is_same = is_same and _sha256(file) == match[1].decode()
        except FileNotFoundError:
            return f"{name}: this Git LFS file was removed\n"
        except OSError as error:
            return f"{name}: not compared: {error.strerror}\n"
        return (
            "" if is_same else f"{name}: the content of this Git LFS file differs from the commit\n"
        )

    def _lend(self) -> None:
        """Copy the index and safe settings of the repository into Muster's own git directory.

        git commands then use this directory. So they cannot change the repository, and cannot run
        programs that are named in the repository's settings.

        Raises:
            OSError: A file could not be read or written.
            GitFailed: The settings of the repository could not be read.
        """
        for name in ("objects", "refs", "info"):
            (self._git_dir / name).mkdir()
        (self._git_dir / "HEAD").write_text("ref: refs/heads/none\n")
        (self._git_dir / "config").write_text("[core]\n\tbare = false\n")
        (self._git_dir / "info" / "attributes").write_text(_ATTRIBUTES)
        if self._repository is None:
            return
        self._settings = self._settings_of(self._repository)
        if "extensions.objectformat=sha256" in self._settings:
            text = "[core]\n\tbare = false\n\trepositoryformatversion = 1\n"
            text += "[extensions]\n\tobjectFormat = sha256\n"
            (self._git_dir / "config").write_text(text)
        self._settings = tuple(name for name in self._settings if name.startswith("core."))
        git_dir = self._repository.git_dir
        common_dir = self._repository.common_dir
        with suppress(FileNotFoundError):
            # copy2 keeps the modification time of the index. Without this time, git cannot detect
            # files that were changed after the index was written.
            shutil.copy2(git_dir / "index", self._git_dir / "index")
        for part in git_dir.glob("sharedindex.*"):
            shutil.copy2(part, self._git_dir / part.name)
        with suppress(FileNotFoundError):
            shutil.copyfile(common_dir / "info" / "exclude", self._git_dir / "info" / "exclude")

    def _settings_of(self, repository: Repository) -> tuple[str, ...]:
        """Return the safe settings of a repository, each as `name=value`.

        Other settings are not passed to git, because they could make git run a program. Settings in
        included files are ignored.
        """
        pattern = "|".join(map(re.escape, (*_SETTINGS, "extensions.objectformat")))
        words = ("config", "--file", str(repository.common_dir / "config"), "--no-includes")
        try:
            output = self._ask(self._work_tree, *words, "-z", "--get-regexp", f"^({pattern})$")
        except GitFailed:
            # git fails if the repository has none of the safe settings.
            return ()
        pairs = (item.partition("\n") for item in output.split("\0") if item)
        return tuple(f"{name}={value if newline else 'true'}" for name, newline, value in pairs)

    def _ask(
        self, cwd: Path, *words: str, input: str = "", successes: Collection[int] = (0,)
    ) -> str:
        """Run a git command in Muster's own git directory, and return its output.

        Args:
            cwd: Working directory of the command.
            words: The git command and its arguments.
            input: Standard input of the command.
            successes: Exit codes that mean success.

        Raises:
            GitFailed: The command failed.
        """
        settings = (part for setting in self._settings for part in ("-c", setting))
        options = (f"--git-dir={self._git_dir}", f"--work-tree={self._work_tree}", *settings)
        return self._run(cwd, options, *words, input=input, successes=successes)

    def _run(
        self,
        cwd: Path,
        options: Sequence[str],
        *words: str,
        input: str = "",
        successes: Collection[int] = (0,),
    ) -> str:
        """Run a git command and return its output.

        Args:
            cwd: Working directory of the command.
            options: Options before the git command, such as `--git-dir`.
            words: The git command and its arguments.
            input: Standard input of the command.
            successes: Exit codes that mean success.

        Raises:
            GitFailed: The command failed or did not end in time.
        """
        # Remove the variables GIT_*. If a git hook has started Muster, these variables refer to the
        # repository of the hook instead of the project's repository.
        env = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
        env |= {
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        if self._repository is not None:
            env["GIT_OBJECT_DIRECTORY"] = str(self._repository.common_dir / "objects")
        switched_off = (part for setting in _SWITCHED_OFF for part in ("-c", setting))
        command = ("git", "--no-pager", "--literal-pathspecs", *switched_off, *options, *words)
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=env,
                input=os.fsencode(input),
                capture_output=True,
                timeout=_ANSWERS_WITHIN_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GitFailed(str(error)) from None
        if done.returncode not in successes:
            raise GitFailed(os.fsdecode(done.stderr).strip() or f"exit code {done.returncode}")
        return os.fsdecode(done.stdout)


@contextmanager
def git_view(folder: Path, repository: Repository | None) -> Iterator[GitView]:
    """Yield a `GitView` of a folder.

    The view has a temporary git directory, which is deleted at the end of the `with` block.

    Args:
        folder: The folder.
        repository: Git repository that contains the folder, or None.

    Raises:
        OSError: The git directory could not be created.
        GitFailed: A git command failed.
    """
    with tempfile.TemporaryDirectory(prefix="muster-git-") as place:
        yield GitView(folder, repository, Path(place))


def _sha256(file: object) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
