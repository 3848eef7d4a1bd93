"""Arguments, exit codes and error messages that all subcommands of `muster` share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter, UnusedCliTokensError
from rich.panel import Panel

from tasks.record.places import keep_private
from tasks.show.output import console_of, guard_output
from tasks.spec.errors import InvalidSpec, MusterError
from tasks.spec.formatting import suggest_name
from tasks.spec.own_settings import require_valid_settings
from tasks.spec.standard_input import STANDARD_INPUT, STANDARD_INPUT_NAMES

EXIT_DONE = 0
EXIT_FAILED = 1
#: Exit code if the arguments or the run spec are invalid.
EXIT_INVALID = 2
#: Exit code if the user pressed Ctrl-C.
EXIT_INTERRUPTED = 130

SpecFile = Annotated[
    Path,
    Parameter(name="SPEC", help="Path of the run spec, a YAML file, or `-` for standard input."),
]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        show_default=False,
        help="Replace a value of the spec, for example `--set progress.total=20`. In a "
        "pipeline, begin the key with the name of the stage: `--set "
        "grpo.progress.total=20`. You may repeat the option.",
    ),
]
FromRun = Annotated[
    str | None,
    Parameter(
        name="--from",
        show_default=False,
        help="Start the run from a checkpoint of another run: `RUN` for the newest complete "
        "checkpoint of that run, or `RUN@STEP` for the checkpoint of a step. Muster neither moves "
        "nor removes this checkpoint, even if the spec sets `keep`.",
    ),
]
PipelineFile = Annotated[
    Path | None,
    Parameter(
        name="PIPELINE",
        help="Path of the pipeline spec, a YAML file. With --resume, it may be omitted: Muster "
        "then uses the spec of the resumed flow run.",
    ),
]
RunName = Annotated[
    str,
    Parameter(
        name="RUN",
        help="Id of the run, or the name in its spec. A part of the id or name is enough if "
        "only one run has it. `latest` is the newest run.",
    ),
]
AsJson = Annotated[
    bool, Parameter(name="--json", help="Print JSON. Times in the JSON are UTC epoch seconds.")
]
Pool = Annotated[str, Parameter(name="--pool", help="Name of the Prefect work pool.")]
#: Settings of all command-line parameters. `negative` prevents that cyclopts adds an option
#: `--no-x` for each option `--x`. `show_default` hides `[default: ""]` in the help text.
DEFAULT = Parameter(negative=(), show_default=lambda value: value if value != "" else None)


def run_alone(verb: Callable[..., int], name: str) -> int:
    """Run a function as the only command of a program, and return the exit code of the program.

    Args:
        verb: Function that does the work and returns an exit code.
        name: Name of the program, which the help text shows.
    """
    return run(App(name=name, default_command=verb, default_parameter=DEFAULT))


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand of `muster` that the command-line arguments name.

    If the subcommand raises a Muster error, only the message of the error is printed, without a
    traceback. Control characters in the output are removed; see `tasks/show/output.py`.

    Args:
        app: The command `muster` with its subcommands.
        arguments: The command-line arguments. None means the arguments of this process.

    Returns:
        The exit code of the subcommand, or of the error that it raised. 2 after wrong arguments,
        130 after Ctrl-C.
    """
    with guard_output():
        return _run_guarded(app, arguments)


def _run_guarded(app: App, arguments: Sequence[str] | None) -> int:
    """Run a subcommand and return its exit code, with errors turned into messages and exit codes.

    Before this call, `run` has replaced standard output and standard error with streams that remove
    control characters.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        require_valid_settings(lambda warning: print(warning, file=sys.stderr))
        keep_private()
        code = app(
            # Several words stand for standard input. Pass the same path for all of them, so that
            # the commands recognise standard input. Also, cyclopts would report the word `-` as an
            # unknown option.
            [str(STANDARD_INPUT) if word in STANDARD_INPUT_NAMES else word for word in words],
            result_action="return_value",
            error_formatter=_format_usage_error,
            console=console_of(sys.stdout),
            error_console=console_of(sys.stderr),
        )
        # Write the buffered output now, so that an error such as a closed pipe is handled below.
        # Otherwise the interpreter would write the output at its exit, where no code can handle the
        # error.
        sys.stdout.flush()
    except SystemExit as error:
        if error.code == EXIT_INTERRUPTED:
            print("Interrupted.", file=sys.stderr)
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    except BrokenPipeError:
        # The program that reads standard output has ended early, as in `muster ls | head`. This is
        # not an error. Replace the file descriptor, because the interpreter still writes to it at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except (MusterError, OSError) as error:
        # Examples of an OSError are a full disk and a missing permission.
        return print_error(error)
    return code if isinstance(code, int) else EXIT_DONE


def print_error(error: MusterError | OSError) -> int:
    """Print the message of an error on stderr, and return the exit code for the error."""
    print(error, file=sys.stderr)
    exit_code = error.exit_code if isinstance(error, MusterError) else EXIT_FAILED
    if exit_code == EXIT_INVALID:
        missing_action = "started" if isinstance(error, InvalidSpec) else "done"
        print(f"Nothing was {missing_action}.", file=sys.stderr)
    return exit_code


def _format_usage_error(error: CycloptsError) -> Panel:
    """Return the message about wrong command-line arguments as a framed panel.

    For invalid values and unknown subcommands, the message is more precise than that of cyclopts.
    """
    # Import pydantic only here, because the import is slow. `muster logs` must print the first line
    # soon.
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError):
        lines = []
        for fault in error.__cause__.errors():
            option = str(fault["loc"][0]).replace("_", "-")
            lines.append(f"--{option}: {fault['msg']}")
        return CycloptsPanel("\n".join(lines))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens and error.app is not None:
        # A command such as `muster queue` also works without a subcommand. So cyclopts takes a
        # mistyped subcommand for an argument of this command, and reports an unused argument.
        word = error.unused_tokens[0]
        verbs = [name for name in error.app if not name.startswith("-")]
        if verbs:
            suggestion = suggest_name(word, verbs) or f"choose from {', '.join(verbs)}"
            return CycloptsPanel(f"{error.app.name[0]} has no command {word!r}: {suggestion}")
    return CycloptsPanel(error)
