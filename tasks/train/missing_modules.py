"""Find Python modules that a training imports, but that its Python environment does not have.

`muster check`, `train`, `submit` and `deploy` warn about such modules before the run starts. The
most common reason is a wrong or an empty Python environment.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from tasks.spec.command_python import find_command_python
from tasks.spec.formatting import join_words
from tasks.spec.placeholders import has_placeholders
from tasks.spec.programs import find_python_script
from tasks.spec.run import RunSpec
from tasks.spec.script_structure import parse_source
from tasks.spec.values import Env, select_literals
from tasks.train.interpreters import (
    component_interpreter,
    component_search_path,
    find_command_interpreter,
)

#: Program that prints each argument that is not the name of an installed module. The program does
#: not import the modules.
_PROGRAM = """
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""
#: Matches code that changes the folders in which Python searches for modules.
_CHANGES_PATH = re.compile(r"\bsys\.path\b|\bfrom sys import\b[^\n]*\bpath\b|\baddsitedir\b")
#: Time limit of `_PROGRAM` in seconds.
_WITHIN_S = 10.0


def describe_missing_modules(spec: RunSpec, root: Path) -> Iterator[str]:
    """Yield a warning for each component whose script imports modules that do not exist.

    Only the imports at the top level of the script are checked, because an import in a function or
    in a `try` statement may be optional. Modules of the project do not count.

    Args:
        spec: The run spec.
        root: Root folder of the project.
    """
    for name, component in spec.processes.items():
        script = find_python_script(component, spec, root)
        if script is None:
            continue
        env = {**spec.env, **component.env}
        cwd = root / (component.cwd or spec.cwd)
        search_path = select_literals(env).get("PATH") or component_search_path(env, root)
        if find_command_python(component.command, search_path, cwd) is None:
            # Another message says that the program does not exist.
            continue
        python = find_command_interpreter(name, component.command, env, cwd, root)
        names = sorted(_list_imports(script.file) - sys.stdlib_module_names)
        missing = _find_missing(names, Path(python.path), script.first_search_folder, cwd, env)
        if missing:
            noun = "module" if len(missing) == 1 else "modules"
            advice = f"Install the {noun} in this environment, or use another environment"
            if python == component_interpreter(env, root) and python.environment is None:
                # This interpreter runs Muster. Users should not install modules for Muster.
                advice = (
                    f"Create a Python environment for the training in {root / '.venv'}. If the "
                    "training already has an environment, activate that environment before you "
                    "call Muster"
                )
            yield (
                f"{script.file.name} imports the {noun} {join_words(missing)}, but the Python "
                f"environment of {name} does not have the {noun}. This environment belongs to "
                f"{python}. {advice}"
            )


def _list_imports(script: Path) -> frozenset[str]:
    """Return the modules that a script imports outside functions and other blocks.

    For `import torch.nn`, the module is `torch`. If the script changes the search path of Python,
    only the imports at its beginning are returned, because the other modules may be in the folders
    that the script adds."""
    with suppress(OSError, UnicodeDecodeError):
        source = script.read_text(encoding="utf-8")
        tree = parse_source(source)
        statements = tree.body if tree is not None else []
        if _CHANGES_PATH.search(source):
            statements = [*takewhile(_is_import_or_docstring, statements)]
        names: set[str] = set()
        for statement in statements:
            if isinstance(statement, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and not statement.level:
                names.add((statement.module or "").partition(".")[0])
        return frozenset(names - {""})
    return frozenset()


def _is_import_or_docstring(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
    return False


def _find_missing(names: list[str], python: Path, folder: Path, cwd: Path, env: Env) -> list[str]:
    """Return those modules that a Python interpreter does not find.

    Args:
        names: Names of the modules.
        python: Path of the interpreter.
        folder: Folder in which Python searches first.
        cwd: Working directory of the script.
        env: Environment variables of the component in the spec.

    Returns:
        The missing modules. Empty if the interpreter could not be asked.
    """
    if not names:
        return []
    literals = select_literals(env)
    if has_placeholders(literals.get("PYTHONPATH", "")):
        # The folders of PYTHONPATH are not known yet.
        return []
    variables = {**os.environ, **literals}
    folders = [str(folder.resolve()), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    try:
        answer = subprocess.run(
            [python, "-c", _PROGRAM, *names],
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()
