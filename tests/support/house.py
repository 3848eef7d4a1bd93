"""The order of the folders of `tasks/`, and its figures: `make house`.

An import counts wherever it stands: within a function, under TYPE_CHECKING, as the literal name
given to `import_module`.
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

#: Lowest first. What stands in a later line may import what stands in an earlier one; those of one
#: line are siblings, which don't import each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("spec",),
    ("record",),
    ("processes", "show"),
    ("server", "ray"),
    ("rollout", "queue", "upkeep", "pipeline"),
    ("train",),
)
#: It stands above all, deployments/ too: the verbs of every folder meet in it.
COMMAND = "tasks/command.py"
#: The same from Python, above that.
CLIENT = "tasks/client.py"
#: Packages of others that a folder may import beside the standard library, where it is not free.
PLAIN = {
    "spec": {"pydantic", "pydantic_core", "yaml"},
    "record": {"pydantic", "pydantic_core", "yaml"},
}
#: Where Prefect may be imported, and where Ray may.
PREFECT_FROM = ("server", "queue", "upkeep", "pipeline", "train")
RAY_ONLY = ("tasks/ray/", "tasks/rollout/actor.py", "tasks/rollout/ray_host.py")
#: They run alone under `python -I -S`: the standard library and each other, by their bare names.
ALONE = (
    *("tasks/processes/guardian.py", "tasks/processes/cgroup.py", "tasks/processes/tree.py"),
    "tasks/ray/wrapper.py",
)
#: Flows decide; they have no clock, no process and no thread of their own.
NOT_IN_FLOWS = {
    *("time", "datetime", "socket", "subprocess", "threading", "asyncio", "os", "signal"),
    *("multiprocessing", "concurrent"),
}


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a file imports."""

    path: str
    line: int
    #: `tasks.spec.run.RunSpec` for `from tasks.spec.run import RunSpec`.
    target: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.target}"


def files(root: Path, *folders: str) -> list[str]:
    """The Python files below the folders, relative to the root, in order; no links."""
    found = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(str(path.relative_to(root)) for path in found if not path.is_symlink())


def imports(root: Path, path: str) -> Iterator[Import]:
    """Raises: SyntaxError."""
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (Import(path, node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(names=names, module=module, level=level):
                above = Path(path).parts[:-level] if level else ()
                base = ".".join([*above, *([module] if module else [])])
                yield from (Import(path, node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).endswith(("import_module", "__import__")):
                    yield Import(path, node.lineno, name)


def violations(root: Path) -> list[str]:
    """What breaks the order, a line each."""
    found = [
        f"{one}: {problem}"
        for path in files(root, "tasks", "flows", "deployments")
        for one in imports(root, path)
        if (problem := _problem(root, one))
    ]
    known = {name for line in ORDER for name in line}
    for path in files(root, "tasks"):
        folder = Path(path).parts[1]
        if folder not in known and path not in ("tasks/__init__.py", COMMAND, CLIENT):
            found.append(f"{path}: tasks/{folder} has no place in the order")
    return found


def _problem(root: Path, one: Import) -> str:
    place, (top, *names) = Path(one.path).parts, one.target.split(".")
    if one.path in ALONE:
        beside = {Path(path).stem for path in ALONE}
        is_fine = top in sys.stdlib_module_names or top in beside or _names_alone(one.target)
        return "" if is_fine else "it runs alone, with the standard library only"
    if one.path in (COMMAND, CLIENT):
        return ""
    if top == "tasks":
        return _problem_within(place, names)
    if top in ("flows", "deployments", "tests"):
        may = {"deployments": ("flows", "deployments"), "flows": ("flows",)}.get(place[0], ())
        return "" if top in may else f"{top}/ stands above {place[0]}/"
    if place[0] == "flows" and (top in NOT_IN_FLOWS or top not in ("prefect", "sys", "__future__")):
        is_plain = top in sys.stdlib_module_names - NOT_IN_FLOWS
        return "" if is_plain else "flows decide; what does belongs in tasks/"
    if place[0] != "tasks" or top in sys.stdlib_module_names:
        return ""
    folder = place[1]
    if folder in PLAIN and top not in PLAIN[folder]:
        return f"tasks/{folder} is plain data: {', '.join(sorted(PLAIN[folder]))} at most"
    if top == "ray":
        return (
            ""
            if one.path.startswith(RAY_ONLY)
            else f"Ray is imported in {', '.join(RAY_ONLY)} only"
        )
    if top == "prefect" and folder not in PREFECT_FROM:
        return "Prefect is imported from tasks/server upwards, and not in tasks/rollout"
    return ""


def _names_alone(target: str) -> bool:
    return any(target == path[: -len(".py")].replace("/", ".") for path in ALONE) or any(
        target.startswith(path[: -len(".py")].replace("/", ".") + ".") for path in ALONE
    )


def _problem_within(place: tuple[str, ...], names: list[str]) -> str:
    if place[:2] in (("deployments", "quickstart"), ("deployments", "quickstart-llm")):
        return "the quickstart's programs are a user's: they know nothing of Muster"
    if place[0] != "tasks" or not names:
        return ""
    level = {name: number for number, line in enumerate(ORDER) for name in line}
    mine, theirs = place[1], names[0]
    if f"tasks/{theirs}.py" == COMMAND:
        return f"{COMMAND} stands above tasks/{mine}"
    if mine == theirs or level.get(theirs, 0) < level.get(mine, 0):
        return ""
    return f"tasks/{theirs} does not stand below tasks/{mine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the house measures."""

    folders: int
    modules: int
    lines: int
    #: The modules of the longest chain of imports, the importing one first.
    longest_chain: tuple[str, ...]
    #: Modules that import each other in a circle.
    circles: tuple[tuple[str, ...], ...]
    #: The module of the most lines, docstrings and comments counted in.
    longest: tuple[int, str]
    #: Names that several classes bear.
    names_borne_twice: tuple[str, ...]


def measure(root: Path) -> Figures:
    """The house as it stands; empty `__init__.py` files are no modules."""
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
    trees = (ast.parse((root / path).read_text(encoding="utf-8")) for path in paths)
    classes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return Counter(node.name for node in classes)


def _modules_of(root: Path, path: str, known: frozenset[str]) -> Iterator[str]:
    for one in imports(root, path):
        name = one.target.replace(".", "/")
        for candidate in (f"{name}.py", f"{name.rpartition('/')[0]}.py"):
            if candidate in known and candidate != path:
                yield candidate


def _circles(graph: Mapping[str, frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    @cache
    def reached(path: str) -> frozenset[str]:
        seen: set[str] = set()
        todo = list(graph[path])
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                todo += graph[one]
        return frozenset(seen)

    inside = [path for path in graph if path in reached(path)]
    found = {tuple(b for b in inside if b in reached(a) and a in reached(b)) for a in inside}
    return tuple(sorted(found))


def _longest_chain(graph: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    @cache
    def chain(path: str) -> tuple[str, ...]:
        return (path, *max((chain(one) for one in graph[path]), key=len, default=()))

    return max((chain(path) for path in graph), key=len)


def main() -> None:
    """Print the figures."""
    found = measure(ROOT)
    print(f"folders {found.folders}, modules {found.modules}, lines {found.lines}")
    print(f"longest module: {found.longest[1]}, {found.longest[0]} lines")
    print(f"circles of imports: {len(found.circles)}")
    for circle in found.circles:
        print(f"  {' - '.join(circle)}")
    print(f"longest chain of imports: {len(found.longest_chain)}")
    print(f"  {' > '.join(found.longest_chain)}")


if __name__ == "__main__":
    main()
