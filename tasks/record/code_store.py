"""Store of the code of submitted runs in `$MUSTER_HOME/code`, and the software versions of a run.

The store has entries. The name of an entry is the SHA-256 of its content, so an entry never
changes. There are two kinds of entries:

- A *tree* is a tar archive of a project's files. It contains no times, no paths of the host and no
  user names. Equal files therefore always give a tree with the same name.
- A *code* is a line of JSON. It has the name of a tree, the path of the project folder, the last
  commit, and the changes since that commit.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import re
import stat
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath

from tasks.record.disk import replace_file
from tasks.record.empty_folders import find_empty_folders
from tasks.record.places import muster_home, read_own_file
from tasks.record.project_size import count_until
from tasks.record.repository import GitFailed, find_repository, git_view
from tasks.spec.errors import Fault, InvalidSpec, MusterError
from tasks.spec.formatting import join_commas
from tasks.spec.own_settings import CODE_MIB, IMAGE

#: Environment variable of a run's processes. The value is the path of the project folder. The code
#: of the run is a copy of this folder.
PROJECT = "MUSTER_PROJECT"
#: File names that are ignored in a project without a git repository, in addition to the names in
#: the project's .gitignore.
_IGNORED = (".git", ".venv", "venv", "node_modules", "wandb", ".env")
#: Matches the cache files of Python and of other tools. These files are not copied: Python could
#: load an outdated compiled file from the cache instead of the run's source file.
_CACHES = re.compile(r"(^|/)(__pycache__|\.[\w-]+_cache)(/|$)|\.py[co]$")
#: Modification time of all files that Muster writes into a run's code folder, in UTC epoch seconds.
#: If a file has a different time, it was changed later. The time is after 1980, because zip files
#: cannot store earlier times.
_MADE_AT = 946684800
#: Largest number of characters in the stored patch with the changes since the last commit. The rest
#: of the patch is cut off.
_DIFF_BYTES = 16_384
#: An entry of the code store that is younger than this number of seconds is not deleted, because a
#: new run may need the entry.
_SPARED_S = 24 * 3600.0
_NAME = re.compile(r"\b[0-9a-f]{64}\b")

#: Function that loads a missing entry of the code store, for example from the Prefect server. The
#: argument is the name of the entry. The result is the gzip-compressed content. None if there is no
#: such entry.
Fetch = Callable[[str], bytes | None]


class NoCode(MusterError):
    """The code of a run cannot be found on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Snapshot of a project in the code store: its files and its last git commit."""

    #: Name of the code store's entry for the project's files. The entry is a tar archive.
    tree: str
    #: Absolute path of the project folder.
    project: str
    #: Hash of the last git commit, or an empty string if there is none.
    commit: str = ""
    #: Changes of the project's files since the last commit, as a patch. Cut after 16,384
    #: characters.
    diff: str = ""


def store_project(root: Path, outputs: Collection[str] = ()) -> str:
    """Store a snapshot of a project in the code store, without the files that git ignores.

    Args:
        root: The project folder.
        outputs: Folders in which runs save their checkpoints, relative to the project folder. Files
            of such a folder are left out, unless git tracks a file in the folder.

    Returns:
        The name of the snapshot's entry in the code store.

    Raises:
        InvalidSpec: git could not list the files of the project, or the project is too large.
        InvalidVariable: MUSTER_CODE_MIB is not a number above 0.
        OSError: A file could not be read or written.
    """
    root = root.absolute()
    limit = int(CODE_MIB.read() * 2**20)
    left_out = _find_untracked_folders(root, outputs)
    _refuse_large_folder(root, limit, left_out)
    sizes: dict[str, int] = {}
    for name in sorted(_files(root, left_out).names):
        # A file may have been deleted after git listed it.
        with suppress(FileNotFoundError):
            sizes[name] = (root / name).lstat().st_size
    if sum(sizes.values()) > limit:
        count = f"{sum(sizes.values()) / 2**20:.0f} MiB in {len(sizes)} files"
        raise _too_large(root, count, sizes, limit)
    code = Code(tree=store_content(_packed(root, sizes)), project=str(root), **_changes(root))
    return store_content(json.dumps(asdict(code)).encode())


def _find_untracked_folders(root: Path, folders: Collection[str]) -> Set[str]:
    """Return those folders of a project that exist, and that contain no file that git tracks.

    A folder with tracked files belongs to the project. A run may read its files.

    Args:
        root: The project folder.
        folders: Paths relative to the project folder.
    """
    existing = {folder for folder in folders if os.path.lexists(root / folder)}
    if not existing or (repository := find_repository(root)) is None:
        return existing
    tracked: set[str] = set()
    with suppress(GitFailed, OSError), git_view(root, repository) as git:
        tracked = git.list("-c")
    return {
        folder for folder in existing if not any(_is_in_any(name, {folder}) for name in tracked)
    }


def _is_in_any(name: str, folders: Set[str]) -> bool:
    """Return True if a file is in one of several folders.

    All paths are relative to the project folder. `folders` may also contain the path of the file
    itself, because the key `checkpoints` may name a single file. Then the result is True, too.
    """
    return any(f"{name}/".startswith(f"{folder}/") for folder in folders)


def _refuse_large_folder(root: Path, limit: int, left_out: Set[str]) -> None:
    """Raise InvalidSpec if a folder is too large for git to list its files quickly.

    Args:
        root: The project folder.
        limit: Largest allowed size of the project's files in bytes.
        left_out: Folders that are not counted, relative to the project folder.
    """
    try:
        counted = count_until(root, limit, _IGNORED, left_out)
    except (GitFailed, OSError):
        # Ignore the error here. `_files` runs git again and reports the error.
        return
    if counted is None:
        return
    count = (
        f"more than {limit / 2**20:g} MiB of files (Muster stopped counting at "
        f"{counted.total_bytes / 2**20:.0f} MiB in {len(counted.sizes)} files)"
    )
    raise _too_large(root, count, counted.sizes, limit)


def _too_large(root: Path, count: str, sizes: Mapping[str, int], limit: int) -> InvalidSpec:
    """Return the error for a project that is too large to be copied.

    Args:
        root: The project folder.
        count: Text with the size and the number of the files.
        sizes: Mapping from the relative path of each counted file to its size in bytes.
        limit: Largest allowed size of the project's files in bytes.
    """
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    listed = join_commas(f"{name} {sizes[name] / 2**20:.1f} MiB" for name in largest)
    return _unfit(
        f"{root} has {count}. The limit for a project's code is {limit / 2**20:g} MiB. "
        f"The largest files: {listed}",
        "start the command in the folder of the project, or list data files in .gitignore. If the "
        "project itself is too large, raise the limit with the variable MUSTER_CODE_MIB. To run "
        "without a copy of the project, write `code: live` into the spec",
    )


def read_code(name: str, fetch: Fetch = lambda _: None) -> Code:
    """Return the snapshot of a project from the code store.

    Args:
        name: Name of the snapshot's entry in the code store.
        fetch: Function that returns the content of an entry that is missing in this store.

    Raises:
        NoCode: The entry is not available, or is not a snapshot. For example, the entry may be the
            tar archive to which a snapshot refers.
        OSError: The entry could not be read.
    """
    try:
        return Code(**json.loads(read_content(name, fetch)))
    except (ValueError, TypeError):
        message = (
            f"{name[:12]} is only a part of a project copy, not a whole copy. Use the value of "
            "the key `code` in the spec.yaml of a run."
        )
        raise NoCode(message) from None


def check_out(
    code: Code,
    place: Path,
    fetch: Fetch = lambda _: None,
    outputs: Collection[str] = (),
) -> None:
    """Write the project files of a snapshot into a folder.

    Missing and changed files are written again. Other files in the folder are kept.

    If the project folder exists on this machine, `place` also gets the empty folders of the
    project, and symbolic links to the files that git ignores in the project, such as data.

    Args:
        code: Snapshot of the project.
        place: The folder, which is created if it is missing.
        fetch: Function that returns the content of an entry that is missing in this code store.
        outputs: Folders whose files `store_project` may have left out, relative to the project. If
            the project has such a folder, the copy gets the folder, too, because a script may
            expect its output folder to exist.

    Raises:
        NoCode: The entry with the files is not available.
        OSError: A file could not be read or written.
    """
    data = read_content(code.tree, fetch)
    project = Path(code.project)
    place.mkdir(exist_ok=True)
    links: dict[str, str] = {}
    folders = {"": str(place)}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if ".." in member.name.split("/") or member.name.startswith("/"):
                raise NoCode(
                    f"the project copy {code.tree} contains a path outside of the project folder: "
                    f"{member.name}"
                )
            if member.issym():
                links[member.name] = member.linkname
            elif (file := tar.extractfile(member)) is not None:
                _write(_path_in(folders, member.name), file.read(), member.mode)
    # Create symbolic links only after all files. Otherwise, writing a file through a link could
    # change a file outside of the folder.
    for name, target in links.items():
        at = os.path.dirname(name)
        full = os.path.join(project, at, target)
        for root in (str(project), os.path.realpath(project)):
            inner = os.path.relpath(full, root)
            if inner.split("/", 1)[0] != "..":
                full = os.path.relpath(inner, at or ".")
                break
        _link(_path_in(folders, name), full)
    if project.is_dir():
        left_out = _find_untracked_folders(project, outputs)
        files = _files(project, left_out)
        for name in files.linked:
            # Do not link single files of a folder that is left out: the run would write through
            # the link, and overwrite the checkpoint of another run. If git ignores the folder
            # itself, link the folder, because the user wants all runs to share it.
            is_output = name not in left_out and _is_in_any(name, left_out)
            if not is_output and not os.path.lexists(place / name):
                _link(_path_in(folders, name), str(project / name))
        for name in find_empty_folders(
            project, lambda folder: folder in left_out or files.is_left_out(folder)
        ):
            _make_folder(place, name)
        for name in outputs:
            if (project / name).is_dir():
                _make_folder(place, name)


def hash_files(tree: str) -> dict[str, str]:
    """Return the file mode and the content hash of each project file in an entry of the code store.

    Args:
        tree: Name of the entry.

    Returns:
        Mapping from a relative path to a text such as `644 0a1b2c3d4e5f`.

    Raises:
        NoCode: The code store has no entry `tree`.
        OSError: The entry could not be read.
    """
    return {
        name: f"{mode:o} {sha256(content).hexdigest()[:12]}"
        for name, (mode, content) in read_files(tree).items()
    }


def read_files(tree: str) -> dict[str, tuple[int, bytes]]:
    """Return the file mode and the content of each project file in an entry of the code store.

    Args:
        tree: Name of the entry.

    Returns:
        Mapping from a relative path to the mode and the content. The content of a symbolic link is
        its target.

    Raises:
        NoCode: The code store has no entry `tree`.
        OSError: The entry could not be read.
    """
    files = {}
    with tarfile.open(fileobj=io.BytesIO(read_content(tree))) as tar:
        for member in tar:
            data = tar.extractfile(member) if member.isreg() else None
            content = data.read() if data else os.fsencode(member.linkname)
            files[member.name] = (member.mode, content)
    return files


def find_absolute_links(place: Path) -> list[str]:
    """Find symbolic links with absolute targets in a folder, and return their relative paths."""
    links = (path for path in place.rglob("*") if path.is_symlink())
    return [str(link.relative_to(place)) for link in links if os.readlink(link).startswith("/")]


def measure_unchanged_files(place: Path) -> dict[str, int]:
    """Return the sizes of the files that `check_out` wrote and that nobody has changed since.

    Returns:
        Mapping from a relative path to the size in bytes.
    """
    files = ((path, path.lstat()) for path in place.rglob("*"))
    return {
        str(path.relative_to(place)): at.st_size
        for path, at in files
        if stat.S_ISREG(at.st_mode) and at.st_mtime == _MADE_AT
    }


def list_import_folders(project: Path, place: Path, environment: Path | None) -> list[str]:
    """Return the folders from which a run's programs must import the packages of the project.

    An editable package would be imported from the project folder. With the returned folders on
    PYTHONPATH, Python imports the package from the run's copy of the project instead.

    Args:
        project: The project folder.
        place: Folder with the run's copy of the project.
        environment: Folder of the run's Python environment, or None for Muster's own environment.
    """
    found: dict[str, None] = {}
    roots = "|".join(map(re.escape, {str(project), os.path.realpath(project)}))
    inside = re.compile(rf"(?:{roots})(?=[/'\"\n:;]|$)([^'\"\n:;]*)")
    if environment is None:
        return []
    site = "lib/python*/site-packages"
    for file in (*environment.glob(f"{site}/*.pth"), *environment.glob(f"{site}/__editable__*.py")):
        with suppress(OSError, UnicodeError):
            for below in inside.findall(file.read_text("utf-8")):
                # A .pth file contains the path of a folder with packages. Return this folder. A
                # file `__editable__*.py` contains the path of a package itself. Return the parent
                # folder of the package.
                path = Path(below.lstrip("/"))
                if (file.suffix == ".pth" or path.parts) and ".venv" not in path.parts:
                    found[str(place / (path if file.suffix == ".pth" else path.parent))] = None
    return list(found)


def store_content(data: bytes) -> str:
    """Write content to the code store, and return the name of the new entry.

    Raises:
        OSError: The entry could not be written.
    """
    name = sha256(data).hexdigest()
    if _here(name) is None:
        _replace(name, gzip.compress(data, 3, mtime=0))
    os.utime(_path(name))
    return name


def read_content(name: str, fetch: Fetch = lambda _: None) -> bytes:
    """Return the content of an entry of the code store.

    Args:
        name: Name of the entry.
        fetch: Function that returns the content of an entry that is missing in this store. The
            content is then added to this store.

    Raises:
        NoCode: The entry is not available, or its content is damaged.
        OSError: The entry could not be read or written.
    """
    if (data := _here(name)) is not None:
        return data
    packed = fetch(name)
    if packed is None:
        raise NoCode(
            f"the project copy {name[:12]} of this run is missing: it is neither in "
            f"{_path(name).parent} nor on the Prefect server. Submit or deploy the run again."
        )
    _replace(name, packed)
    if (data := _here(name)) is None:
        _path(name).unlink()
        raise NoCode(
            f"the project copy {name[:12]} on the Prefect server is damaged. Submit or deploy the "
            "run again."
        )
    return data


def read_compressed(name: str) -> bytes:
    """Return the gzip-compressed content of an entry of the code store.

    Raises:
        OSError: The entry could not be read.
    """
    return read_own_file(_path(name))


def find_entry_names(text: str, fetch: Fetch = lambda _: None) -> set[str]:
    """Return the names of all code store entries that a text such as `spec.yaml` contains.

    If an entry is a snapshot of a project, the result also contains the name of the entry with the
    project's files.
    """
    names = set(_NAME.findall(text))
    for name in tuple(names):
        with suppress(OSError, NoCode):
            names.add(read_code(name, fetch).tree)
    return names


def delete_unused(named: Collection[str], *, is_dry: bool = False) -> dict[str, int]:
    """Delete the entries of the code store that no run needs.

    Entries that were stored within the last day are kept, because a new run may need them.

    Args:
        named: Names of the entries that runs need.
        is_dry: True to delete nothing, and to return only the entries that would be deleted.

    Returns:
        Mapping from the file name of each deleted entry to its size in bytes.
    """
    deleted_sizes = {}
    for path in sorted((muster_home() / "code").glob("*")):
        with suppress(FileNotFoundError):
            at = path.stat()
            if path.name.partition(".")[0] in named or time.time() - at.st_mtime < _SPARED_S:
                continue
            deleted_sizes[path.name] = at.st_size
            if not is_dry:
                path.unlink()
    return deleted_sizes


def describe_versions(code: Code | None, root: Path, python: Path) -> dict[str, object]:
    """Return the code and the software versions of a run for the run's record.

    Args:
        code: Snapshot of the project, or None if the run uses the files in `root` directly.
        root: The project folder.
        python: Path of the Python interpreter that runs the run's programs.
    """
    source = asdict(code) if code else {"tree": None, "project": str(root), **_changes(root)}
    images = (IMAGE.name, "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
    packages = sorted(
        file.name.removesuffix(".dist-info").split("-", 1)
        for file in python.parent.parent.glob("lib/python*/site-packages/*.dist-info")
    )
    return {
        **source,
        "python": f"{python} {_version(python)}".strip(),
        "packages": {parts[0]: parts[1] for parts in packages if len(parts) == 2},
        "driver": _first_line("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"),
        "gpus": sorted(
            match[1]
            for file in Path("/proc/driver/nvidia/gpus").glob("*/information")
            if (match := re.search(r"Model:\s*(.+)", file.read_text()))
        ),
        "image": next(filter(None, map(os.environ.get, images)), None),
    }


def _version(python: Path) -> str:
    if python == Path(sys.executable):
        return platform.python_version()
    with suppress(OSError):
        settings = (python.parent.parent / "pyvenv.cfg").read_text("utf-8")
        if match := re.search(r"^version(?:_info)?\s*=\s*(\S+)", settings, re.MULTILINE):
            return match[1]
    libraries = [file.name for file in python.parent.parent.glob("lib/python3*")]
    return libraries[0].removeprefix("python") if libraries else ""


def _first_line(*files: str) -> str | None:
    for file in files:
        with suppress(OSError):
            return " ".join(Path(file).read_text().split("\n", 1)[0].split())
    return None


def _path(name: str) -> Path:
    return muster_home() / "code" / f"{name}.gz"


def _here(name: str) -> bytes | None:
    """Return the content of an entry in this code store, or None if it is missing or damaged."""
    with suppress(FileNotFoundError, EOFError, gzip.BadGzipFile, ValueError, zlib.error):
        data = gzip.decompress(read_compressed(name))
        return data if sha256(data).hexdigest() == name else None
    return None


def _replace(name: str, content: bytes) -> None:
    _path(name).parent.mkdir(parents=True, exist_ok=True)
    replace_file(_path(name), content)


def _unfit(problem: str, remedy: str) -> InvalidSpec:
    return InvalidSpec((Fault(path="code", problem=problem, remedy=remedy),), "the project")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProjectFiles:
    """The files of a project, as git lists them. All paths are relative to the project folder."""

    #: Paths of the project's files and symbolic links. Files in nested repositories are included.
    names: set[str]
    #: Paths that git ignores. If git ignores a whole folder, only the folder is listed.
    ignored: set[str]
    #: Those paths in `ignored` that become symbolic links in a copy of the project.
    linked: set[str]
    #: Path of Muster's home directory, or None if this directory is outside the project.
    home: str | None

    def is_left_out(self, folder: str) -> bool:
        """Return True if a copy of the project has no folder of its own at this path.

        The copy usually has a symbolic link at the path of an ignored folder. The copy has nothing
        at the path of a cache or of Muster's home directory.
        """
        is_cache = _CACHES.search(folder) is not None
        return folder in self.ignored or folder == self.home or is_cache


def _files(root: Path, left_out: Set[str] = frozenset()) -> _ProjectFiles:
    """List the files of a project with git.

    Args:
        root: The project folder.
        left_out: Folders whose files are left out, relative to the project folder.

    Raises:
        InvalidSpec: git is missing, is too slow, or fails.
    """
    try:
        names, ignored = _listed(root)
    except (GitFailed, OSError) as error:
        remedy = (
            "repair the repository, move the spec to a separate folder, or write `code: live` in "
            "the spec"
        )
        raise _unfit(f"git could not list the files of {root}: {error}", remedy) from None

    home, real = muster_home().resolve(), root.resolve()
    # On a network file system, it takes long to resolve the folder of each file.
    resolve = cache(Path.resolve)
    for name in tuple(names):
        if _is_in_any(name, left_out):
            names.discard(name)
            continue
        path = root / name
        is_linked = resolve(path.parent) != (real / name).parent
        if is_linked or not os.path.lexists(path) or (real / name).is_relative_to(home):
            # Leave out a file that was deleted, is in Muster's home directory, or is behind a
            # symbolic link to a folder. git does not follow such links.
            names.discard(name)
        elif not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISLNK(mode):
            names.discard(name)
            if (path / ".git").exists():
                inner_files = _files(path)
                names |= {f"{name}/{inner}" for inner in inner_files.names}
                ignored |= {f"{name}/{inner}" for inner in inner_files.ignored}
    linked = {
        name
        for name in ignored
        if not (
            _CACHES.search(name)
            or home.is_relative_to(real / name)
            or (real / name).is_relative_to(home)
        )
    }
    inner_home = str(home.relative_to(real)) if home.is_relative_to(real) else None
    return _ProjectFiles(names=names, ignored=ignored, linked=linked, home=inner_home)


def _listed(root: Path) -> tuple[set[str], set[str]]:
    """Return the paths in a folder that git does not ignore, and the paths that git ignores.

    Raises:
        GitFailed: git is missing, is too slow, or fails.
        OSError: A temporary file could not be written.
    """
    if (repository := find_repository(root)) is not None:
        with git_view(root, repository) as git:
            # git lists no files if the repository of a parent folder ignores the whole project
            # folder. In this case, skip this branch, and list the files below without the
            # repository.
            if git.list("-c", "-o", "--directory", "--", "."):
                names, ignored = git.list("-c", "-o"), git.list("-o", "-i", "--directory")
                return _without_slash(names), _without_parents(_without_slash(ignored))
    with git_view(root, None) as git:
        excludes = tuple(f"--exclude={name}" for name in _IGNORED)
        names = git.list("-o", *excludes)
        ignored = git.list("-o", "-i", "--directory", *excludes)
    return _without_slash(names), _without_parents(_without_slash(ignored))


def _without_parents(names: Collection[str]) -> set[str]:
    """Return the paths that are not parent folders of other paths.

    If a folder contains nothing except ignored empty folders, git lists both the folder and the
    ignored folders, although git does not ignore the folder itself.
    """
    parents = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    return {*names} - parents


def _without_slash(names: Collection[str]) -> set[str]:
    return {name.rstrip("/") for name in names}


def _changes(root: Path) -> dict[str, str]:
    """Return the last commit of a project, and the changes since this commit as a patch.

    Returns:
        The fields `commit` and `diff` of `Code`. The result is empty if the project has no commit,
        or if its repository is missing or not trusted.
    """
    if (repository := find_repository(root)) is None:
        return {}
    with suppress(GitFailed, OSError), git_view(root, repository) as git:
        commit = git.commit()
        if not commit:
            return {}
        diff = git.diff(commit)
        if len(diff) > _DIFF_BYTES:
            diff = f"{diff[:_DIFF_BYTES]}\n... and {len(diff) - _DIFF_BYTES} characters more\n"
        return {"commit": commit, "diff": os.fsencode(diff).decode("utf-8", "replace")}
    return {}


def _packed(root: Path, names: Collection[str]) -> bytes:
    """Return a tar archive of some files of a project. Deleted files are left out.

    Args:
        root: The project folder.
        names: Relative paths of the files and symbolic links, in the order of the archive.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            path = root / name
            info = tarfile.TarInfo(name)
            info.mtime = _MADE_AT
            data = b""
            with suppress(FileNotFoundError):
                if path.is_symlink():
                    info.type = tarfile.SYMTYPE
                    info.linkname = os.readlink(path)
                else:
                    data = path.read_bytes()
                    info.size = len(data)
                    info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
                tar.addfile(info, io.BytesIO(data))
    return archive.getvalue()


def _path_in(folders: dict[str, str], name: str) -> str:
    """Create the parent folders of a project file, and return the path at which to write the file.

    A symbolic link or a file in the place of a parent folder is deleted.

    Args:
        folders: Mapping from relative to absolute paths of the folders that exist already. New
            folders are added.
        name: Relative path of the file.
    """
    above, _, last = name.rpartition("/")
    if above not in folders:
        folder = folders[above] = _path_in(folders, above)
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                os.unlink(folder)
        os.makedirs(folder, exist_ok=True)
    return f"{folders[above]}/{last}"


def _make_folder(place: Path, name: str) -> None:
    """Create an empty folder in a copy of a project.

    Missing parent folders are created, too. The folder is not created if the copy has a file or a
    symbolic link at the path of the folder or of a parent folder.

    Args:
        place: Folder with the copy.
        name: Relative path of the empty folder.
    """
    path = str(place)
    for part in name.split("/"):
        path = f"{path}/{part}"
        with suppress(FileExistsError):
            os.mkdir(path)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return


def _write(path: str, data: bytes, mode: int) -> None:
    """Write a project file, unless the path already has a file with this content and mode."""
    with suppress(FileNotFoundError):
        if _is_same_file(path, data, mode):
            return
        _make_way(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.utime(fd, (_MADE_AT, _MADE_AT))


def _is_same_file(path: str, data: bytes, mode: int) -> bool:
    """Return True if `_write` has already written a file with the same content and mode to a path.

    The whole content is compared, because a comparison of size and modification time would miss
    changes: all files that Muster writes have the same modification time.

    Raises:
        FileNotFoundError: There is no file at the path.
    """
    status = os.lstat(path)
    has_same_properties = (
        stat.S_ISREG(status.st_mode)
        and status.st_mtime == _MADE_AT
        and status.st_size == len(data)
        and bool(status.st_mode & 0o100) == bool(mode & 0o100)
    )
    if not has_same_properties:
        return False
    try:
        with open(path, "rb") as file:
            return file.read() == data
    except PermissionError:
        return False


def _link(path: str, target: str) -> None:
    with suppress(FileNotFoundError):
        if os.path.islink(path) and os.readlink(path) == target:
            return
        _make_way(path)
    os.symlink(target, path)


def _make_way(path: str) -> None:
    """Remove the file, symbolic link or folder at a path, so that a new file can be written there.

    A file or link is deleted. A folder is only renamed, because it may contain files of the user.
    """
    try:
        os.unlink(path)
    except IsADirectoryError:
        os.rename(path, f"{path}.{time.time_ns()}")
