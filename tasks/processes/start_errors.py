"""Explain why the program of a component could not be executed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Number of bytes at the beginning of a script in which Linux searches for the interpreter.
#: Source: linux include/uapi/linux/binfmts.h, BINPRM_BUF_SIZE.
_HEAD_BYTES = 256
#: Errors that Linux reports for a script whose interpreter cannot be executed.
_INTERPRETER_ERRORS = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)


def describe_start_error(
    error: OSError, argv: Sequence[str], env: Mapping[str, str], cwd: Path
) -> str:
    """Return the reason why a program could not be executed.

    If the interpreter of a script is missing, Linux reports that the script itself does not exist.
    The returned text then names the missing interpreter.

    Args:
        error: Error of the start.
        argv: Command of the component.
        env: Environment variables of the component.
        cwd: Working directory of the component.
    """
    if error.errno in _INTERPRETER_ERRORS:
        script = _find_program(argv[0], env, cwd)
        interpreter = _read_interpreter(script) if script is not None else ""
        if interpreter and not os.access(interpreter, os.X_OK):
            return _describe_bad_interpreter(argv[0], interpreter)
    return error.strerror or str(error) or "its guardian process does not answer"


def _describe_bad_interpreter(program: str, interpreter: str) -> str:
    reason = "does not exist"
    if os.path.exists(interpreter):
        reason = "is not executable"
    text = f"the first line of {program} names the interpreter {interpreter!r}, which {reason}"
    if interpreter.endswith("\r"):
        text += f". The file has Windows line endings: convert it with sed -i 's/\\r$//' {program}"
    return text


def _find_program(program: str, env: Mapping[str, str], cwd: Path) -> Path | None:
    """Return the path of the file that Linux executes for a command, or None if there is none."""
    if "/" in program:
        return cwd / program
    path = shutil.which(program, path=env.get("PATH", os.defpath))
    return Path(path) if path is not None else None


def _read_interpreter(script: Path) -> str:
    """Return the interpreter in the `#!` line of a file; empty if the file has no such line."""
    try:
        with script.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return ""
    if not head.startswith(b"#!"):
        return ""
    line = head[2:].split(b"\n")[0].strip(b" \t")
    interpreter = line.replace(b"\t", b" ").split(b" ")[0]
    return os.fsdecode(interpreter)
