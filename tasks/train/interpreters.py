"""Python interpreter and PATH of a run's components.

The check of a spec uses this module before Prefect is imported, so the module must not import
Prefect.
"""

from __future__ import annotations

import os
from pathlib import Path

from tasks.record.code_store import PROJECT
from tasks.spec.programs import Interpreter, build_component_path, find_interpreter
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
