"""Check that the folders of `tasks/` import each other in the allowed order: `make house`.

Every import counts: also an import in a function, under TYPE_CHECKING, and the literal name in a
call of `import_module`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Layers of the folders of `tasks/`, the lowest first. A folder may import folders of lower layers,
#: but no other folder of the same layer.
ORDER: tuple[tuple[str, ...], ...] = (
    ("spec",),
    ("record",),
    ("processes", "show"),
    ("server", "ray"),
    ("rollout", "queue", "upkeep", "pipeline"),
    ("train",),
)
#: Module of the command `muster`. This module may import all folders, because the folders contain
#: its subcommands.
COMMAND = "tasks/command.py"
#: Module of the Python client. Like `tasks/command.py`, this module may import all folders of
#: `tasks/`.
CLIENT = "tasks/client.py"
#: Mapping from a folder of `tasks/` to the third-party packages that this folder may import. Other
#: folders may import any package.
PLAIN = {
    "spec": {"pydantic", "pydantic_core", "yaml"},
    "record": {"pydantic", "pydantic_core", "yaml", "fsspec"},
}
#: Folders of `tasks/` that may import Prefect.
PREFECT_FROM = ("server", "queue", "upkeep", "pipeline", "train")
#: Beginnings of the paths of modules that may import Ray.
RAY_ONLY = ("tasks/ray/", "tasks/rollout/actor.py", "tasks/rollout/ray_host.py")
#: Programs that run under `python -I -S`, which ignores installed packages. These programs may
#: import only the standard library and each other, for example `import tree`.
ALONE = (
    "tasks/processes/guardian.py",
    "tasks/processes/cgroup.py",
    "tasks/processes/tree.py",
    "tasks/ray/wrapper.py",
)
#: Modules of the standard library that `flows/` must not import: a flow only decides, and leaves
#: clocks, processes and threads to `tasks/`.
NOT_IN_FLOWS = {
    "time",
    "datetime",
    "socket",
    "subprocess",
    "threading",
    "asyncio",
    "os",
    "signal",
    "multiprocessing",
    "concurrent",
}


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a file imports."""

    #: Path of the importing file, relative to the root of the project.
    path: str
    #: Line number of the import.
    line: int
    #: Dotted name: `tasks.spec.run.RunSpec` for `from tasks.spec.run import RunSpec`.
    target: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.target}"


def files(root: Path, *folders: str) -> list[str]:
    """Return the sorted paths of the Python files below folders, relative to the root.

    Symbolic links are left out.
    """
    paths = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(str(path.relative_to(root)) for path in paths if not path.is_symlink())


def imports(root: Path, path: str) -> Iterator[Import]:
    """Yield all imports of a Python file.

    Args:
        root: Root of the project.
        path: Path of the file, relative to the root.

    Raises:
        SyntaxError: The file is not valid Python.
    """
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (Import(path, node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(names=names, module=module, level=level):
                packages = Path(path).parts[:-level] if level else ()
                base = ".".join([*packages, *([module] if module else [])])
                yield from (Import(path, node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).endswith(("import_module", "__import__")):
                    yield Import(path, node.lineno, name)


def violations(root: Path) -> list[str]:
    """Return a description of each import and each folder that violates the layers of `ORDER`."""
    problems = [
        f"{imported}: {problem}"
        for path in files(root, "tasks", "flows", "deployments")
        for imported in imports(root, path)
        if (problem := _find_problem(imported))
    ]
    ordered_folders = {folder for layer in ORDER for folder in layer}
    for path in files(root, "tasks"):
        folder = Path(path).parts[1]
        if folder not in ordered_folders and path not in ("tasks/__init__.py", COMMAND, CLIENT):
            problems.append(f"{path}: tasks/{folder} has no layer: add it to ORDER")
    return problems


def _find_problem(imported: Import) -> str:
    """Return the reason why an import is forbidden, or an empty string if the import is allowed."""
    place = Path(imported.path).parts
    top, *names = imported.target.split(".")
    if imported.path in ALONE:
        bare_names = {Path(path).stem for path in ALONE}
        is_standard = top in sys.stdlib_module_names
        if is_standard or top in bare_names or _names_alone(imported.target):
            return ""
        return "this program may import only the standard library, because it runs without Muster"
    if imported.path in (COMMAND, CLIENT):
        return ""
    if top == "tasks":
        return _find_problem_within_tasks(place, names)
    if top in ("flows", "deployments", "tests"):
        allowed = {"deployments": ("flows", "deployments"), "flows": ("flows",)}.get(place[0], ())
        return "" if top in allowed else f"{place[0]}/ must not import {top}/, a higher layer"
    if place[0] == "flows" and top not in ("prefect", "sys", "__future__"):
        is_allowed = top in sys.stdlib_module_names - NOT_IN_FLOWS
        return "" if is_allowed else "a flow only decides; move clocks and processes to tasks/"
    if place[0] != "tasks" or top in sys.stdlib_module_names:
        return ""

    folder = place[1]
    if folder in PLAIN and top not in PLAIN[folder]:
        return f"tasks/{folder} may import only {', '.join(sorted(PLAIN[folder]))}"
    if top == "ray":
        if imported.path.startswith(RAY_ONLY):
            return ""
        return f"only {', '.join(RAY_ONLY)} may import Ray"
    if top == "prefect" and folder not in PREFECT_FROM:
        return f"only {', '.join(f'tasks/{name}' for name in PREFECT_FROM)} may import Prefect"
    return ""


def _names_alone(target: str) -> bool:
    """Return True if a dotted name is a module of `ALONE`, or is defined in such a module.

    The modules of `ALONE` are programs that run without installed packages.
    """
    modules = [path.removesuffix(".py").replace("/", ".") for path in ALONE]
    return any(target == module or target.startswith(f"{module}.") for module in modules)


def _find_problem_within_tasks(place: tuple[str, ...], names: list[str]) -> str:
    """Return the reason why an import from `tasks` is forbidden.

    The reason is an empty string if the import is allowed.

    Args:
        place: Parts of the path of the importing file.
        names: Parts of the imported name after `tasks`.
    """
    if place[:2] in (("deployments", "quickstart"), ("deployments", "quickstart-llm")):
        return "the programs of a quickstart must not import Muster: they belong to a user"
    if place[0] != "tasks" or not names:
        return ""
    level = {folder: number for number, layer in enumerate(ORDER) for folder in layer}
    importing = place[1]
    imported = names[0]
    if f"tasks/{imported}.py" == COMMAND:
        return f"tasks/{importing} must not import {COMMAND}, a higher layer"
    if importing == imported or level.get(imported, 0) < level.get(importing, 0):
        return ""
    return f"tasks/{imported} is not in a lower layer than tasks/{importing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Size and import structure of `tasks/`."""

    #: Number of folders with modules.
    folders: int
    #: Number of modules. Empty `__init__.py` files do not count.
    modules: int
    #: Number of lines of all modules, with docstrings and comments.
    lines: int
    #: Modules of the longest chain of imports: each module imports the next module.
    longest_chain: tuple[str, ...]
    #: Groups of modules that import each other in a circle.
    circles: tuple[tuple[str, ...], ...]
    #: `(number of lines, path)` of the module with the most lines.
    longest: tuple[int, str]
    #: Names of top-level classes that several modules of `tasks/` define.
    names_borne_twice: tuple[str, ...]


def measure(root: Path) -> Figures:
    """Return the size and the import structure of `tasks/`."""
    paths = [path for path in files(root, "tasks") if (root / path).stat().st_size > 0]
    lengths = {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in paths}
    graph = {path: frozenset(_modules_of(root, path, frozenset(paths))) for path in paths}
    circles = _circles(graph)
    return Figures(
        folders=len({Path(path).parts[1] for path in paths if len(Path(path).parts) > 2}),
        modules=len(paths),
        lines=sum(lengths.values()),
        longest_chain=() if circles else _longest_chain(graph),
        circles=circles,
        longest=max((length, path) for path, length in lengths.items()),
        names_borne_twice=tuple(name for name, count in _classes(root, paths).items() if count > 1),
    )


def _classes(root: Path, paths: list[str]) -> Counter[str]:
    """Return a mapping from a class name to the number of top-level classes with this name."""
    trees = (ast.parse((root / path).read_text(encoding="utf-8")) for path in paths)
    classes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return Counter(node.name for node in classes)


def _modules_of(root: Path, path: str, known: frozenset[str]) -> Iterator[str]:
    """Yield the paths of the modules that a file imports.

    Args:
        root: Root of the project.
        path: Path of the file, relative to the root.
        known: Paths of the modules to consider; imports of other modules are left out.
    """
    for imported in imports(root, path):
        name = imported.target.replace(".", "/")
        for candidate in (f"{name}.py", f"{name.rpartition('/')[0]}.py"):
            if candidate in known and candidate != path:
                yield candidate


def _circles(graph: Mapping[str, frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of modules that import each other in a circle.

    Args:
        graph: Mapping from each module to the modules that it imports.
    """

    @cache
    def reached(path: str) -> frozenset[str]:
        visited: set[str] = set()
        pending = list(graph[path])
        while pending:
            module = pending.pop()
            if module not in visited:
                visited.add(module)
                pending += graph[module]
        return frozenset(visited)

    in_circles = [path for path in graph if path in reached(path)]
    circles = {
        tuple(other for other in in_circles if other in reached(path) and path in reached(other))
        for path in in_circles
    }
    return tuple(sorted(circles))


def _longest_chain(graph: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Return the longest chain of imports in a graph without circles."""

    @cache
    def chain(path: str) -> tuple[str, ...]:
        return (path, *max((chain(imported) for imported in graph[path]), key=len, default=()))

    return max((chain(path) for path in graph), key=len)


def main() -> None:
    """Print the size and the import structure of `tasks/`."""
    figures = measure(ROOT)
    print(f"folders {figures.folders}, modules {figures.modules}, lines {figures.lines}")
    print(f"longest module: {figures.longest[1]}, {figures.longest[0]} lines")
    print(f"circles of imports: {len(figures.circles)}")
    for circle in figures.circles:
        print(f"  {' - '.join(circle)}")
    print(f"longest chain of imports: {len(figures.longest_chain)}")
    print(f"  {' > '.join(figures.longest_chain)}")


if __name__ == "__main__":
    main()
