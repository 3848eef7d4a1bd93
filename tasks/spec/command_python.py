"""Find the Python interpreter that a command runs, and launchers of another Python environment."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tasks.spec.errors import Fault
from tasks.spec.programs import Interpreter

#: Programs that run the script of the training with their own Python interpreter. Each program is
#: mapped to the Python package that contains the program.
LAUNCHER_PACKAGES = {
    "torchrun": "torch",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "composer": "mosaicml",
    "colossalai": "colossalai",
    "horovodrun": "horovod",
}
_PYTHON_NAME = re.compile(r"(?:python|pypy)[\d.]*")
#: Matches the interpreter in the first two lines of a Python script. If the path of the interpreter
#: has spaces or is too long for a `#!` line, pip writes a second line with `exec`.
#: Source: distlib/scripts.py, _build_shebang.
_INTERPRETER_LINE = re.compile(
    r"#![ \t]*(?:/\S*/env[ \t]+(?:-S[ \t]+)?(?P<name>\S+)|(?P<path>/\S+))"
    r"(?:[^\n]*\n'''exec' (?P<quoted>\"[^\"\n]+\"|\S+))?"
)
#: Number of bytes at the start of a script that are searched for the interpreter.
_HEAD_BYTES = 4096


def find_command_python(command: Sequence[str], path: str, cwd: Path) -> Path | None:
    """Return the path of the Python interpreter that a command runs.

    - If the command's program is a Python interpreter, the result is its path.
    - If the program is a Python script such as `torchrun`, the result is the interpreter that the
      first line of the script names.

    Args:
        command: The program and its arguments.
        path: PATH of the command.
        cwd: Working directory of the command.

    Returns:
        The path, or None if the program does not exist or is no Python program.
    """
    if not command:
        return None
    name = command[0]
    program = shutil.which(str(cwd / name) if "/" in name else name, path=path)
    if program is None:
        return None
    if is_python_name(program):
        return Path(program)

    interpreter = _read_interpreter(Path(program))
    if not is_python_name(interpreter):
        return None
    python = shutil.which(interpreter, path=path)
    return Path(python) if python is not None else None


def is_python_name(program: str) -> bool:
    """Return True if the path of a program ends with the name of a Python interpreter."""
    return _PYTHON_NAME.fullmatch(Path(program).name) is not None


def find_foreign_launcher(
    command: Sequence[str], chosen: Interpreter, path: str, cwd: Path
) -> Fault | None:
    """Return a fault if a launcher such as `torchrun` is missing in the chosen environment.

    In this case, the launcher of another environment on the PATH would run the training with the
    Python and the packages of that environment. If the command contains the path of the
    launcher, the user has chosen the environment, and there is no fault.

    Args:
        command: The program and its arguments.
        chosen: The Python interpreter of the component.
        path: PATH of the component.
        cwd: Working directory of the component.

    Returns:
        The fault, without the path of the command in the spec. None if the launcher belongs to the
        chosen environment, or if no environment is chosen.
    """
    if chosen.environment is None or not command or command[0] not in LAUNCHER_PACKAGES:
        return None
    python = find_command_python(command, path, cwd)
    launcher = shutil.which(command[0], path=path)
    if python is None or launcher is None:
        return None
    if os.path.realpath(python.parent) == os.path.realpath(Path(chosen.path).parent):
        return None
    return Fault(
        path="",
        problem=f"{command[0]} would start {launcher}, which runs the training with {python}. But "
        f"the chosen Python is {chosen}, whose environment has no {command[0]}",
        remedy=f"install {LAUNCHER_PACKAGES[command[0]]} in {chosen.environment}. If the training "
        f"uses {python}, write {launcher} in place of {command[0]}",
    )


def _read_interpreter(script: Path) -> str:
    """Return the interpreter in the first lines of a script, or an empty string if it has none."""
    try:
        with script.open("rb") as file:
            head = os.fsdecode(file.read(_HEAD_BYTES))
    except OSError:
        return ""
    match = _INTERPRETER_LINE.match(head)
    if match is None:
        return ""
    return (match["quoted"] or match["name"] or match["path"]).strip('"')
