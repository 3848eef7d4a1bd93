"""Check the shell commands in the documents without executing them.

A program of the project is started only until it has parsed its arguments.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import App, CoercionError, CycloptsError, ValidationError

from tests.support.documents import ROOT

#: Python packages of the project. If a command runs a program of these packages, the test starts
#: the program to check the arguments.
_PROJECT_PACKAGES = ("flows", "tasks", "deployments", "tests")
#: Beginnings of paths in the project.
_PROJECT_FOLDERS = tuple(f"{name}/" for name in (*_PROJECT_PACKAGES, "docs"))
#: Endings of file names in the project.
_FILE_ENDINGS = (".yaml", ".yml", ".py", ".md", ".json", ".csv", ".sh", ".toml")
#: Files that a command in the documentation creates in the reader's own project.
_FILES_OF_READER = ("muster.yaml",)
#: Matches a placeholder that the reader must replace by a value, for example HEAD, RUN or
#: SPEC.yaml.
_PLACEHOLDER = re.compile(r"\b[A-Z][A-Z0-9_]+\b|\$|<|\.\.\.")
#: Operators of the shell.
_OPERATORS = frozenset(("|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>>", "(", ")"))
#: Shell operators that stand before the name of a file.
_REDIRECTIONS = frozenset((">", ">>", "<", "2>", "2>>"))
#: Matches `$(PY) -m MODULE ARGUMENTS` and `$(VENV)/bin/PROGRAM ARGUMENTS` in the Makefile. The two
#: groups are the name of the module or program, and the arguments.
_PROGRAM_IN_RECIPE = re.compile(r"\$\((?:PY\) -m |VENV\)/bin/)([\w.]+)([^\n;]*)")
#: Commands whose arguments are another command, for example `sudo COMMAND`.
_PREFIX_COMMANDS = ("sudo", "exec", "time", "nohup")
#: Programs of other projects. Their arguments are not checked.
_FOREIGN_PROGRAMS = frozenset(
    """
    . [ apt-get awk cat cd chmod chown cp createdb createuser crontab curl date df docker dropdb du
    echo env export git grep gzip head hostname id install ip journalctl jq kill less ls mkdir
    mv nice nvidia-smi openssl pg_dump pg_restore pip pkill psql quota ray rm rsync run-api sed set
    sh sleep sort source sqlite3 ssh su sudo systemctl tail tar tee test touch true unshare useradd
    wc which xargs
    """.split()  # noqa: SIM905
)


class _ArgumentsParsed(Exception):
    """Raised to stop a program after it has parsed its arguments without an error."""


class _AppCalled(Exception):
    """Raised to stop a program when it calls its cyclopts app.

    The message of the exception is the error in the program's arguments. The message is empty if
    the arguments are correct.
    """


def find_command_error(command: str) -> str:
    """Return the first error in a shell command, or an empty string if the command is correct."""
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError as error:
        return str(error)
    for simple in _simple_commands(words):
        if complaint := _check_simple_command(simple):
            return complaint
    return ""


def _simple_commands(words: Sequence[str]) -> Iterator[list[str]]:
    """Split a shell command at operators such as `|` and `&&`, and yield the words of each part.

    Redirections such as `> FILE` are left out.
    """
    current: list[str] = []
    is_redirected_file = False
    for word in words:
        if is_redirected_file:
            is_redirected_file = False
        elif word in _REDIRECTIONS:
            is_redirected_file = True
        elif word in _OPERATORS:
            yield current
            current = []
        else:
            current.append(word)
    yield current


def _check_simple_command(words: list[str]) -> str:
    """Return the error in a command that contains no shell operators such as `|` and `&&`.

    An empty string means that the command is correct.
    """
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        words = words[1:]
    while words and words[0] in _PREFIX_COMMANDS:
        # Remove the prefix command and, if the command is `sudo`, also the option `-u USER`.
        words = words[3:] if words[1:2] == ["-u"] else words[1:]
    if not words:
        return ""
    program, *arguments = words
    if "/" in program and not program.startswith(("/", "~", ".venv/bin/")):
        return "" if (ROOT / program).exists() else f"there is no {program}"
    name = Path(program).name
    for argument in arguments:
        if _is_project_path(argument) and not [*ROOT.glob(argument)]:
            return f"there is no {argument}"
    if name == "make":
        return _check_make(arguments)
    if re.fullmatch(r"python(3(\.\d+)?)?", name):
        return _check_python(arguments)
    if name == "prefect":
        return check_prefect(arguments)
    if name == "muster":
        return check_muster(arguments)
    return "" if name in _FOREIGN_PROGRAMS else f"no test knows the program {name}"


def _is_project_path(word: str) -> bool:
    """Return True if an argument is the path of a file or folder of the project."""
    if _PLACEHOLDER.search(word) or word.startswith(("-", "/", "~")) or "=" in word or ":" in word:
        return False
    if word in _FILES_OF_READER:
        return False
    is_in_root = "/" not in word and word.endswith(_FILE_ENDINGS)
    return word.startswith(_PROJECT_FOLDERS) or is_in_root


def make_targets() -> dict[str, str]:
    """Return a mapping from the name of each target of the Makefile to its recipe."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = re.findall(r"^([a-z-]+):(?!=)[^\n]*\n((?:\t[^\n]*\n|\n)*)", text, re.MULTILINE)
    return dict(recipes)


def _check_make(arguments: Sequence[str]) -> str:
    """Return the error in a call of `make`, or an empty string if the call is correct.

    A call is correct if the Makefile has all targets and variables of the call, and if each program
    in the recipes of these targets accepts its arguments. Variables such as `SPEC=run.yaml` in the
    call are first inserted into the recipes.
    """
    variables = dict(word.split("=", 1) for word in arguments if "=" in word)
    words = [word for word in arguments if "=" not in word]
    while "-C" in words:
        del words[words.index("-C") : words.index("-C") + 2]
    targets = [word for word in words if not word.startswith("-")]
    recipes = make_targets()
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in variables:
        if f"$({name})" not in text and f"${{{name}}}" not in text:
            return f"the Makefile knows no {name}"
    for target in targets:
        if target not in recipes:
            return f"there is no `make {target}`"
        for name, options in _PROGRAM_IN_RECIPE.findall(recipes[target]):
            is_own = name.partition(".")[0] in (*_PROJECT_PACKAGES, "muster")
            if "$(ARGS)" not in options or not is_own:
                continue
            options = re.sub(r"\$\(if [^()]*\([^()]*\)[^()]*(?:\([^()]*\))?\)", "", options)
            options = options.replace("$(SPEC)", variables.get("SPEC", "spec.yaml"))
            options = options.replace("$(ARGS)", variables.get("ARGS", ""))
            words = shlex.split(options)
            complaint = check_muster(words) if name == "muster" else check_module(name, words)
            if complaint:
                return complaint
    return ""


def _check_python(arguments: Sequence[str]) -> str:
    """Return the error in a call of `python`, or an empty string if the call is correct."""
    match arguments:
        case ["-m", module, *module_arguments]:
            return check_module(module, module_arguments)
        case [script, *_] if not script.startswith("-") and not (ROOT / script).exists():
            return f"there is no {script}"
    return ""


def program_file(module: str) -> Path | None:
    """Return the file that `python -m MODULE` runs, or None if the project has no such program."""
    file = _module_file(module)
    return file if file and (file.stem == "__main__" or _main_statements(file)) else None


def _module_file(module: str) -> Path | None:
    """Return the file of a module, or of the `__main__` of a package; None if there is no file."""
    place = ROOT / module.replace(".", "/")
    for path in (place.with_suffix(".py"), place / "__main__.py"):
        if path.exists():
            return path
    return None


def _main_statements(file: Path) -> list[ast.stmt]:
    """Return the statements in the block `if __name__ == "__main__"` of a file."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    blocks = [
        node for node in body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    ]
    return [statement for block in blocks for statement in block.body]


def check_module(module: str, arguments: Sequence[str]) -> str:
    """Return the error in `python -m MODULE ARGUMENT...`, or an empty string if there is none."""
    if module.partition(".")[0] not in _PROJECT_PACKAGES:
        try:
            return "" if find_spec(module) else f"there is no module {module}"
        except ImportError as error:
            return str(error)
    file = program_file(module)
    if file is None:
        return f"there is no program {module}"
    if module == "deployments.worker":
        return check_prefect(["worker", "start", *arguments])
    if not _parses_arguments(file):
        return f"{module} takes no arguments" if arguments else ""
    return _parse_with(module, arguments)


def _parses_arguments(file: Path) -> bool:
    """Return True if a program parses its command-line arguments before any other action.

    A test can start such a program without side effects, to check the program's arguments.
    """
    source = file.read_text(encoding="utf-8")
    if any(call in source for call in ("parse_args(", "run_alone(", "App(")):
        return True

    # In some programs, an imported module of the project parses the arguments. So search the
    # imported modules, too.
    statements = _main_statements(file)
    if file.name == "__main__.py":
        statements += ast.parse(source).body
    modules = {
        node.module for node in statements if isinstance(node, ast.ImportFrom) and node.module
    }
    files = [_module_file(name) for name in modules if name.partition(".")[0] in _PROJECT_PACKAGES]
    return any("parse_args(" in path.read_text(encoding="utf-8") for path in files if path)


def _parse_with(module: str, arguments: Sequence[str]) -> str:
    """Run a module as a program until it has parsed its arguments.

    Returns:
        The error that the program found in the arguments. An empty string if there is no error.
    """
    original_parse_args = argparse.ArgumentParser.parse_args
    original_call = App.__call__
    original_argv = sys.argv

    def parse_args(self: argparse.ArgumentParser, args: Any = None, *others: Any) -> NoReturn:
        original_parse_args(self, args, *others)
        raise _ArgumentsParsed

    def call(self: App, *_tokens: Any, **_options: Any) -> NoReturn:
        raise _AppCalled(_check_app(self, arguments))

    stderr = io.StringIO()
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    App.__call__ = call  # type: ignore[method-assign,assignment]
    sys.argv = [module, *arguments]
    try:
        with (
            contextlib.redirect_stderr(stderr),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            # runpy warns if another test has already imported the module.
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module(module, run_name="__main__")
    except _ArgumentsParsed:
        return ""
    except _AppCalled as called:
        return str(called)
    except SystemExit as error:
        # The exit code of --help is 0.
        if not error.code:
            return ""
        lines = stderr.getvalue().strip().splitlines()
        return lines[-1] if lines else f"{module} exits {error.code}"
    finally:
        argparse.ArgumentParser.parse_args = original_parse_args  # type: ignore[method-assign]
        App.__call__ = original_call  # type: ignore[method-assign]
        sys.argv = original_argv
    return f"{module} did not read its arguments"


def check_prefect(arguments: Sequence[str]) -> str:
    """Return the error in `prefect ARGUMENT...`, or an empty string if the command is correct."""
    from prefect.cli._app import _app

    words = [word for word in arguments if word not in ("--no-prompt", "--prompt")]
    complaint = _check_app(_app, words)
    return f"prefect: {complaint}" if complaint else ""


def muster_verbs() -> frozenset[str]:
    """Return the names of all subcommands of `muster`."""
    from tasks.command import VERBS

    return frozenset(verb.name for verbs in VERBS.values() for verb in verbs)


def check_muster(arguments: Sequence[str]) -> str:
    """Return the error in `muster ARGUMENT...`, or an empty string if the command is correct."""
    from tasks.command import _build_app

    if [*arguments[:1]] == ["help"]:
        # `muster help VERB` prints the help of the verb.
        arguments = arguments[1:]
    verb = next(iter(arguments), "--help")
    if verb == "VERB":
        return ""
    if not verb.startswith("-") and verb not in muster_verbs():
        return f"muster has no command {verb!r}"
    complaint = _check_app(_build_app(), arguments)
    return f"muster: {complaint}" if complaint else ""


def _check_app(app: App, words: Sequence[str]) -> str:
    """Return the error that a cyclopts app (a command-line program) finds in its arguments.

    An empty string means that the app accepts the arguments.
    """
    try:
        app.parse_args([*words], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        # A placeholder such as RUN is not a valid number or path, so the app may report a wrong
        # value. Ignore this report: the reader replaces the placeholder by a valid value.
        is_wrong_value = isinstance(error, CoercionError | ValidationError)
        has_placeholder = any(map(_PLACEHOLDER.search, words))
        return "" if is_wrong_value and has_placeholder else str(error)
    except SystemExit:
        pass
    return ""
