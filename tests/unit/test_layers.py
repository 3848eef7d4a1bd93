"""The layers of the project, held by a walk over the imports of its files.

  tasks/run <- tasks/{supervise,gang,rayjobs,rollout} <- tasks/* <- flows <- deployments

The rooms of `tasks/` beside the mechanisms wire them, each for one subject: the server, the nodes,
the fleet, the terminal, what is reported, the queue, the upkeep, pipelines.

An import counts wherever it stands: within a function, under TYPE_CHECKING, as the literal name
given to `import_module`. A mechanism that needs a sibling declares a Protocol; the module directly
in `tasks/` wires the two.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The project's own packages, whose modules are imported by their full names.
PACKAGES = ("flows", "tasks", "deployments", "tests")
#: The folders that are walked.
WALKED = ("flows", "tasks", "deployments")
LINES_AT_MOST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What the modules of a folder, or one module, may import."""

    #: Packages and modules of the project, each with all that is below it.
    project: tuple[str, ...] = ()
    #: The only packages of others; None: any.
    others: tuple[str, ...] | None = None
    #: What may not be imported even so, be it of others or of the standard library.
    refused: tuple[str, ...] = ()
    #: Its modules are scripts, which find the files beside them by their bare names.
    scripts: bool = False

    def __str__(self) -> str:
        others = ["third-party packages"] if self.others is None else list(self.others)
        text = ", ".join(["the standard library", *others, *self.project])
        return text + (f", but none of {', '.join(self.refused)}" if self.refused else "")


#: By folder or file; the longest name that fits counts. `tasks` stands for the files directly in
#: it: a new folder beneath it has to be entered here.
LAYERS = {
    # every import of a mechanism passes through it
    "tasks/__init__.py": Layer(others=()),
    "tasks/run": Layer(project=("tasks.run",), others=("pydantic", "pydantic_core", "yaml")),
    "tasks/run/spec": Layer(
        project=(
            "tasks.run.spec",
            *("tasks.run.errors", "tasks.run.failure_kinds", "tasks.run.layout"),
            "tasks.run.masking",
        ),
        others=("pydantic", "pydantic_core", "yaml"),
    ),
    "tasks/run/causes": Layer(project=("tasks.run.causes", "tasks.run.failure_kinds"), others=()),
    "tasks/supervise": Layer(
        project=("tasks.run", "tasks.supervise"), refused=("prefect", "prefect_ray", "ray")
    ),
    "tasks/gang": Layer(
        project=("tasks.run", "tasks.gang"), refused=("prefect", "prefect_ray", "ray")
    ),
    # a command: it starts what wires
    "tasks/gang/__main__.py": Layer(project=("tasks.queue",), others=()),
    # the Prefect server: which one, its flow runs, and why it refuses
    "tasks/server": Layer(
        project=("tasks.run", "tasks.supervise", "tasks.server"), refused=("prefect_ray", "ray")
    ),
    # a look at each node of a Ray cluster, and the sweep there
    "tasks/nodes": Layer(
        project=("tasks.run", "tasks.supervise", "tasks.rayjobs", "tasks.nodes"),
        refused=("prefect_ray", "ray"),
    ),
    "tasks/nodes/node_tasks.py": Layer(
        project=("tasks.supervise",), others=("prefect",), refused=("prefect_ray", "ray")
    ),
    # the driver on the cluster, which ships this very package there
    "tasks/nodes/visits.py": Layer(project=("tasks",)),
    "tasks/nodes/preflight_command.py": Layer(
        project=("tasks.run", "tasks.nodes", "tasks.server", "tasks.terminal"),
        refused=("prefect_ray", "ray"),
    ),
    # the component `rollout`: the fleet's mechanism on this machine's processes, or on Ray
    "tasks/fleet": Layer(
        project=(
            *("tasks.run", "tasks.supervise", "tasks.rollout", "tasks.rayjobs", "tasks.nodes"),
            *("tasks.fleet", "tasks.jobs"),
        ),
        refused=("prefect", "prefect_ray", "ray"),
    ),
    # which keeps each recovery on the server
    "tasks/fleet/recoveries.py": Layer(
        project=("tasks.run",), others=("prefect",), refused=("prefect_ray", "ray")
    ),
    # what a person at a terminal sees
    "tasks/terminal": Layer(
        project=("tasks.run", "tasks.fleet", "tasks.terminal", "tasks.session"),
        refused=("prefect_ray", "ray"),
    ),
    # what the server is told of a run beside its states
    "tasks/reporting": Layer(
        project=(
            *("tasks.run", "tasks.supervise", "tasks.rollout", "tasks.page", "tasks.server"),
            *("tasks.fleet", "tasks.reporting", "tasks.session"),
        ),
        refused=("prefect_ray", "ray"),
    ),
    # the gate before the work pool: Prefect's side of the queue
    "tasks/queue": Layer(
        project=(
            *("tasks.run", "tasks.supervise", "tasks.gang", "tasks.rayjobs", "tasks.server"),
            *("tasks.reporting", "tasks.terminal", "tasks.queue"),
        ),
        refused=("prefect_ray", "ray"),
    ),
    # what a host does by itself: reconcile, prune, what a schedule has left
    "tasks/upkeep": Layer(
        project=(
            *("tasks.run", "tasks.supervise", "tasks.rayjobs", "tasks.server", "tasks.reporting"),
            *("tasks.upkeep", "tasks.jobs", "tasks.parked"),
        ),
        refused=("prefect_ray", "ray"),
    ),
    # runs in sequence, which know of each other by the server alone
    "tasks/pipeline": Layer(
        project=(
            *("tasks.run", "tasks.server", "tasks.terminal", "tasks.pipeline"),
            *("tasks.cancellation", "tasks.session", "tasks.waiting"),
        ),
        refused=("prefect_ray", "ray"),
    ),
    # what the page of a run shows: texts and pictures, from plain data
    "tasks/page": Layer(
        project=("tasks.run", "tasks.rollout.states", "tasks.page"),
        others=(),
        refused=("prefect", "prefect_ray", "ray"),
    ),
    "tasks/rayjobs": Layer(project=("tasks.run", "tasks.rayjobs"), refused=("prefect",)),
    "tasks/rollout": Layer(
        project=("tasks.run", "tasks.rollout"), refused=("prefect", "prefect_ray", "ray")
    ),
    # a command: it starts what wires
    "tasks/rollout/__main__.py": Layer(project=("tasks.fleet.plan_command",), others=()),
    # what runs in the Ray cluster
    "tasks/rollout/actor.py": Layer(
        project=("tasks.run", "tasks.rollout"), refused=("prefect", "prefect_ray")
    ),
    # whose driver it is
    "tasks/rollout/ray_host.py": Layer(
        project=("tasks.run", "tasks.rollout"), refused=("prefect", "prefect_ray")
    ),
    "tasks": Layer(project=("tasks",), refused=("prefect_ray", "ray")),
    "flows": Layer(
        project=("tasks", "flows"),
        others=("prefect",),
        refused=(
            *("time", "datetime", "socket", "subprocess", "threading", "asyncio", "os", "signal"),
            *("multiprocessing", "concurrent"),
        ),
    ),
    "deployments": Layer(project=("tasks", "flows", "deployments")),
    # a user's programs: they know nothing of Muster
    "deployments/quickstart": Layer(project=("deployments.quickstart",), scripts=True),
}

#: By folder, the modules that `python -I -S` runs from there with nothing else on the path.
ALONE = {
    "tasks/supervise": ("guardian", "guardian_channel", "namespace_init", "cgroup", "tree"),
    # shipped with a job; tree is a link to supervise's
    "tasks/rayjobs": ("entrypoint", "tree"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One name that a module imports, made absolute."""

    line: int
    #: `tasks.run.spec.run.Spec` for `from tasks.run.spec.run import Spec`.
    target: str
    #: It stands where the module does not pass when it is run as a script.
    not_as_script: bool = False
    relative: bool = False

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    def within(self, packages: tuple[str, ...]) -> bool:
        return any(self.target == p or self.target.startswith(f"{p}.") for p in packages)


class _ImportCollector(ast.NodeVisitor):
    def __init__(self, package: tuple[str, ...]) -> None:
        self.found: list[Import] = []
        self._package = package
        self._not_as_script = False

    def _add(self, line: int, target: str, relative: bool = False) -> None:
        self.found.append(
            Import(
                line=line,
                target=target,
                not_as_script=self._not_as_script,
                relative=relative,
            )
        )

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self._package[: len(self._package) - node.level + 1] if node.level else ()
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            self._add(node.lineno, f"{base}.{alias.name}", relative=node.level > 0)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._add(node.lineno, name.value)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        runs = _as_script(node.test)
        for children, is_left_out in ((node.body, runs is False), (node.orelse, runs is True)):
            before = self._not_as_script
            self._not_as_script = before or is_left_out
            for child in children:
                self.visit(child)
            self._not_as_script = before


def _as_script(test: ast.expr) -> bool | None:
    """What the condition comes to where the module is run as a script; None: nobody can say."""
    names = {"__builtins__": {}, "__name__": "__main__", "TYPE_CHECKING": False}
    try:
        return bool(eval(ast.unparse(test), names))
    except Exception:
        return None


def files_of(root: Path) -> list[Path]:
    """The Python files of the walked folders, relative to `root`, in order."""
    found = (path for name in WALKED for path in (root / name).rglob("*.py"))
    return sorted(path.relative_to(root) for path in found)


def layer_of(path: Path) -> Layer | None:
    """The layer of a file, None where its folder is in none."""
    for name in (path, *path.parents):
        if name == Path("tasks") and path.parent != name:
            return None
        if name.as_posix() in LAYERS:
            return LAYERS[name.as_posix()]
    return None


def violations(root: Path, installed: frozenset[str] = frozenset()) -> list[str]:
    """What in the project under `root` breaks the layers, a line each, with file and line.

    Args:
        root: The folder that holds `flows`, `tasks` and `deployments`, any of which may be absent.
        installed: Top-level module names that no flow's file may take, beside the stdlib's.
    """
    return [
        f"{path}{complaint}"
        for path in files_of(root)
        for complaint in _complaints(root, path, installed)
    ]


def _complaints(root: Path, path: Path, installed: frozenset[str]) -> Iterator[str]:
    source = (root / path).read_text(encoding="utf-8")
    lines = len(source.splitlines())
    if lines > LINES_AT_MOST:
        yield (
            f": {lines} lines, more than {LINES_AT_MOST}: look for the second concept in it and "
            "give that a module"
        )
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        yield f":{error.lineno}: cannot be parsed: {error.msg}"
        return
    layer = layer_of(path)
    if layer is None:
        yield f": {path.parent}/ is in no layer: enter it in LAYERS"
        return
    collector = _ImportCollector(path.parent.parts)
    collector.visit(module)
    alone = path.stem in ALONE.get(path.parent.as_posix(), ())
    for one in collector.found:
        problem = _alone_problem(path, one) if alone else _problem(root, path, layer, one)
        if problem:
            yield f":{one.line}: imports {one.target}: {problem}"
    if path.parts[0] == "flows":
        yield from _flow_complaints(path, module, installed)


def _alone_problem(path: Path, one: Import) -> str:
    names = ALONE[path.parent.as_posix()]
    package = ".".join(path.parent.parts)
    if one.not_as_script and one.within(tuple(f"{package}.{name}" for name in names)):
        return ""
    if one.top in sys.stdlib_module_names or one.target.partition(".")[0] in names:
        return ""
    return (
        f"{path.name} runs alone under `python -I -S`: only the standard library and, by their "
        f"bare names, {', '.join(names)}"
    )


def _problem(root: Path, path: Path, layer: Layer, one: Import) -> str:
    folder = path.parent.as_posix()
    if one.relative and path.parts[0] == "flows":
        return "a flow is loaded as a module of no package: import absolutely"
    if one.top in PACKAGES:
        return "" if one.within(layer.project) else f"{path} may import {layer}"
    if one.top in layer.refused:
        return f"{path} may import {layer}"
    if (root / folder / f"{one.top}.py").exists():
        bare = f"found only by a script: write {'.'.join(path.parent.parts)}.{one.top}"
        return "" if layer.scripts else bare
    if one.top in sys.stdlib_module_names:
        return ""
    if layer.others is not None and one.top not in layer.others:
        return f"{path} may import {layer}"
    return ""


def _flow_complaints(path: Path, module: ast.Module, installed: frozenset[str]) -> Iterator[str]:
    if path.stem in sys.stdlib_module_names or path.stem in installed:
        yield (
            f": hides the module {path.stem} from everything that a flow run imports: flows/ is "
            "first on its path"
        )
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield (
                f":{node.lineno}: defines class {node.name}: it would pickle as "
                f"{path.stem}.{node.name} there and as flows.{path.stem}.{node.name} elsewhere; "
                "it belongs in tasks/"
            )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_is_task(decorator) for decorator in node.decorator_list):
                yield f":{node.lineno}: defines task {node.name}: it belongs in tasks/"
        elif isinstance(node, ast.Assign) and _is_task(node.value):
            yield f":{node.lineno}: makes a task: it belongs in tasks/"


def _is_task(node: ast.expr) -> bool:
    """Whether it is `task`, `prefect.task`, or a call of either."""
    if isinstance(node, ast.Call):
        return _is_task(node.func)
    return ast.unparse(node).rpartition(".")[2] == "task" and isinstance(
        node, ast.Name | ast.Attribute
    )


def installed_modules() -> frozenset[str]:
    """Top-level names that the installed distributions, other than this project, provide."""
    owners = packages_distributions()
    return frozenset(name for name, dists in owners.items() if set(dists) != {"muster"})


def plant(root: Path, files: dict[str, str]) -> None:
    """Write a small project: source by path."""
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def test_the_project_holds_its_layers() -> None:
    broken = violations(ROOT, installed_modules())

    assert not broken, "\n" + "\n".join(broken)


def test_the_walk_reaches_the_project() -> None:
    found = {path.as_posix() for path in files_of(ROOT)}

    assert {"flows/__init__.py", "tasks/run/errors.py", "tasks/supervise/guardian.py"} <= found


@pytest.mark.parametrize("folder", ALONE)
def test_what_runs_alone_is_there(folder: str) -> None:
    missing = [name for name in ALONE[folder] if not (ROOT / folder / f"{name}.py").exists()]

    assert not missing


LEGAL = {
    "tasks/__init__.py": "",
    "tasks/run/spec/run.py": "import os\nimport yaml\nfrom pydantic import BaseModel\n"
    "from pydantic_core import PydanticCustomError\nfrom tasks.run import errors\n"
    "from . import errors as e\n",
    "tasks/run/errors.py": "import dataclasses\n",
    "tasks/supervise/guardian.py": "import os\nTYPE_CHECKING = False\n"
    "if TYPE_CHECKING or __name__ != '__main__':\n    from tasks.supervise import tree\n"
    "else:\n    import tree\n",
    "tasks/supervise/tree.py": "import ctypes\n",
    "tasks/supervise/process.py": "import psutil\nfrom tasks.supervise import tree\n",
    "tasks/gang/__main__.py": "from tasks.queue.command import main\n",
    "tasks/queue/worker.py": "from prefect.workers.process import ProcessWorker\n"
    "from tasks.gang import policy\n",
    "tasks/rayjobs/jobs.py": "import ray\nfrom tasks.run.errors import LostContact\n",
    "tasks/rollout/actor.py": "import ray\nfrom tasks.rollout import health\n",
    "tasks/rollout/health/health.py": "import httpx\n",
    "tasks/launch.py": "import prefect\nfrom tasks.queue import worker\n",
    "flows/train.py": "import sys\nfrom prefect import flow\nfrom tasks.launch import start\n"
    "@flow\ndef train(spec: dict) -> None: ...\n",
    "deployments/stack.py": "import subprocess\nfrom tasks.run import errors\n",
    "deployments/quickstart/trainer.py": "import numpy\nimport policy\n",
    "deployments/quickstart/policy.py": "",
}


def test_a_project_in_order_has_no_violation(tmp_path: Path) -> None:
    plant(tmp_path, LEGAL)

    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        # plain data knows no library of processes
        ("tasks/run/a.py", "import psutil\n", ":1: imports psutil"),
        (
            "tasks/run/a.py",
            "from tasks.supervise import tree\n",
            ":1: imports tasks.supervise.tree",
        ),
        # a sibling, in each way to write it
        ("tasks/gang/a.py", "import tasks.rayjobs.jobs\n", ":1: imports tasks.rayjobs.jobs"),
        ("tasks/gang/a.py", "from tasks import rayjobs\n", ":1: imports tasks.rayjobs"),
        ("tasks/gang/a.py", "from ..rayjobs import jobs\n", ":1: imports tasks.rayjobs.jobs"),
        ("tasks/gang/a.py", "def f():\n    import tasks.rayjobs\n", ":2: imports tasks.rayjobs"),
        (
            "tasks/gang/a.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from tasks.rollout import x\n",
            ":3: imports tasks.rollout.x",
        ),
        (
            "tasks/gang/a.py",
            "import importlib\nimportlib.import_module('tasks.rollout')\n",
            ":2: imports tasks.rollout",
        ),
        # a name that only begins like an allowed one
        ("tasks/gang/a.py", "from tasks.running import x\n", ":1: imports tasks.running.x"),
        # up the layers
        ("tasks/supervise/a.py", "from tasks.launch import x\n", ":1: imports tasks.launch.x"),
        ("tasks/launch.py", "from flows.train import train\n", ":1: imports flows.train.train"),
        ("flows/train.py", "from deployments import stack\n", ":1: imports deployments.stack"),
        ("deployments/stack.py", "import tests.unit\n", ":1: imports tests.unit"),
        ("deployments/quickstart/a.py", "from tasks import run\n", ":1: imports tasks.run"),
        # Prefect and Ray below the @task modules
        ("tasks/supervise/a.py", "import prefect.client\n", ":1: imports prefect.client"),
        ("tasks/gang/queue.py", "from prefect import flow\n", ":1: imports prefect.flow"),
        ("tasks/rollout/gateway/router.py", "import ray\n", ":1: imports ray"),
        ("tasks/rayjobs/a.py", "import prefect\n", ":1: imports prefect"),
        # everything below tasks/ passes through it
        ("tasks/__init__.py", "import prefect\n", ":1: imports prefect"),
        # a folder that nobody entered
        ("tasks/extra/a.py", "", "is in no layer"),
        # the guardian has no site-packages and no package
        ("tasks/supervise/guardian.py", "import psutil\n", ":1: imports psutil"),
        (
            "tasks/supervise/tree.py",
            "from tasks.run import errors\n",
            ":1: imports tasks.run.errors",
        ),
        (
            "tasks/supervise/guardian.py",
            "from tasks.supervise import tree\n",
            ":1: imports tasks.supervise.tree",
        ),
        (
            "tasks/supervise/guardian.py",
            "if __name__ == '__main__':\n    import process\n",
            ":2: imports process",
        ),
        (
            "tasks/supervise/guardian.py",
            "if __name__ == '__main__':\n    import tree\nelse:\n    from tasks.run import spec\n",
            ":4: imports tasks.run.spec",
        ),
        # nobody can say whether a script passes here
        (
            "tasks/supervise/guardian.py",
            "if unknown:\n    from tasks.supervise import tree\n",
            ":2: imports tasks.supervise.tree",
        ),
        # a bare name is found only where the folder itself is on the path
        ("tasks/supervise/process.py", "import tree\n", ":1: imports tree"),
        # what a flow may not
        ("flows/train.py", "import time\n", ":1: imports time"),
        ("flows/train.py", "from os import environ\n", ":1: imports os.environ"),
        (
            "flows/train.py",
            "from concurrent.futures import wait\n",
            ":1: imports concurrent.futures",
        ),
        ("flows/train.py", "import httpx\n", ":1: imports httpx"),
        ("flows/train.py", "from . import pipeline\n", "import absolutely"),
        ("flows/train.py", "\nclass Plan: ...\n", ":2: defines class Plan"),
        ("flows/train.py", "def f():\n    class Plan: ...\n", ":2: defines class Plan"),
        ("flows/train.py", "@task\ndef f(): ...\n", ":2: defines task f"),
        ("flows/train.py", "@prefect.task(name='f')\nasync def f(): ...\n", ":2: defines task f"),
        ("flows/train.py", "f = task(len)\n", ":1: makes a task"),
        # a file that takes a module's name, of the stdlib and of a package
        ("flows/queue.py", "", "hides the module queue"),
        ("flows/ray.py", "", "hides the module ray"),
        # house style
        ("tasks/launch.py", "\n" * 401, ": 401 lines, more than 400"),
        ("tasks/launch.py", "def f(:\n", ":1: cannot be parsed"),
    ],
)
def test_a_violation_is_named(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    plant(tmp_path, LEGAL | {path: source})

    broken = violations(tmp_path, installed=frozenset({"ray"}))

    assert len(broken) == 1
    assert broken[0].startswith(path)
    assert complaint in broken[0]


def test_a_module_may_have_as_many_lines_as_the_limit(tmp_path: Path) -> None:
    plant(tmp_path, {"tasks/launch.py": "\n" * LINES_AT_MOST})

    assert violations(tmp_path) == []
