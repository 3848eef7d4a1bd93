"""Check that the files and programs that a run spec names exist, before the run starts.

The check covers directories, programs, and the script of a command of Python, a shell, torchrun or
accelerate. It also covers the modules of the project after `-m`, and files that a Python script
receives with `--config`. It skips commands that run on the Ray cluster, and texts with
placeholders.

The check reports a file only if the file is certainly missing. Otherwise it could reject a valid
run. A missing file that the check overlooks only makes the start of the run fail.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks.spec.component import Component
from tasks.spec.errors import Fault
from tasks.spec.evaluations import find_place
from tasks.spec.formatting import suggest_name
from tasks.spec.ownership import find_marker_fault, warn_ignored
from tasks.spec.placeholders import has_placeholders, substitute
from tasks.spec.rollout import Rollout
from tasks.spec.run import RunSpec
from tasks.spec.values import Env, select_literals

_PYTHON = re.compile(r"python(\d(\.\d+)?)?|pypy3?")
_SHELL = re.compile(r"sh|bash|dash|ksh|zsh")
#: Environment variables with the path of the activated Python environment: first for a virtual
#: environment, then for a conda environment. If both are set, the virtual environment is used,
#: because it was activated inside the conda environment.
ENVIRONMENT_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX")
#: Path of the interpreter, relative to the folder of a Python environment.
_PYTHON_OF_ENVIRONMENT = "bin/python"
#: Matches options without a value (flags) of Python and of shells. After any other option, the next
#: argument may be the value of the option, or the script.
_FLAGS = re.compile(r"-[BEIPbdehinqsuvx]+")
#: Matches the last option of Python before the name of a module. After -I or -P, Python does not
#: search for the module in the working directory, so these options do not match.
_MODULE_OPTION = re.compile(r"-[BEbdhinqsuvx]*m")
_MODULE_NAME = re.compile(r"\w+(?:\.\w+)*")
#: Matches the options of torchrun that have a value, without leading dashes.
_TORCHRUN_OPTION = re.compile(
    r"nnodes|nproc-per-node|rdzv-(?:backend|endpoint|id|conf)|max-restarts|monitor-interval"
    r"|start-method|event-log-handler|role|log-dir|r|redirects|t|tee|local-ranks-filter"
    r"|duplicate-std(?:out|err)-filters|node-rank|master-(?:addr|port)|local-addr|logs-specs"
    r"|numa-binding|signals-to-handle|shutdown-timeout"
)
#: Matches the common options of `accelerate launch` that have a value.
_ACCELERATE_OPTION = re.compile(
    r"config-file|num-(?:processes|machines|cpu-threads-per-process)|machine-rank|mixed-precision"
    r"|gpu-ids|main-process-(?:ip|port)|dynamo-backend|gradient-accumulation-steps"
    r"|deepspeed-config-file|zero-stage"
)
#: Launchers, which are commands that start the ranks of a Python script. Each launcher is mapped to
#: a pattern that matches the launcher's options with a value. `python -m torch.distributed.run` is
#: the same as torchrun.
_LAUNCHERS = {
    ("torchrun",): _TORCHRUN_OPTION,
    ("torch.distributed.run",): _TORCHRUN_OPTION,
    ("torch.distributed.launch",): _TORCHRUN_OPTION,
    ("accelerate", "launch"): _ACCELERATE_OPTION,
    ("accelerate.commands.launch",): _ACCELERATE_OPTION,
}
#: Matches the options of torchrun and `accelerate launch` that take no value. After any other
#: option, the next argument may be the value of the option, or the script.
_LAUNCHER_FLAG = re.compile(
    r"standalone|run-path|virtual-local-rank|use-env|cpu|multi-gpu|use-deepspeed|use-fsdp|q|quiet"
    r"|debug"
)
#: Matches the beginning of an argument that contains an option and its value.
_OPTION_WITH_VALUE = re.compile(r"--[\w-]+=")
_CONFIG_OPTION = re.compile(r"(--(?:config|config[-_]file|env[-_]file))(?:=(.*))?", re.DOTALL)
#: Matches an argument that is the path of one config file. URLs and lists of files do not match.
_CONFIG_FILE = re.compile(r"[\w./+@ -]*\.(?:yaml|yml|json|toml|env|py)")


def build_component_path(python: str, path: str) -> str:
    """Return a PATH for components that begins with the directory of their Python interpreter.

    Components then find `python`, `run-api` and other programs in the interpreter's virtual
    environment, even if that environment is not activated.

    Args:
        python: Path of the interpreter. For a symbolic link, the directory of the link is used, and
            not that of its target, which is outside the virtual environment.
        path: The PATH to extend.
    """
    interpreter_dir = str(Path(python).parent)
    if path.split(os.pathsep)[0] == interpreter_dir:
        return path
    return os.pathsep.join(filter(None, (interpreter_dir, path)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python interpreter that runs if a component executes `python`."""

    #: Path of the Python interpreter.
    path: str
    #: Virtual environment or conda environment of the interpreter. None for Muster's own
    #: interpreter.
    environment: Path | None = None
    #: Text about the origin of the interpreter, such as `of VIRTUAL_ENV`. Messages show this text
    #: in brackets after the path of the interpreter.
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def find_interpreter(root: Path, env: Mapping[str, str]) -> Interpreter:
    """Return the Python interpreter for the components of a project.

    The first existing interpreter in this list is returned:

    - the interpreter of the environment in VIRTUAL_ENV or CONDA_PREFIX, if the spec sets one of
      them
    - the interpreter in the project's `.venv`, if that folder belongs to this user or to root
    - the interpreter that runs Muster

    Args:
        root: Root of the project.
        env: Environment variables of the spec, see also `find_active_environment`.
    """
    for variable in ENVIRONMENT_VARIABLES:
        environment = Path(env.get(variable, ""))
        if environment.is_absolute() and _has_python(environment):
            return Interpreter(
                path=str(environment / _PYTHON_OF_ENVIRONMENT),
                environment=environment,
                reason=f"of {variable}",
            )
    project_environment = find_trusted_environment(root)
    if project_environment is not None and _has_python(project_environment):
        return Interpreter(
            path=str(project_environment / _PYTHON_OF_ENVIRONMENT),
            environment=project_environment,
            reason="of the project's .venv",
        )
    return Interpreter(
        path=sys.executable,
        reason=f"Muster's own Python, because {_explain_missing_environment(root, env)}",
    )


def _explain_missing_environment(root: Path, env: Mapping[str, str]) -> str:
    """Return the reason why a project has no usable Python environment.

    Args:
        root: Root of the project.
        env: Environment variables of the spec. Variables of this process are considered, too.
    """
    environments = {name: env.get(name) or os.environ.get(name) for name in ENVIRONMENT_VARIABLES}
    if os.path.lexists(root / ".venv"):
        environments["the project's .venv"] = str(root / ".venv")
    broken = [
        f"{name} is {path}, which has no {_PYTHON_OF_ENVIRONMENT}"
        for name, path in environments.items()
        if path and not _has_python(Path(path))
    ]
    return "; ".join(broken) or "the project has no .venv and no Python environment is activated"


def find_active_environment(
    root: Path, env: Mapping[str, object], shell: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variable that selects this shell's activated Python environment.

    Commands that start or queue a run add this variable to the key `env` of the spec. Without it, a
    run that a worker starts would use the Python environment of the worker.

    Args:
        root: Root of the project.
        env: Environment variables of the spec.
        shell: Environment variables of the command.

    Returns:
        VIRTUAL_ENV or CONDA_PREFIX with its value. The mapping is empty in these cases:
        - No environment, or only Muster's own environment, is activated.
        - The project has a `.venv`.
        - The spec itself chooses the program `python`.
    """
    if {"PATH", *ENVIRONMENT_VARIABLES} & env.keys():
        return {}
    project_environment = find_trusted_environment(root)
    if project_environment is not None and _has_python(project_environment):
        return {}
    for variable in ENVIRONMENT_VARIABLES:
        environment = Path(shell.get(variable, ""))
        if environment.is_absolute() and _has_python(environment):
            is_own = os.path.realpath(environment) == os.path.realpath(sys.prefix)
            return {} if is_own else {variable: str(environment)}
    return {}


def add_active_environment(spec: RunSpec, root: Path) -> RunSpec:
    """Return the spec with this shell's VIRTUAL_ENV or CONDA_PREFIX added to the key `env`.

    If `find_active_environment` returns no variable, the spec is returned unchanged.

    Args:
        spec: The run spec.
        root: Root of the project.
    """
    active = find_active_environment(root, spec.env)
    return spec.model_copy(update={"env": {**active, **spec.env}}) if active else spec


def _has_python(environment: Path) -> bool:
    """Return True if a Python environment contains an executable interpreter."""
    return os.access(environment / _PYTHON_OF_ENVIRONMENT, os.X_OK)


def find_trusted_environment(root: Path) -> Path | None:
    """Return the path of the virtual environment `.venv` of a project.

    Returns:
        The path, or None if the project has no `.venv`, or if another user could change it.
    """
    environment = root / ".venv"
    programs = environment / "bin"
    if not environment.is_dir():
        return None
    for place in (environment, programs, programs / "python"):
        try:
            # `python` may be a link to an interpreter of another user. This is allowed if the link
            # itself belongs to a trusted user, who has chosen that interpreter.
            fault = find_marker_fault(place, is_link_enough=place.name == "python")
        except OSError:
            # The file or folder does not exist, so no program can be started from it.
            continue
        if fault:
            warn_ignored(environment, fault)
            return None
    return environment


def find_missing_programs(spec: RunSpec, *, root: Path, path: str) -> tuple[Fault, ...]:
    """Return a fault for each missing file, directory or program that the spec names.

    Args:
        spec: The spec, in which placeholders are not replaced yet.
        root: Root of the project. Relative values of `cwd` start there.
        path: PATH of the components that set no PATH in `env`; see `build_component_path`.

    Returns:
        The faults of the spec key `cwd`, then those of the components, then those of the
        evaluations.
    """
    faults = [*_find_directory_faults("cwd", spec.cwd, root)]
    for name, component in spec.components.items():
        place = f"components.{name}"
        faults += _find_directory_faults(f"{place}.cwd", component.cwd, root)

        cwd = _find_directory(component.cwd or spec.cwd, root)
        own_path = _find_path({**spec.env, **component.env}, path)
        command = _get_local_command(component)
        faults += _find_faults_at(f"{place}.command", command, cwd, own_path)
    for name, evaluation in spec.evals.items():
        cwd = _find_directory(spec.cwd, root)
        own_path = _find_path({**spec.env, **evaluation.env}, path)
        is_local = find_place(spec.written(), evaluation.model_dump()) == "host"
        command = [*map(_resolve_argument, evaluation.command)] if is_local else []
        faults += _find_faults_at(f"evals.{name}.command", command, cwd, own_path)
    return tuple(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonScript:
    """A Python script that a component runs."""

    #: File of the script.
    file: Path
    #: Folder in which Python first searches for the modules that the script imports: the folder of
    #: the script, or the working directory for a module that `python -m` runs.
    first_search_folder: Path


def find_python_script(
    component: Component | Rollout, spec: RunSpec, root: Path
) -> PythonScript | None:
    """Return the Python script, on this machine, that a component runs.

    A module that `python -m` runs is searched in the working directory, and in the folders of the
    variable PYTHONPATH in the spec.

    Args:
        component: The component.
        spec: The spec of the run.
        root: Root of the project.

    Returns:
        None if the component runs another program, or if the script or module was not found.
    """
    command = _get_local_command(component)
    directory = _find_directory(component.cwd or spec.cwd, root)
    target = _find_target(command) if command and directory is not None else None
    if target is None or directory is None or not target.is_python:
        return None
    written = command[target.index] or ""
    if target.is_module:
        literals = select_literals({**spec.env, **component.env})
        entries = literals.get("PYTHONPATH", "").split(os.pathsep)
        file = _find_module_file(written, [directory, *(directory / entry for entry in entries)])
        return PythonScript(file=file, first_search_folder=directory) if file else None
    file = directory / written
    # If the script is a symbolic link, Python searches the folder of the target.
    folder = file.resolve().parent
    return PythonScript(file=file, first_search_folder=folder) if file.is_file() else None


def _find_module_file(module: str, folders: Sequence[Path]) -> Path | None:
    """Return the file that `python -m` executes for a module, or None if there is no such file.

    Args:
        module: Full name of the module, such as `lib.train`.
        folders: Folders in which the package of the module is searched.
    """
    if not _MODULE_NAME.fullmatch(module):
        return None
    for folder in folders:
        path = folder.joinpath(*module.split("."))
        for file in (path / "__main__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


def _find_path(env: Env, default: str) -> str | None:
    """Return the value of PATH for a command. None if the value contains a placeholder.

    Args:
        env: Environment variables of the command.
        default: PATH of a command that sets no PATH in its environment.
    """
    path_in_spec = select_literals(env).get("PATH")
    return default if path_in_spec is None else _resolve_literal(path_in_spec)


def _find_faults_at(
    place: str, command: Sequence[str | None], cwd: Path | None, path: str | None
) -> Iterator[Fault]:
    """Yield a fault for each missing file or program that a command names.

    Args:
        place: Path of the command in the spec.
        command: The program and its arguments. An argument with placeholders is None. The list is
            empty if the command does not run on this machine.
        cwd: Working directory of the command, or None if it is unknown.
        path: PATH of the command, or None if it is unknown.
    """
    if not command or path is None:
        return
    if cwd is not None:
        yield from _find_command_faults(place, command, cwd, path)
    else:
        yield from _find_program_faults(place, command[0], path)


def _get_local_command(component: Component | Rollout) -> list[str | None]:
    """Return the program and the arguments of a component's command.

    See `_resolve_argument` for an argument with placeholders. The list is empty if the command does
    not run on this machine.
    """
    if isinstance(component, Rollout):
        is_local = component.placement == "local"
        command = component.command or ()
    else:
        is_local = component.launcher == "process"
        command = component.command
    return [_resolve_argument(word) for word in command] if is_local else []


def _resolve_argument(text: str) -> str | None:
    """Return an argument of a command, or None if it has placeholders.

    If an option has a placeholder only in its value, the name of the option is returned: `--steps=`
    for `--steps=${progress.total}`.
    """
    literal = _resolve_literal(text)
    option = _OPTION_WITH_VALUE.match(text)
    return option[0] if literal is None and option is not None else literal


def _resolve_literal(text: str) -> str | None:
    """Return a text in which each `$${` is replaced by `${`, or None if it has placeholders."""
    return None if has_placeholders(text) else substitute(text, lambda name: name)


def _find_directory(cwd: str, root: Path) -> Path | None:
    """Return the working directory of a component.

    Args:
        cwd: Value of the spec key `cwd`.
        root: Root of the project.

    Returns:
        The directory, or None if it does not exist or `cwd` contains placeholders.
    """
    literal = _resolve_literal(cwd)
    if literal is None or not (root / literal).is_dir():
        return None
    return root / literal


def _find_directory_faults(path: str, cwd: str | None, root: Path) -> Iterator[Fault]:
    """Yield a fault if the directory in a spec key `cwd` does not exist.

    Args:
        path: Dotted path of the key in the spec.
        cwd: Value of the key, or None if the user omitted it.
        root: Root of the project.
    """
    literal = None if cwd is None else _resolve_literal(cwd)
    if literal is None:
        return
    directory = root / literal
    if directory.is_dir():
        return
    problem = (
        "must be a directory, found a file" if directory.exists() else "there is no such directory"
    )
    remedy = _suggest_name(directory) or f"a relative path starts at the project's root, {root}"
    yield Fault(path=path, problem=f"{problem}: {cwd}", remedy=remedy)


def _find_program_faults(place: str, program: str | None, path: str) -> Iterator[Fault]:
    """Yield a fault if a program does not exist. The working directory need not be known.

    Call this function if the working directory of a component does not exist or is unknown. A
    program such as `./train.sh`, whose location depends on the working directory, is not checked.

    Args:
        place: Dotted path of the command in the spec.
        program: The program, or None if its name contains placeholders.
        path: PATH of the command.
    """
    if not program:
        return
    entries = path.split(os.pathsep)
    is_relative_path = "/" in program and not os.path.isabs(program)
    depends_on_path = "/" not in program
    if is_relative_path or (depends_on_path and not all(map(os.path.isabs, entries))):
        return
    yield from _find_command_faults(place, [program], Path("/"), path)


def _find_command_faults(
    place: str, command: Sequence[str | None], cwd: Path, path: str
) -> Iterator[Fault]:
    """Yield a fault for each missing program, script or config file of a command.

    Args:
        place: Dotted path of the command in the spec.
        command: The program and its arguments. An argument with placeholders is None.
        cwd: Directory in which the command will run.
        path: PATH of the command.
    """
    program = command[0]
    if not program:
        return

    # A relative folder in PATH starts at the working directory of the component.
    search_dirs = [cwd / entry for entry in path.split(os.pathsep)]
    if not _is_program(program, cwd, search_dirs):
        if "/" in program:
            suggestion = _suggest_name(cwd / program)
        else:
            names = (name for directory in search_dirs for name in _list_names(directory))
            suggestion = suggest_name(program, names)
        yield Fault(
            path=f"{place}.0",
            problem=f"the program {program!r} does not exist or is not executable",
            remedy=suggestion or _advise_about_program(program, cwd),
        )

    target = _find_target(command)
    if target is None:
        return
    written = command[target.index] or ""
    item = f"{place}.{target.index}"
    if target.is_module:
        yield from _find_module_faults(item, written, cwd)
        return

    # A shell also looks for the script in PATH. Python does not.
    is_on_path = not target.is_python and _is_program(written, cwd, search_dirs)
    if not (cwd / written).exists() and not is_on_path:
        yield _make_missing_fault(item, "script", written, cwd)
    # Check config files only for Python scripts. A shell script may change its working directory
    # before it uses its arguments.
    elif target.is_python:
        yield from _find_config_faults(place, command, cwd)


def _advise_about_program(program: str, cwd: Path) -> str:
    """Return advice about a program that does not exist or is not executable.

    Args:
        program: The name or path of the program, as the spec has it.
        cwd: Directory in which the command will run.
    """
    file = cwd / program
    if not file.is_file():
        if len(program.split()) > 1:
            return "write each argument as a separate list item"
        return "install the program"

    advice = []
    if "/" not in program:
        advice.append(f"write ./{program}")
    if not os.access(file, os.X_OK):
        advice.append(f"make the file executable with `chmod +x {shlex.quote(str(file))}`")
    return ", and ".join(advice)


def _is_program(program: str, cwd: Path, search_dirs: Sequence[Path]) -> bool:
    name_or_path = str(cwd / program) if "/" in program else program
    return shutil.which(name_or_path, path=os.pathsep.join(map(str, search_dirs))) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScriptArgument:
    """The script or the module that a command executes."""

    #: Index of the script or module in the command.
    index: int
    #: True for a Python script or module, and False for a shell script.
    is_python: bool
    #: True for the name of a Python module after `-m`.
    is_module: bool = False


def _find_target(command: Sequence[str | None]) -> _ScriptArgument | None:
    """Return the script or module in a command of Python, a shell, torchrun or accelerate.

    Returns:
        The script or module. None if the command contains neither, or if it is uncertain which
        argument is the script.
    """
    name = PurePosixPath(command[0] or "").name
    is_python = _PYTHON.fullmatch(name) is not None
    if not is_python and not _SHELL.fullmatch(name):
        return _find_launched_target([name, *command[1:]], 0)
    for index, word in enumerate(command[1:], start=1):
        if word is None:
            return None
        if not word.startswith(("-", "+")):
            return _ScriptArgument(index=index, is_python=is_python)
        if is_python and _MODULE_OPTION.fullmatch(word):
            return _find_launched_target(command, index + 1) or _make_module(command, index + 1)
        if not _FLAGS.fullmatch(word):
            return None
    return None


def _make_module(command: Sequence[str | None], index: int) -> _ScriptArgument | None:
    """Return the module whose name is an argument of a command.

    None if the command has no argument at this index, or if the argument contains placeholders.
    """
    is_known = index < len(command) and command[index] is not None
    return _ScriptArgument(index=index, is_python=True, is_module=True) if is_known else None


def _find_launched_target(command: Sequence[str | None], start: int) -> _ScriptArgument | None:
    """Return the script or module that torchrun or `accelerate launch` starts.

    Args:
        command: The command. An argument with placeholders is None.
        start: Index of the name of torchrun or accelerate in the command.

    Returns:
        The script or module. None if the command starts another program, or if it is uncertain
        which argument is the script.
    """
    launcher = next(
        (words for words in _LAUNCHERS if (*command[start : start + len(words)],) == words), None
    )
    if launcher is None:
        return None
    is_module = False
    index = start + len(launcher)
    while index < len(command):
        word = command[index]
        if word is None:
            return None
        if not word.startswith("-"):
            return _ScriptArgument(index=index, is_python=True, is_module=is_module)
        option, has_value, _ = word.partition("=")
        option = option.lstrip("-").replace("_", "-")
        if option in ("m", "module"):
            is_module = True
        elif _LAUNCHERS[launcher].fullmatch(option):
            # If the value of the option is the next argument, also skip that argument.
            index += 0 if has_value else 1
        elif not _LAUNCHER_FLAG.fullmatch(option):
            return None
        index += 1
    return None


def _find_module_faults(place: str, module: str, cwd: Path) -> Iterator[Fault]:
    """Yield a fault if a command names a module that does not exist in its package.

    Only packages in the working directory are checked, because Python searches this directory
    first. A folder without the file __init__.py is not checked: if a library elsewhere has the same
    name, Python uses the library.

    Args:
        place: Dotted path of the module in the spec.
        module: Full name of the module, such as `lib.train`.
        cwd: Working directory of the command.
    """
    if not _MODULE_NAME.fullmatch(module):
        return
    folder = cwd
    for name in module.split("."):
        names = {entry.split(".")[0] for entry in _list_names(folder)}
        if folder != cwd and name not in names:
            prefix = ".".join(folder.relative_to(cwd).parts)
            modules = (f"{prefix}.{other}" for other in names if other.isidentifier())
            missing = f"{prefix}.{name}"
            remedy = suggest_name(missing, modules) or f"Muster looked in the folder {folder}"
            yield Fault(path=place, problem=f"there is no such module: {missing}", remedy=remedy)
            return
        folder /= name
        if not _is_plain_package(folder):
            return


def _is_plain_package(folder: Path) -> bool:
    """Return True if Python finds all modules of a package in the folder of the package.

    False if there is no package, or if the package itself changes its search path `__path__`.
    """
    try:
        return b"__path__" not in (folder / "__init__.py").read_bytes()
    except OSError:
        return False


def _find_config_faults(place: str, command: Sequence[str | None], cwd: Path) -> Iterator[Fault]:
    """Yield a fault for each missing file after `--config` or `--env-file` in a command.

    Args:
        place: Dotted path of the command in the spec.
        command: The arguments of the command. An argument with placeholders is None.
        cwd: Directory in which the command will run.
    """
    for index, word in enumerate(command):
        option = _CONFIG_OPTION.fullmatch(word or "")
        if option is None:
            continue

        # The config file is in the same argument (--config=FILE) or in the next one (--config
        # FILE).
        if option[2] is not None:
            value_index = index
            value = option[2]
        else:
            value_index = index + 1
            value = "".join(filter(None, command[value_index : value_index + 1]))

        # Use `exists` instead of `is_file`, because `--config /dev/stdin` is valid, too.
        if value and _CONFIG_FILE.fullmatch(value) and not (cwd / value).exists():
            yield _make_missing_fault(f"{place}.{value_index}", "config file", value, cwd)


def _make_missing_fault(place: str, noun: str, written: str, cwd: Path) -> Fault:
    """Return the fault for an argument with the name of a missing file.

    Args:
        place: Dotted path of the argument in the spec.
        noun: Kind of the file for the message, such as `script`.
        written: The file name as the user wrote it.
        cwd: Directory in which a relative file name starts.
    """
    remedy = _suggest_name(cwd / written) or f"Muster looked in the folder {(cwd / written).parent}"
    return Fault(path=place, problem=f"there is no such {noun}: {written}", remedy=remedy)


def _suggest_name(file: Path) -> str:
    """Return advice with a similar file name in the same directory, or an empty string.

    Args:
        file: Path of the missing file.
    """
    names = set(_list_names(file.parent)) - {file.name}
    return suggest_name(file.name, names)


def _list_names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
