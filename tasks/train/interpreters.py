"""Python interpreter and PATH of a run's components, and a summary of both for the user.

The check of a spec uses this module before Prefect is imported, so the module must not import
Prefect.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.record.code_store import PROJECT
from tasks.spec.command_python import (
    LAUNCHER_PACKAGES,
    find_command_python,
    find_foreign_launcher,
    is_python_name,
)
from tasks.spec.errors import Fault
from tasks.spec.evaluations import find_place
from tasks.spec.formatting import join_words
from tasks.spec.programs import (
    Interpreter,
    build_component_path,
    find_interpreter,
    find_missing_programs,
)
from tasks.spec.run import RunSpec
from tasks.spec.values import Env, select_literals


def component_interpreter(env: Env, root: Path | None = None) -> Interpreter:
    """Return the Python interpreter of a component.

    Args:
        env: Environment variables of the component in the spec.
        root: Root folder of the project. If None, the folder in the environment variable
            MUSTER_PROJECT is used. If this variable is not set, the working directory is used.
    """
    return find_interpreter(_find_project(root), select_literals(env))


def find_command_interpreter(
    name: str, command: Sequence[str], env: Env, cwd: Path, root: Path | None = None
) -> Interpreter:
    """Return the Python interpreter that the command of a component really runs.

    The result differs from the result of `component_interpreter` if the command contains a path,
    such as `/opt/conda/bin/python`, or if a launcher such as `torchrun` belongs to another
    environment.

    Args:
        name: Name of the component.
        command: The program of the component and its arguments.
        env: Environment variables of the component in the spec.
        cwd: Working directory of the component. A relative path starts at the root of the project.
        root: See `component_interpreter`.
    """
    chosen = component_interpreter(env, root)
    search_path = select_literals(env).get("PATH") or component_search_path(env, root)
    python = find_command_python(command, search_path, _find_project(root).absolute() / cwd)
    if python is None or _is_same_interpreter(python, Path(chosen.path)):
        return chosen
    if is_python_name(command[0]):
        return Interpreter(path=str(python), reason=f"in the command of {name}")
    return Interpreter(path=str(python), reason=f"of {command[0]}, the program of {name}")


def _is_same_interpreter(python: Path, other: Path) -> bool:
    """Return True if two paths lead to the same interpreter of the same Python environment.

    The programs `python` and `python3` of an environment are usually the same interpreter. The
    same interpreter in two environments finds different packages, so the folders are compared, too.
    """
    if os.path.realpath(python.parent) != os.path.realpath(other.parent):
        return False
    if os.path.realpath(python) == os.path.realpath(other):
        return True
    # `python -m venv --copies` writes several copies of the interpreter into the same folder.
    with suppress(OSError):
        return filecmp.cmp(python, other, shallow=False)
    return False


def describe_interpreters(spec: RunSpec, root: Path) -> str:
    """Return a text that lists the Python interpreters of a run's components on this machine.

    Args:
        spec: The run spec.
        root: Root folder of the project.
    """
    interpreters = [
        find_command_interpreter(
            name,
            component.command,
            {**spec.env, **component.env},
            root / (component.cwd or spec.cwd),
            root,
        )
        for name, component in spec.processes.items()
        if component.launcher == "process"
    ]
    return join_words(dict.fromkeys(interpreters or [component_interpreter(spec.env, root)]))


def _find_project(root: Path | None) -> Path:
    """Return the root folder of a run's project.

    The first value that is set is used: `root`, the environment variable MUSTER_PROJECT, or the
    working directory.
    """
    return root or Path(os.environ.get(PROJECT) or Path.cwd())


def component_search_path(env: Env, root: Path | None = None) -> str:
    """Return the PATH of a component.

    The PATH begins with the folder of the component's `python`. The PATH of this process follows.

    Args:
        env: Environment variables of the component in the spec.
        root: See `component_interpreter`.
    """
    interpreter = component_interpreter(env, root)
    return build_component_path(interpreter.path, os.environ.get("PATH", os.defpath))


def find_training_python(spec: RunSpec, root: Path | None = None) -> Path:
    """Return the path of the Python interpreter that runs the training of a run.

    The path follows from the command of the training, because a launcher such as `torchrun` may
    belong to another Python environment than the first `python` in the PATH of the component. If
    the command is no Python program, the first `python` in the PATH is returned.

    Args:
        spec: The run spec, with resolved placeholders.
        root: See `component_interpreter`.
    """
    # Without a component `trainer`, the component that starts last is probably the training.
    last = next(reversed(spec.processes.values()), None)
    component = spec.processes.get("trainer", last)
    env = {**spec.env, **(component.env if component is not None else {})}
    path = select_literals(env).get("PATH") or component_search_path(env, root)
    if component is not None and component.launcher == "process":
        cwd = _find_project(root) / (component.cwd or spec.cwd)
        python = find_command_python(component.command, path, cwd)
        if python is not None:
            return python
    return Path(shutil.which("python", path=path) or sys.executable)


def find_missing_files(spec: RunSpec, root: Path | None = None) -> tuple[Fault, ...]:
    """Return a fault for each file or program in the spec that does not exist on this machine.

    A launcher such as `torchrun` that exists only outside the Python environment of its component
    is a fault, too. If the project has no Python environment, the advice for a missing program says
    how to create one.

    Args:
        spec: The run spec.
        root: Root folder of the project. If None, the files are in the working directory, and
            `component_interpreter` selects the Python environment.
    """
    path = component_search_path(spec.env, root)
    missing_programs = find_missing_programs(spec, root=root or Path.cwd(), path=path)
    faults = (
        *_advise_about_launchers(missing_programs, spec, root),
        *_find_foreign_launchers(spec, root),
    )
    if component_interpreter(spec.env, root).environment is not None:
        return faults
    project = _find_project(root)
    advice = (
        "if the training needs its own Python environment, create the environment as "
        f"{project / '.venv'}, or activate it before you call Muster"
    )
    return tuple(
        replace(fault, remedy="; ".join(filter(None, (fault.remedy, advice))))
        if fault.path.endswith("command.0")
        else fault
        for fault in faults
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalCommand:
    """A command of a spec that starts a process on the machine of the flow process."""

    #: Path of the command in the spec, such as `components.trainer.command`.
    path: str
    command: Sequence[str]
    #: Environment variables of the command in the spec.
    env: Env
    #: Working directory of the command, relative to the project.
    cwd: str


def _list_local_commands(spec: RunSpec) -> list[_LocalCommand]:
    """Return the commands of the components and evaluations that do not run on a Ray cluster."""
    commands = [
        _LocalCommand(
            path=f"components.{name}.command",
            command=component.command,
            env={**spec.env, **component.env},
            cwd=component.cwd or spec.cwd,
        )
        for name, component in spec.processes.items()
        if component.launcher == "process"
    ]
    return commands + [
        _LocalCommand(
            path=f"evals.{name}.command",
            command=evaluation.command,
            env={**spec.env, **evaluation.env},
            cwd=spec.cwd,
        )
        for name, evaluation in spec.evals.items()
        if find_place(spec.written(), evaluation.model_dump()) == "host"
    ]


def _advise_about_launchers(
    faults: Sequence[Fault], spec: RunSpec, root: Path | None
) -> Iterator[Fault]:
    """Yield all faults, some of them with better advice.

    If a launcher such as `torchrun` is missing, the better advice names the Python package to
    install and the Python environment. All other faults are yielded unchanged.

    Args:
        faults: The faults that `find_missing_programs` found.
        spec: The run spec.
        root: See `find_missing_files`.
    """
    packages = {
        f"{local.path}.0": (LAUNCHER_PACKAGES[local.command[0]], local.env)
        for local in _list_local_commands(spec)
        # If the spec sets PATH, the program need not be in the chosen environment.
        if local.command and local.command[0] in LAUNCHER_PACKAGES and "PATH" not in local.env
    }
    for fault in faults:
        if fault.path not in packages:
            yield fault
            continue
        package, env = packages[fault.path]
        environment = component_interpreter(env, root).environment
        place = environment or "the Python environment of the training"
        yield replace(fault, remedy=f"install {package} in {place}")


def _find_foreign_launchers(spec: RunSpec, root: Path | None) -> Iterator[Fault]:
    """Yield a fault for each launcher that exists only outside its component's environment.

    Args:
        spec: The run spec.
        root: See `find_missing_files`.
    """
    for local in _list_local_commands(spec):
        if "PATH" in local.env:
            continue
        fault = find_foreign_launcher(
            local.command,
            component_interpreter(local.env, root),
            component_search_path(local.env, root),
            (root or Path.cwd()) / local.cwd,
        )
        if fault is not None:
            yield replace(fault, path=f"{local.path}.0")
