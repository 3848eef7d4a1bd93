"""Shared parts of the `muster` verbs: common arguments, exit codes and error output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter, UnusedCliTokensError
from pydantic import ValidationError
from rich.panel import Panel

from tasks.record.places import keep_private
from tasks.show.output import console_of, guard_output
from tasks.spec.errors import InvalidSpec, MusterError
from tasks.spec.formatting import suggest_name

EXIT_DONE = 0
EXIT_FAILED = 1
#: The arguments or the spec are invalid.
EXIT_INVALID = 2
#: The user pressed Ctrl-C.
EXIT_INTERRUPTED = 130

SpecFile = Annotated[Path, Parameter(name="SPEC", help="Path of the run spec, a YAML file.")]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        show_default=False,
        help="Replace a value of the spec, for example `--set progress.total=20`. In a pipeline, "
        "begin with the name of the stage: `--set grpo.progress.total=20`. May be repeated.",
    ),
]
PipelineFile = Annotated[
    Path | None,
    Parameter(
        name="PIPELINE",
        help="Path of the pipeline spec, a YAML file. May be omitted with --resume: then the spec "
        "of the resumed flow run is used.",
    ),
]
RunName = Annotated[
    str,
    Parameter(
        name="RUN", help="Run id, the first characters of a run id if they are unique, or `latest`."
    ),
]
AsJson = Annotated[
    bool, Parameter(name="--json", help="Print JSON. Times in it are UTC epoch seconds.")
]
Pool = Annotated[str, Parameter(name="--pool", help="Name of the Prefect work pool.")]
#: Defaults of all parameters: a flag `--x` gets no opposite flag `--no-x`.
DEFAULT = Parameter(negative=())


def run_alone(verb: Callable[..., int], name: str) -> int:
    """Run a verb as a separate program, whose help shows the given name. Returns the exit code."""
    return run(App(name=name, default_command=verb, default_parameter=DEFAULT))


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run the verb that the arguments name.

    If the verb raises a Muster error, only the error message is printed. Control characters in the
    output are removed: see `tasks/show/output.py`.

    Returns:
        The exit code of the verb or of its error; 2 for wrong arguments, 130 if interrupted.
    """
    with guard_output():
        return _run_guarded(app, arguments)


def _run_guarded(app: App, arguments: Sequence[str] | None) -> int:
    """Run the verb after `run` has guarded the output. Returns the exit code."""
    try:
        keep_private()
        code = app(
            arguments,
            result_action="return_value",
            error_formatter=_format_usage_error,
            console=console_of(sys.stdout),
            error_console=console_of(sys.stderr),
        )
        # Flush here: an error at the interpreter's exit would not reach the handlers below.
        sys.stdout.flush()
    except SystemExit as error:
        if error.code == EXIT_INTERRUPTED:
            print("Interrupted.", file=sys.stderr)
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    except BrokenPipeError:
        # The reader closed the pipe early, as in `muster ls | head`. This is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except (MusterError, OSError) as error:
        # OSError covers, for example, a full disk or a missing permission.
        print(error, file=sys.stderr)
        exit_code = error.exit_code if isinstance(error, MusterError) else EXIT_FAILED
        if exit_code == EXIT_INVALID:
            missing_action = "started" if isinstance(error, InvalidSpec) else "done"
            print(f"Nothing was {missing_action}.", file=sys.stderr)
        return exit_code
    return code if isinstance(code, int) else EXIT_DONE


def _format_usage_error(error: CycloptsError) -> Panel:
    """Return the message about wrong arguments, with more detail than cyclopts if possible."""
    if isinstance(error.__cause__, ValidationError):
        lines = []
        for fault in error.__cause__.errors():
            option = str(fault["loc"][0]).replace("_", "-")
            lines.append(f"--{option}: {fault['msg']}")
        return CycloptsPanel("\n".join(lines))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens and error.app is not None:
        # The app is a group of verbs with a default action, and the word is none of its verbs.
        word = error.unused_tokens[0]
        verbs = [name for name in error.app if not name.startswith("-")]
        if verbs:
            suggestion = suggest_name(word, verbs) or f"choose from {', '.join(verbs)}"
            return CycloptsPanel(f"{error.app.name[0]} has no verb {word!r}: {suggestion}")
    return CycloptsPanel(error)
