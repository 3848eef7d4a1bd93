"""Python interpreter and PATH of a run's components, and a summary of both for the user.

The check of a spec uses this module before Prefect is imported, so the module must not import
Prefect.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tasks.record.code_store import PROJECT
from tasks.spec.programs import (
    Interpreter,
    build_component_path,
    find_interpreter,
    find_missing_programs,
)
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.spec.values import Env, select_literals


def component_interpreter(env: Env, root: Path | None = None) -> Interpreter:
    """Return the Python interpreter of a component.

    Args:
        env: Environment variables of the component in the spec.
        root: Root folder of the project. If None, use the folder of the submitted project, which an
            environment variable names, or else the working directory.
    """
    root = root or Path(os.environ.get(PROJECT) or Path.cwd())
    return find_interpreter(root, select_literals(env))


def component_search_path(env: Env, root: Path | None = None) -> str:
    """Return the PATH of a component: the folder of its `python`, then the PATH of this process.

    Args:
        env: Environment variables of the component in the spec.
        root: See `component_interpreter`.
    """
    interpreter = component_interpreter(env, root)
    return build_component_path(interpreter.path, os.environ.get("PATH", os.defpath))


def print_project(spec: RunSpec, root: Path) -> None:
    """Print the project and code of a run on stderr, and the programs that this machine lacks.

    Args:
        spec: The run spec, with the version of the submitted code.
        root: Root folder of the project.
    """
    code = (
        "files used in place"
        if spec.code == LIVE_CODE
        else f"files copied as {str(spec.code)[:12]}"
    )
    interpreter = component_interpreter(spec.env, root)
    print(f"  project {root}, {code}, python {interpreter}", file=sys.stderr)
    # A missing program is no fault: the run may start on another host, which has the program.
    search_path = component_search_path(spec.env, root)
    for fault in find_missing_programs(spec, root=root, path=search_path):
        print(
            f"  this machine lacks a file that the worker's host must have: {fault}",
            file=sys.stderr,
        )
