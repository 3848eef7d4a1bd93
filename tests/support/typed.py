"""Whether a command that a document tells to type would be understood, without running it.

Programs of the project are run up to the moment at which they have read their arguments.
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

#: The project's own packages: what their modules take is known.
_OWN = ("flows", "tasks", "deployments", "tests")
_TOPS = tuple(f"{name}/" for name in (*_OWN, "docs"))
_FILES = (".yaml", ".yml", ".py", ".md", ".json", ".csv", ".sh", ".toml")
#: What a command of the documents writes in the reader's own project.
_OF_THE_READER = ("muster.yaml",)
#: What stands for something that the reader knows: HEAD, RUN, SPEC.yaml.
_STANDS_FOR = re.compile(r"\b[A-Z][A-Z0-9_]+\b|\$|<|\.\.\.")
_OPERATORS = frozenset(("|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>>", "(", ")"))
_REDIRECTIONS = frozenset((">", ">>", "<", "2>", "2>>"))
#: What a recipe of the Makefile starts, a module or a program, and with which arguments.
_STARTED = re.compile(r"\$\((?:PY\) -m |VENV\)/bin/)([\w.]+)([^\n;]*)")
#: They run another program.
_BEFORE = ("sudo", "exec", "time", "nohup")
#: Programs of others whose arguments are theirs to judge.
_OTHERS = frozenset(
    """
    . [ apt-get awk cat cd chmod chown cp createdb createuser crontab curl date df docker dropdb du
    echo env export git grep gzip head hostname id install ip journalctl jq kill less ls mkdir
    mv nice nvidia-smi openssl pg_dump pg_restore pip pkill psql quota ray rm rsync run-api sed set
    sh sleep sort source sqlite3 ssh su sudo systemctl tail tar tee test touch true unshare useradd
    wc which xargs
    """.split()  # noqa: SIM905
)


class _Read(Exception):
    """The arguments were read, and are good."""


class _Complaint(Exception):
    """The arguments were read, and this is what is wrong with them; empty: nothing."""


def complaint_about(command: str) -> str:
    """Why the command would not be understood; empty where it would."""
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError as error:
        return str(error)
    for simple in _simple_commands(words):
        if complaint := _about_simple(simple):
            return complaint
    return ""


def _simple_commands(words: Sequence[str]) -> Iterator[list[str]]:
    current: list[str] = []
    is_target = False
    for word in words:
        if is_target:
            is_target = False
        elif word in _REDIRECTIONS:
            is_target = True
        elif word in _OPERATORS:
            yield current
            current = []
        else:
            current.append(word)
    yield current


def _about_simple(words: list[str]) -> str:
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        words = words[1:]
    while words and words[0] in _BEFORE:
        # sudo -u USER
        words = words[3:] if words[1:2] == ["-u"] else words[1:]
    if not words:
        return ""
    program, *arguments = words
    if "/" in program and not program.startswith(("/", "~", ".venv/bin/")):
        return "" if (ROOT / program).exists() else f"there is no {program}"
    name = Path(program).name
    if missing := [path for path in arguments if _is_path(path) and not [*ROOT.glob(path)]]:
        return f"there is no {missing[0]}"
    if name == "make":
        return _about_make(arguments)
    if re.fullmatch(r"python(3(\.\d+)?)?", name):
        return _about_python(arguments)
    if name == "prefect":
        return about_prefect(arguments)
    if name == "muster":
        return about_muster(arguments)
    return "" if name in _OTHERS else f"no test knows the program {name}"


def _is_path(word: str) -> bool:
    if _STANDS_FOR.search(word) or word.startswith(("-", "/", "~")) or "=" in word or ":" in word:
        return False
    if word in _OF_THE_READER:
        return False
    return word.startswith(_TOPS) or ("/" not in word and word.endswith(_FILES))


def make_targets() -> dict[str, str]:
    """Each target of the Makefile with its recipe."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"^([a-z-]+):(?!=)[^\n]*\n((?:\t[^\n]*\n|\n)*)", text, re.MULTILINE)
    return dict(found)


def _about_make(arguments: Sequence[str]) -> str:
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
        for name, rest in _STARTED.findall(recipes[target]):
            if "$(ARGS)" not in rest or name.partition(".")[0] not in (*_OWN, "muster"):
                continue
            rest = re.sub(r"\$\(if [^()]*\([^()]*\)[^()]*(?:\([^()]*\))?\)", "", rest)
            rest = rest.replace("$(SPEC)", variables.get("SPEC", "spec.yaml"))
            rest = rest.replace("$(ARGS)", variables.get("ARGS", ""))
            words = shlex.split(rest)
            if complaint := about_muster(words) if name == "muster" else about_module(name, words):
                return complaint
    return ""


def _about_python(arguments: Sequence[str]) -> str:
    match arguments:
        case ["-m", module, *rest]:
            return about_module(module, rest)
        case [script, *_] if not script.startswith("-") and not (ROOT / script).exists():
            return f"there is no {script}"
    return ""


def program_file(module: str) -> Path | None:
    """What `python -m MODULE` of the project runs; None where it would do nothing."""
    file = _module_file(module)
    return file if file and (file.stem == "__main__" or _entry(file)) else None


def _module_file(module: str) -> Path | None:
    place = ROOT / module.replace(".", "/")
    for path in (place.with_suffix(".py"), place / "__main__.py"):
        if path.exists():
            return path
    return None


def _entry(file: Path) -> list[ast.stmt]:
    """What it does only as a program."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    ifs = [
        node for node in body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    ]
    return [statement for node in ifs for statement in node.body]


def about_module(module: str, arguments: Sequence[str]) -> str:
    """What is wrong with `python -m MODULE ARGUMENT...`."""
    if module.partition(".")[0] not in _OWN:
        try:
            return "" if find_spec(module) else f"there is no module {module}"
        except ImportError as error:
            return str(error)
    file = program_file(module)
    if file is None:
        return f"there is no program {module}"
    if module == "deployments.worker":
        return about_prefect(["worker", "start", *arguments])
    if not _reads_arguments(file):
        return f"{module} takes no arguments" if arguments else ""
    return _read_by(module, arguments)


def _reads_arguments(file: Path) -> bool:
    """Whether it reads its arguments as soon as it is run: what does not must not be run here."""
    source = file.read_text(encoding="utf-8")
    if any(one in source for one in ("parse_args(", "run_alone(", "App(")):
        return True
    entry = [*(ast.parse(source).body if file.name == "__main__.py" else ()), *_entry(file)]
    modules = {node.module for node in entry if isinstance(node, ast.ImportFrom) and node.module}
    files = [_module_file(name) for name in modules if name.partition(".")[0] in _OWN]
    return any("parse_args(" in one.read_text(encoding="utf-8") for one in files if one)


def _read_by(module: str, arguments: Sequence[str]) -> str:
    original, before = argparse.ArgumentParser.parse_args, sys.argv

    def parse_args(self: argparse.ArgumentParser, args: Any = None, *more: Any) -> NoReturn:
        original(self, args, *more)
        raise _Read

    def call(self: App, *_tokens: Any, **_options: Any) -> NoReturn:
        raise _Complaint(_about_app(self, arguments))

    said = io.StringIO()
    called = App.__call__
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    App.__call__ = call  # type: ignore[method-assign,assignment]
    sys.argv = [module, *arguments]
    try:
        with (
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            # That it was imported before, by another test.
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module(module, run_name="__main__")
    except _Read:
        return ""
    except _Complaint as complaint:
        return str(complaint)
    except SystemExit as error:
        if not error.code:  # --help
            return ""
        last = said.getvalue().strip().splitlines()
        return last[-1] if last else f"{module} exits {error.code}"
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
        App.__call__ = called  # type: ignore[method-assign]
        sys.argv = before
    return f"{module} did not read its arguments"


def about_prefect(arguments: Sequence[str]) -> str:
    """What is wrong with `prefect ARGUMENT...`."""
    from prefect.cli._app import _app

    words = [word for word in arguments if word not in ("--no-prompt", "--prompt")]
    complaint = _about_app(_app, words)
    return f"prefect: {complaint}" if complaint else ""


def muster_verbs() -> frozenset[str]:
    from tasks.command import _VERBS

    return frozenset(name for verbs in _VERBS.values() for name, *_ in verbs)


def about_muster(arguments: Sequence[str]) -> str:
    """What is wrong with `muster ARGUMENT...`."""
    from tasks.command import _build_app

    verb = next(iter(arguments), "--help")
    if not verb.startswith("-") and verb not in muster_verbs():
        return f"muster has no verb {verb!r}"
    complaint = _about_app(_build_app(), arguments)
    return f"muster: {complaint}" if complaint else ""


def _about_app(app: App, words: Sequence[str]) -> str:
    try:
        app.parse_args([*words], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        is_for_reader = isinstance(error, CoercionError | ValidationError)
        return "" if is_for_reader and any(map(_STANDS_FOR.search, words)) else str(error)
    except SystemExit:
        pass
    return ""
