"""Steps of a pipeline: the run spec that executes a step, and the check of its Python function.

A step is a stage with the key `call` or `command`. Muster executes a step as a run with a single
component, so the queue, the guardians, the logs, the cancellation and the recovery of runs apply to
steps, too.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.spec.errors import Fault
from tasks.spec.failure_kinds import REQUEUED, FailureKind
from tasks.spec.formatting import suggest_name
from tasks.spec.placeholders import mapping_or_empty

#: Name of the only component of a step's run.
STEP = "step"
#: Environment variable with the path of the file for the JSON result of a step.
RESULT_VARIABLE = "MUSTER_RESULT"
#: Environment variable with the arguments of a `call` step, as JSON.
ARGS_VARIABLE = "MUSTER_STEP_ARGS"
#: Name of the file with a step's result, in the directory of the attempt.
RESULT_FILE = "result.json"
#: Seconds before the first retry of a step.
_RETRY_DELAY_S = 5
#: Program of a `call` step, which calls a function of the project. The project's Python interpreter
#: executes the program. Muster's packages may be missing there, so the program uses only the
#: standard library. If the function is a Prefect task or flow, the plain function in its attribute
#: `fn` is called.
_CALL_PROGRAM = f"""\
import asyncio, importlib, inspect, json, os, sys
module, _, name = sys.argv[1].partition(":")
function = getattr(importlib.import_module(module), name)
function = getattr(function, "fn", function)
result = function(**json.loads(os.environ.pop("{ARGS_VARIABLE}")))
if inspect.iscoroutine(result):
    result = asyncio.run(result)
try:
    text = json.dumps(result, allow_nan=False)
except (TypeError, ValueError) as error:
    sys.exit(f"{{sys.argv[1]}} must return JSON data, but returned {{type(result)}}: {{error}}")
path = os.environ["{RESULT_VARIABLE}"]
with open(path + ".new", "w") as file:
    file.write(text)
os.replace(path + ".new", path)
"""


def is_step(stage: Mapping[str, Any]) -> bool:
    """Return True if a stage is a step (a function or a command) instead of a training run.

    Args:
        stage: The stage as plain data.
    """
    return stage.get("call") is not None or stage.get("command") is not None


def build_run_spec(stage: Mapping[str, Any], *, ray_address: str | None = None) -> dict[str, Any]:
    """Return the run spec that executes a step, as plain data.

    Args:
        stage: The step as plain data. Faults in parts that are not validated yet are found later,
            when the run spec is validated.
        ray_address: Address of the Ray dashboard for steps on Ray. None to use the only Ray cluster
            of the work pool.
    """
    resources = mapping_or_empty(stage.get("resources"))
    gpus = resources.get("gpus") or 0
    is_on_ray = stage.get("on", "ray") == "ray"
    env: dict[str, Any] = {RESULT_VARIABLE: f"${{attempt.dir}}/{RESULT_FILE}"}
    command = stage.get("command")
    if stage.get("call") is not None:
        command = ["python", "-c", _CALL_PROGRAM, stage["call"]]
        env[ARGS_VARIABLE] = json.dumps(stage.get("args") or {})
    spec: dict[str, Any] = {
        "name": str(stage.get("name")).replace("_", "-"),
        "workload": "step",
        "components": {
            STEP: {
                "launcher": "ray_job" if is_on_ray else "process",
                "command": command,
                "env": env,
                "on_exit_zero": "complete",
            }
        },
    }
    if stage.get("env"):
        spec["env"] = stage["env"]
    if stage.get("code") is not None:
        spec["code"] = stage["code"]
    if stage.get("timeout_s") is not None:
        spec["timeout_s"] = stage["timeout_s"]
    if stage.get("retries"):
        spec["retry"] = {
            str(kind): {"attempts": stage["retries"] + 1, "delay_s": _RETRY_DELAY_S}
            for kind in FailureKind
            if kind not in REQUEUED and kind.properties.can_be_retried
        }
    if gpus:
        spec["gang"] = {"gpus_per_node": gpus}
        spec["gang"]["cpus_per_gpu"] = math.ceil((resources.get("cpus") or 1) / gpus)
    if is_on_ray:
        spec["ray"] = _build_ray(resources, ray_address)
    return spec


def _build_ray(resources: Mapping[str, Any], address: str | None) -> dict[str, Any]:
    """Return the value of the key `ray` in the run spec of a step on Ray.

    Args:
        resources: Resources that the step needs on its node.
        address: Address of the Ray dashboard. None to use the only Ray cluster of the work pool.
    """
    ray: dict[str, Any] = {"entrypoint_cpus": resources.get("cpus") or 1}
    if address is not None:
        ray["address"] = address
    if resources.get("gpus"):
        ray["entrypoint_gpus"] = resources["gpus"]
    if resources.get("memory_gib"):
        ray["entrypoint_memory_gib"] = resources["memory_gib"]
    if resources.get("labels"):
        ray["entrypoint_label_selector"] = resources["labels"]
    return ray


def rename_path(path: str) -> str:
    """Translate a path in the run spec of a pipeline step to the key that the user wrote.

    Muster creates the run spec of a step from the keys of the step, and messages must name these
    keys. Example: `ray.entrypoint_cpus` becomes `resources.cpus`. Other paths are returned
    unchanged.
    """
    component = f"components.{STEP}."
    for start, replacement in (
        (f"{component}env.{ARGS_VARIABLE}", "args"),
        (f"{component}command", "command"),
        ("ray.entrypoint_label_selector", "resources.labels"),
        ("ray.entrypoint_", "resources."),
        ("gang.gpus_per_node", "resources.gpus"),
        ("gang.cpus_per_gpu", "resources.cpus"),
    ):
        if path.startswith(start):
            return replacement + path.removeprefix(start)
    return path


def find_call_faults(stage: Mapping[str, Any], path: str, root: Path) -> Iterator[Fault]:
    """Yield a fault if the Python function of a `call` step is missing or rejects its arguments.

    The file of the function is parsed, and not imported.

    Args:
        stage: The step as plain data.
        path: Dotted path of the stage in the pipeline spec.
        root: Root directory of the project that contains the pipeline's file.
    """
    call = stage.get("call")
    if not isinstance(call, str) or call.count(":") != 1:
        # The value has the wrong form. This fault is reported when the stage is validated.
        return
    module, _, name = call.partition(":")
    file = _find_module(module, root)
    if file is None:
        expected = f"{module.replace('.', '/')}.py"
        problem = f"the project has no module {module!r}"
        yield Fault(
            path=f"{path}.call", problem=problem, remedy=f"create the file {root / expected}"
        )
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        problem = f"{file} is not valid Python: {error}"
        yield Fault(path=f"{path}.call", problem=problem, remedy="correct the file")
        return
    except OSError as error:
        problem = f"{file} cannot be read: {error.strerror}"
        yield Fault(
            path=f"{path}.call", problem=problem, remedy="check the permissions of the file"
        )
        return

    names = _list_names(tree)
    if name not in names and "*" not in names:
        remedy = suggest_name(name, names) or f"known names: {', '.join(names) or 'none'}"
        problem = f"{file} has no function {name!r}"
        yield Fault(path=f"{path}.call", problem=problem, remedy=remedy)
    elif isinstance(function := names.get(name), ast.FunctionDef | ast.AsyncFunctionDef):
        matrix = mapping_or_empty(stage.get("matrix"))
        written = {**matrix, **mapping_or_empty(stage.get("args"))}
        yield from _find_argument_faults(function, written, path)


def _find_module(module: str, root: Path) -> Path | None:
    """Return the file of a module in the project, or None if there is no such module."""
    parts = module.split(".")
    for folder in (root, root / "src"):
        module_path = folder.joinpath(*parts)
        for file in (module_path / "__init__.py", module_path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _list_names(tree: ast.Module) -> dict[str, ast.AST]:
    """Return a mapping from names to the top-level statements of a module that define them.

    The name `*` stands for an import of all names of another module.
    """
    names: dict[str, ast.AST] = {}
    waiting: list[ast.stmt] = [*tree.body]
    while waiting:
        statement = waiting.pop(0)
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names[name] = statement
            case ast.ClassDef(name=name):
                names[name] = statement
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names |= {alias.asname or alias.name: statement for alias in imported}
            case ast.Assign(targets=targets):
                names |= {part.id: statement for part in targets if isinstance(part, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = statement
            case ast.If(body=body, orelse=orelse):
                waiting += [*body, *orelse]
            case ast.Try(body=body, handlers=handlers, orelse=orelse):
                waiting += [*body, *orelse]
                for handler in handlers:
                    waiting += handler.body
            case _:
                continue
    return names


def _find_argument_faults(
    function: ast.FunctionDef | ast.AsyncFunctionDef, args: Mapping[str, Any], path: str
) -> Iterator[Fault]:
    """Yield a fault for each argument that is missing or that a function does not accept.

    Args:
        function: The definition of the function.
        args: Mapping from names to the arguments of the step.
        path: Dotted path of the stage in the pipeline spec.
    """
    signature = function.args
    keywords = [argument.arg for argument in (*signature.args, *signature.kwonlyargs)]
    for name in args:
        if name not in keywords and signature.kwarg is None:
            remedy = (
                suggest_name(name, keywords) or f"known arguments: {', '.join(keywords) or 'none'}"
            )
            problem = f"{function.name} has no argument {name!r}"
            yield Fault(path=f"{path}.args.{name}", problem=problem, remedy=remedy)
    positional = [argument.arg for argument in (*signature.posonlyargs, *signature.args)]
    required = positional[: len(positional) - len(signature.defaults)]
    defaults = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    required += [argument.arg for argument, default in defaults if default is None]
    for name in required:
        if name not in args:
            yield Fault(
                path=f"{path}.args.{name}",
                problem=f"missing: {function.name} requires this argument",
                remedy=f"write `args: {{{name}: VALUE}}`",
            )
