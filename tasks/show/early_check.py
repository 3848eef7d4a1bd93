"""Report the faults of a spec before the slow import of Prefect.

A command that runs or queues a spec imports Prefect, which takes about two seconds. This module
finds the spec in the arguments of the command, and loads the spec first. A user then sees the
faults of the spec at once.

The command itself loads the spec again, and its check counts. So this module may skip every
argument whose meaning is uncertain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.show.arguments import EXIT_DONE, print_error
from tasks.show.output import guard_output
from tasks.spec.errors import MusterError
from tasks.spec.standard_input import STANDARD_INPUT_NAMES

#: Option that changes a value of the spec.
_SET_OPTION = "--set"
#: Options that print a help text instead of running the command.
_HELP_OPTIONS = ("-h", "--help")

#: Function that loads a spec from its path and the values of `--set`, or raises `InvalidSpec`.
Load = Callable[[Path, Sequence[str]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecArguments:
    """The path of a spec and the changes to the spec, from the arguments of a command."""

    #: Path of the spec.
    path: Path
    #: Values of the options `--set`, in their order.
    overrides: tuple[str, ...]


def find_spec_arguments(words: Sequence[str]) -> SpecArguments | None:
    """Return the path of the spec, and the changes to it, from the arguments of a command.

    Args:
        words: Arguments of the command, without the name of the command.

    Returns:
        The path of the spec and the changes. None if `words` contain a help option, or if
        it is unclear which word is the path.
    """
    if any(word in _HELP_OPTIONS for word in words):
        return None
    overrides: list[str] = []
    paths: list[str] = []
    # Words that directly follow an option. Each is either the value of the option or the path of
    # the spec. This function does not know which options have a value.
    uncertain_words: list[str] = []
    previous = ""
    for word in words:
        if previous == _SET_OPTION:
            overrides.append(word)
            # This word follows `--set`, so it is the value of `--set`. The next word is a new
            # argument.
            previous = ""
            continue
        if word.startswith(f"{_SET_OPTION}="):
            overrides.append(word.removeprefix(f"{_SET_OPTION}="))
        elif not word.startswith("-"):
            is_after_option = previous.startswith("-") and "=" not in previous
            (uncertain_words if is_after_option else paths).append(word)
        previous = word
    candidates = paths or [word for word in uncertain_words if Path(word).is_file()]
    if len(candidates) != 1:
        return None
    path = Path(candidates[0])
    # Do not check a spec from standard input or from a pipe here. Both can be read only once, and
    # the command itself reads the spec later. Standard input can be a regular file, as in
    # `muster submit /dev/stdin < FILE`.
    is_readable_once = candidates[0] in STANDARD_INPUT_NAMES or not path.is_file()
    if path.exists() and is_readable_once:
        return None
    return SpecArguments(path=path, overrides=tuple(overrides))


def report_spec_faults(load: Load, words: Sequence[str]) -> int:
    """Load the spec in the arguments of a command, and print the faults of the spec.

    Args:
        load: Function that loads the spec.
        words: Arguments of the command, without the name of the command.

    Returns:
        EXIT_DONE if no fault was detected, otherwise the exit code for the fault.
    """
    arguments = find_spec_arguments(words)
    if arguments is None:
        return EXIT_DONE
    with guard_output():
        try:
            load(arguments.path, arguments.overrides)
        except (MusterError, OSError) as error:
            return print_error(error)
    return EXIT_DONE
