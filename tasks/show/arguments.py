"""What the verbs of the command `muster` have in common: their arguments, and how they end."""

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

EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 130

SpecFile = Annotated[Path, Parameter(name="SPEC", help="The run spec, a YAML file.")]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        show_default=False,
        help="Change a value of the spec, for example `--set progress.total=20`, or of a stage's, "
        "`--set grpo.progress.total=20`; repeatable.",
    ),
]
PipelineFile = Annotated[
    Path | None,
    Parameter(
        name="PIPELINE",
        help="The pipeline spec; left out with --resume: the one that the flow run has.",
    ),
]
RunName = Annotated[
    str, Parameter(name="RUN", help="Its id, a unique beginning of that, or `latest`.")
]
AsJson = Annotated[
    bool, Parameter(name="--json", help="For programs; times are UTC epoch seconds.")
]
Pool = Annotated[str, Parameter(name="--pool", help="The work pool.")]
#: A flag has no `--no-` of it.
DEFAULT = Parameter(negative=())


def run_alone(verb: Callable[..., int], name: str) -> int:
    """A verb as a program of its own, which is called by that name."""
    return run(App(name=name, default_command=verb, default_parameter=DEFAULT))


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run the verb that the arguments name. Of an error, only its message is printed.

    What the verb prints can't command the terminal: see `tasks/show/output.py`.

    Returns: the exit code of the verb or of its error, 2 for wrong arguments, 130 if interrupted.
    """
    with guard_output():
        return _run(app, arguments)


def _run(app: App, arguments: Sequence[str] | None) -> int:
    """Run the verb while the output is guarded. Returns the exit code."""
    try:
        keep_private()
        code = app(
            arguments,
            result_action="return_value",
            error_formatter=_told,
            console=console_of(sys.stdout),
            error_console=console_of(sys.stderr),
        )
        # Within reach of the handler below, not at the interpreter's end.
        sys.stdout.flush()
    except SystemExit as error:
        if error.code == EXIT_INTERRUPTED:
            print("Interrupted.", file=sys.stderr)
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    except BrokenPipeError:
        # `muster ls | head`: that nobody reads on is no fault.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except (MusterError, OSError) as error:
        # A disk that is full, a file of somebody else.
        print(error, file=sys.stderr)
        exit_code = error.exit_code if isinstance(error, MusterError) else EXIT_FAILED
        if exit_code == EXIT_INVALID:
            started = isinstance(error, InvalidSpec)
            print(f"Nothing was {'started' if started else 'done'}.", file=sys.stderr)
        return exit_code
    return code if isinstance(code, int) else EXIT_DONE


def _told(error: CycloptsError) -> Panel:
    """What is wrong with the arguments; where cyclopts' own words say too little, ours."""
    if isinstance(error.__cause__, ValidationError):
        faults = [(str(fault["loc"][0]), fault["msg"]) for fault in error.__cause__.errors()]
        return CycloptsPanel("\n".join(f"--{x.replace('_', '-')}: {why}" for x, why in faults))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens and error.app is not None:
        # A group of verbs that does something by itself too.
        word, verbs = error.unused_tokens[0], [one for one in error.app if not one.startswith("-")]
        if verbs:
            meant = suggest_name(word, verbs) or f"they are {', '.join(verbs)}"
            return CycloptsPanel(f"{error.app.name[0]} has no verb {word!r}: {meant}")
    return CycloptsPanel(error)
