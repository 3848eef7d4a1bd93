"""The code of runs as it was when they were submitted, kept in `$MUSTER_HOME/code`, and what else a
run was made of.

What is kept has the SHA-256 of its content for a name, is written once and never changed. A tree is
a tar in which nothing says when, where or by whom it was made, so that equal files have one name. A
code is a line of JSON: the tree, the project that it was taken from, and how it differed from the
last commit.
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
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from tasks.record.disk import replace_file
from tasks.record.places import muster_home, read_own_file
from tasks.record.repository import GitFailed, find_repository, git_view
from tasks.spec.errors import Fault, InvalidSpec, MusterError
from tasks.spec.formatting import join_commas
from tasks.spec.programs import own_environment

#: Where a run's process and its components find the project that their code was taken from.
PROJECT = "MUSTER_PROJECT"
#: Of a project's files together, in MiB; MUSTER_CODE_MIB says otherwise.
_LIMIT_MIB = 50.0
#: What is ignored in a project that has no git; its .gitignore counts too.
_IGNORED = (".git", ".venv", "venv", "node_modules", "wandb", ".env")
#: Python would take what it has compiled of other code for that of these files.
_CACHES = re.compile(r"(^|/)(__pycache__|\.[\w-]+_cache)(/|$)|\.py[co]$")
#: The time of every file that is checked out, by which it is known for one; zip knows none before
#: 1980.
_MADE_AT = 946684800
#: Of a difference from the last commit, in bytes.
_DIFF_BYTES = 16_384
#: What nothing names yet may be about to be named.
_SPARED_S = 24 * 3600.0
_NAME = re.compile(r"\b[0-9a-f]{64}\b")

#: The packed content of that name from somewhere else; None where that has none.
Fetch = Callable[[str], bytes | None]


class NoCode(MusterError):
    """The code of a run is not to be had here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A project as it was at one moment."""

    #: The name of the tree.
    tree: str
    #: Its folder, absolute.
    project: str
    #: Of git; empty where there is none.
    commit: str = ""
    #: How what git knows differs from the commit, as a patch, cut to its first 16 KiB.
    diff: str = ""


def put(root: Path) -> str:
    """Keep a project as it is now, without what git ignores; the name of its code.

    Raises: InvalidSpec, where git can't list it, or it is too large; OSError.
    """
    root = root.absolute()
    sizes: dict[str, int] = {}
    for name in sorted(_files(root)[0]):
        with suppress(FileNotFoundError):  # Removed meanwhile.
            sizes[name] = (root / name).lstat().st_size
    asked = os.environ.get("MUSTER_CODE_MIB") or str(_LIMIT_MIB)
    try:
        limit = int(float(asked) * 2**20)
    except (ValueError, OverflowError):
        raise _unfit(f"MUSTER_CODE_MIB={asked} is no number", "write MUSTER_CODE_MIB=50") from None
    if sum(sizes.values()) > limit:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
        listed = join_commas(f"{name} {sizes[name] / 2**20:.1f} MiB" for name in largest)
        raise _unfit(
            f"{root} has {sum(sizes.values()) / 2**20:.0f} MiB in {len(sizes)} files, more than "
            f"the {limit / 2**20:g} MiB of a project's code; the largest: {listed}",
            "have .gitignore name what is no code, set MUSTER_CODE_MIB, or write code: live",
        )
    code = Code(tree=keep(_packed(root, sizes)), project=str(root), **_changes(root))
    return keep(json.dumps(asdict(code)).encode())


def code_of(name: str, fetch: Fetch = lambda _: None) -> Code:
    """Raises: NoCode; OSError."""
    try:
        return Code(**json.loads(read(name, fetch)))
    except (ValueError, TypeError):
        said = f"{name[:12]} names no code, but a tree of one: a run's spec.yaml names its code"
        raise NoCode(said) from None


def check_out(code: Code, place: Path, fetch: Fetch = lambda _: None) -> None:
    """Have the files of a tree in a folder, as they were: what is missing or was changed is written
    anew, and what else is there stays.

    What the project ignores, data for example, is linked from there, where this machine has it.

    Raises: NoCode; OSError.
    """
    data, project = read(code.tree, fetch), Path(code.project)
    place.mkdir(exist_ok=True)
    links: dict[str, str] = {}
    folders = {"": str(place)}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if ".." in member.name.split("/") or member.name.startswith("/"):
                raise NoCode(f"the tree {code.tree} leads out of its folder: {member.name}")
            if member.issym():
                links[member.name] = member.linkname
            elif (file := tar.extractfile(member)) is not None:
                _write(_path_in(folders, member.name), file.read(), member.mode)
    # After all files: none is written through a link.
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
        for name in _files(project)[1]:
            if not os.path.lexists(place / name):
                _link(_path_in(folders, name), str(project / name))


def contents_of(tree: str) -> dict[str, str]:
    """Of each file of a tree what tells its content and mode. Raises: NoCode, OSError."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(read(tree))) as tar:
        for member in tar:
            data = tar.extractfile(member) if member.isreg() else None
            content = data.read() if data else os.fsencode(member.linkname)
            found[member.name] = f"{member.mode:o} {sha256(content).hexdigest()[:12]}"
    return found


def links_in(place: Path) -> list[str]:
    """The paths of links that lead out of a folder by an absolute path."""
    links = (path for path in place.rglob("*") if path.is_symlink())
    return [str(one.relative_to(place)) for one in links if os.readlink(one).startswith("/")]


def own_files(place: Path) -> dict[str, int]:
    """Bytes of the files that were checked out into a folder and not changed, by their path."""
    files = ((path, path.lstat()) for path in place.rglob("*"))
    return {
        str(path.relative_to(place)): at.st_size
        for path, at in files
        if stat.S_ISREG(at.st_mode) and at.st_mtime == _MADE_AT
    }


def import_path(project: Path, place: Path) -> list[str]:
    """Return the folders in which Python finds first the packages of the project itself.

    These are the packages that the project's environment would import from the project, since they
    are installed as editable there.

    Args:
        place: where the project's tree was checked out.
    """
    found: dict[str, None] = {}
    roots = "|".join(map(re.escape, {str(project), os.path.realpath(project)}))
    inside = re.compile(rf"(?:{roots})(?=[/'\"\n:;]|$)([^'\"\n:;]*)")
    if (environment := own_environment(project)) is None:
        return []
    site = "lib/python*/site-packages"
    for file in (*environment.glob(f"{site}/*.pth"), *environment.glob(f"{site}/__editable__*.py")):
        with suppress(OSError, UnicodeError):
            for below in inside.findall(file.read_text("utf-8")):
                # A finder's own table names packages; a .pth file, where they lie.
                path = Path(below.lstrip("/"))
                if (file.suffix == ".pth" or path.parts) and ".venv" not in path.parts:
                    found[str(place / (path if file.suffix == ".pth" else path.parent))] = None
    return list(found)


def keep(data: bytes) -> str:
    """Keep some content. Returns: its name. Raises: OSError."""
    name = sha256(data).hexdigest()
    if _here(name) is None:
        _replace(name, gzip.compress(data, 3, mtime=0))
    os.utime(_path(name))
    return name


def read(name: str, fetch: Fetch = lambda _: None) -> bytes:
    """The content of that name, which is kept here from then on. Raises: NoCode; OSError."""
    if (data := _here(name)) is not None:
        return data
    packed = fetch(name)
    if packed is None:
        raise NoCode(
            f"the code {name[:12]} of this run is neither in {_path(name).parent} nor on its "
            "Prefect server: submit or deploy it again"
        )
    _replace(name, packed)
    if (data := _here(name)) is None:
        _path(name).unlink()
        raise NoCode(f"what the Prefect server has as the code {name[:12]} is something else")
    return data


def packed(name: str) -> bytes:
    """As `Fetch` gives it. Raises: OSError."""
    return read_own_file(_path(name))


def names_in(text: str, fetch: Fetch = lambda _: None) -> set[str]:
    """What of the store a text may name, with what that names itself."""
    found = set(_NAME.findall(text))
    for name in tuple(found):
        with suppress(OSError, NoCode):
            found.add(code_of(name, fetch).tree)
    return found


def forget(named: Collection[str], *, is_dry: bool = False) -> dict[str, int]:
    """Remove what nothing names, and was not kept anew within a day; its bytes, by its name."""
    gone = {}
    for path in sorted((muster_home() / "code").glob("*")):
        with suppress(FileNotFoundError):
            at = path.stat()
            if path.name.partition(".")[0] in named or time.time() - at.st_mtime < _SPARED_S:
                continue
            gone[path.name] = at.st_size
            if not is_dry:
                path.unlink()
    return gone


def made_of(code: Code | None, root: Path, python: Path) -> dict[str, object]:
    """What a run is made of on this machine, as its record has it.

    Args:
        code: None: the project as it lies in `root`.
        python: the interpreter of its programs.
    """
    source = asdict(code) if code else {"tree": None, "project": str(root), **_changes(root)}
    images = ("MUSTER_IMAGE", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
    packages = sorted(
        file.name.removesuffix(".dist-info").split("-", 1)
        for file in python.parent.parent.glob("lib/python*/site-packages/*.dist-info")
    )
    return {
        **source,
        "python": f"{python} {_version(python)}".strip(),
        "packages": {one[0]: one[1] for one in packages if len(one) == 2},
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
        said = (python.parent.parent / "pyvenv.cfg").read_text("utf-8")
        if match := re.search(r"^version(?:_info)?\s*=\s*(\S+)", said, re.MULTILINE):
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
    """What this machine has under a name, where it is whole."""
    with suppress(FileNotFoundError, EOFError, gzip.BadGzipFile, ValueError, zlib.error):
        data = gzip.decompress(packed(name))
        return data if sha256(data).hexdigest() == name else None
    return None


def _replace(name: str, content: bytes) -> None:
    _path(name).parent.mkdir(parents=True, exist_ok=True)
    replace_file(_path(name), content)


def _unfit(problem: str, remedy: str) -> InvalidSpec:
    return InvalidSpec((Fault(path="code", problem=problem, remedy=remedy),), "the project")


def _files(root: Path) -> tuple[set[str], set[str]]:
    """List a project by git.

    Returns: the paths of its files and links, with those of repositories within it; and the paths
    that it ignores, a whole folder where all of the folder is ignored.

    Raises: InvalidSpec, where git is missing, slow, or fails.
    """
    try:
        names, ignored = _listed(root)
    except (GitFailed, OSError) as error:
        remedy = "mend it, put the spec into a folder of its own, or write code: live"
        raise _unfit(f"git can't list {root}: {error}", remedy) from None

    home, real = muster_home().resolve(), root.resolve()
    for name in tuple(names):
        path = root / name
        is_linked = path.parent.resolve() != (real / name).parent
        if is_linked or not os.path.lexists(path) or (real / name).is_relative_to(home):
            # Removed, behind a link that git does not follow, or Muster's own.
            names.discard(name)
        elif not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISLNK(mode):
            names.discard(name)
            if (path / ".git").exists():
                inner, passed = _files(path)
                names |= {f"{name}/{one}" for one in inner}
                ignored |= {f"{name}/{one}" for one in passed}
    return names, {
        name
        for name in ignored
        if not (
            _CACHES.search(name)
            or home.is_relative_to(real / name)
            or (real / name).is_relative_to(home)
        )
    }


def _listed(root: Path) -> tuple[set[str], set[str]]:
    """Return the paths that git lists in a folder, and those that it ignores there.

    Raises: GitFailed, OSError.
    """
    if (repository := find_repository(root)) is not None:
        with git_view(root, repository) as git:
            # A repository around the folder may ignore all of it. Then the folder is a project of
            # its own.
            if git.list("-c", "-o", "--directory", "--", "."):
                names, ignored = git.list("-c", "-o"), git.list("-o", "-i", "--directory")
                return _without_slash(names), _without_slash(ignored)
    with git_view(root, None) as git:
        excludes = tuple(f"--exclude={name}" for name in _IGNORED)
        names = git.list("-o", *excludes)
        ignored = git.list("-o", "-i", "--directory", *excludes)
    return _without_slash(names), _without_slash(ignored)


def _without_slash(names: Collection[str]) -> set[str]:
    return {name.rstrip("/") for name in names}


def _changes(root: Path) -> dict[str, str]:
    """Return the last commit of a project and how its files differ from it, as fields of `Code`.

    The result is empty if the project is in no repository that may be used, or has no commit.
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
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            path, info = root / name, tarfile.TarInfo(name)
            info.mtime, data = _MADE_AT, b""
            with suppress(FileNotFoundError):
                if path.is_symlink():
                    info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                else:
                    data = path.read_bytes()
                    info.size, info.mode = len(data), 0o755 if os.access(path, os.X_OK) else 0o644
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _path_in(folders: dict[str, str], name: str) -> str:
    """Where a file of a tree is to be, its folder made, of which those that are there are by their
    path in the tree; a link in its way is none of the tree's, and goes."""
    above, _, last = name.rpartition("/")
    if above not in folders:
        folder = folders[above] = _path_in(folders, above)
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                os.unlink(folder)
        os.makedirs(folder, exist_ok=True)
    return f"{folders[above]}/{last}"


def _write(path: str, data: bytes, mode: int) -> None:
    with suppress(FileNotFoundError):
        at = os.lstat(path)
        is_same = at.st_mtime == _MADE_AT and at.st_size == len(data)
        if is_same and stat.S_ISREG(at.st_mode) and bool(at.st_mode & 0o100) == bool(mode & 0o100):
            return
        _make_way(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.utime(fd, (_MADE_AT, _MADE_AT))


def _link(path: str, target: str) -> None:
    with suppress(FileNotFoundError):
        if os.path.islink(path) and os.readlink(path) == target:
            return
        _make_way(path)
    os.symlink(target, path)


def _make_way(path: str) -> None:
    """What a run has put in a file's place goes; a folder is kept, under another name."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        os.rename(path, f"{path}.{time.time_ns()}")
