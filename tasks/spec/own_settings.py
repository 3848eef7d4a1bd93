"""Muster's environment variables: their names, meanings, parsers and defaults.

`SETTINGS` are the variables that a person sets. `COMPONENT_VARIABLES` are the variables that Muster
sets for the programs of a run. `INTERNAL_VARIABLES` are the variables that Muster's processes set
for each other.

A value that Muster does not understand is an error, because a setting may be a safety limit.
A variable `MUSTER_*` that Muster does not know causes a warning, because it may be a misspelled
setting.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tasks.spec.errors import MusterError
from tasks.spec.formatting import suggest_name

_ValueT = TypeVar("_ValueT", covariant=True)

#: Prefix of the names of Muster's environment variables.
_PREFIX = "MUSTER_"
#: Prefixes of the names of variables that only Muster's tests use.
_TEST_PREFIXES = ("MUSTER_TEST_", "MUSTER_BENCH_")
#: Names of further variables that only Muster's tests use.
_TEST_VARIABLES = (
    "MUSTER_DATABASE",
    "MUSTER_FAULTS_TABLE",
    "MUSTER_KILLS",
    "MUSTER_MUTANTS_FAILED",
    "MUSTER_REQUIRE_ATTACKS",
    "MUSTER_SEED",
)
#: Matches the variables that Kubernetes sets in each pod for a service `muster` or `muster-NAME`.
#: They are no settings of Muster, so no warning is printed about them. Source:
#: kubernetes/pkg/kubelet/envvars/envvars.go.
_SERVICE_VARIABLE = re.compile(
    r"MUSTER_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)"
    r"(?:_(?:PROTO|PORT|ADDR))?)"
)
#: Matches the value of the variable NAME_PORT that Kubernetes sets for a service.
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://\S+:\d+")
#: Levels of containment, from the weakest to the strongest. A level is a method with which Muster
#: ends all processes of a run. See `tasks.processes.containment.Level`.
_LEVELS = ("L1", "L2", "L3", "L4")
#: Example of a list of devices.
_DEVICE_EXAMPLE = "MUSTER_GPUS=0,1,4-7"
#: Words for true and false in the value of a setting.
_TRUE_WORDS = ("true", "yes", "on", "1", "t", "y")
_FALSE_WORDS = ("false", "no", "off", "0", "f", "n")


class InvalidVariable(MusterError):
    """An environment variable has an invalid value. Nothing was started.

    Args:
        problems: One text for each wrong variable, with its name, its value and the right form.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Generic[_ValueT]):
    """A setting of Muster: an environment variable that a user or an operator can set."""

    name: str
    #: Meaning of the variable, as Markdown for the document `settings.md`.
    meaning: str
    #: Description of the default, as Markdown for the document `settings.md`.
    default_text: str
    #: Value if the variable is unset or empty.
    default: _ValueT
    #: Function that converts the text of the variable to the value of the setting. For an invalid
    #: text, the function raises ValueError with a description of a valid text.
    parse: Callable[[str], _ValueT]

    def read(self, environment: Mapping[str, str] | None = None) -> _ValueT:
        """Return the value of the setting.

        Args:
            environment: The environment variables. None for the environment variables of this
                process.

        Raises:
            InvalidVariable: The value is not valid.
        """
        text = (os.environ if environment is None else environment).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise InvalidVariable(f"{self.name}={text} is not valid: {error}") from None


def parse_device_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a list of devices such as `0,1,4-7`.

    Raises:
        ValueError: The list is malformed.
    """
    indices: list[int] = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"{part!r} is neither the number of a device nor a range. Write {_DEVICE_EXAMPLE}"
            )
        indices += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(indices))


def _parse_level(text: str) -> str:
    if text not in _LEVELS:
        raise ValueError(f"choose from {', '.join(_LEVELS)}")
    return text


def _parse_umask(text: str) -> int:
    if not re.fullmatch(r"0*[0-7]{1,3}", text):
        raise ValueError("write an octal number: 077, 027 or 022")
    return int(text, 8)


def _parse_positive(text: str) -> float:
    value = _parse_number(text)
    if not 0 < value < math.inf:
        raise ValueError("write a number above 0")
    return value


def _parse_days(text: str) -> float:
    value = _parse_number(text)
    if value < 0:
        raise ValueError("write a number of days such as 60, or inf for never")
    return value


def _parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("write a number") from None
    if math.isnan(value):
        raise ValueError("write a number")
    return value


def _parse_truth(text: str) -> bool:
    if text.lower() not in (*_TRUE_WORDS, *_FALSE_WORDS):
        raise ValueError("write true or false")
    return text.lower() in _TRUE_WORDS


def _parse_host(text: str) -> str:
    if re.search(r"[\s/\0]", text):
        raise ValueError("write a host name without spaces and slashes")
    return text


def _parse_words(text: str) -> tuple[str, ...]:
    words = tuple(filter(None, (word.strip() for word in text.split(","))))
    if any(re.search(r"[\s:/]", word) for word in words):
        raise ValueError("write user names or user ids, separated by commas")
    return words


def _parse_clusters(text: str) -> tuple[Mapping[str, object], ...]:
    try:
        entries = json.loads(text)
    except ValueError:
        raise ValueError("write a JSON list of clusters") from None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("address"), str) for entry in entries
    ):
        raise ValueError('write a JSON list such as [{"address": "http://127.0.0.1:8265"}]')
    return tuple(entries)


HOME = Setting(
    name="MUSTER_HOME",
    meaning="folder of the records, logs and state of all runs of this user",
    default_text="`~/.muster`",
    default="~/.muster",
    parse=str,
)
UMASK = Setting(
    name="MUSTER_UMASK",
    meaning="users who may read your records and logs: `077` only you, `027` also your group, "
    "`022` all users. Muster refuses values that let other users write",
    default_text="`077`",
    default=0o077,
    parse=_parse_umask,
)
HOME_OWNER = Setting(
    name="MUSTER_HOME_OWNER",
    meaning="owner of the folder `MUSTER_HOME`, if the folder belongs to another user, such as the "
    "user `muster` on a shared server",
    default_text="none",
    default="",
    parse=str,
)
GPUS: Setting[tuple[int, ...] | None] = Setting(
    name="MUSTER_GPUS",
    meaning="the GPUs of this machine that Muster may use, such as `0,1,4-7`",
    default_text="all healthy GPUs that NVML shows",
    default=None,
    parse=parse_device_numbers,
)
HOST = Setting(
    name="MUSTER_HOST",
    meaning="name of this machine in records and in the queue; must be set in a container",
    default_text="the host name",
    default="",
    parse=_parse_host,
)
SERVER_USERS: Setting[tuple[str, ...]] = Setting(
    name="MUSTER_SERVER_USERS",
    meaning="users whose Prefect server on this machine is trusted, separated by commas",
    default_text="you and root",
    default=(),
    parse=_parse_words,
)
MAX_CONTAINMENT = Setting(
    name="MUSTER_MAX_CONTAINMENT",
    meaning="the highest [level of containment](supervision.md#levels-of-containment) that Muster "
    "may use: `L1`, `L2`, `L3` or `L4`; a higher level confines the processes of a run more "
    "strictly",
    default_text="`L4`",
    default="L4",
    parse=_parse_level,
)
CODE_MIB = Setting(
    name="MUSTER_CODE_MIB",
    meaning="the largest size, in MiB, of the copy of a project's code that Muster keeps for a run",
    default_text="`50`",
    default=50.0,
    parse=_parse_positive,
)
IMAGE = Setting(
    name="MUSTER_IMAGE",
    meaning="name of the container image, which Muster records in `provenance` of `run.json`",
    default_text="none",
    default="",
    parse=str,
)
PRUNE_DAYS = Setting(
    name="MUSTER_PRUNE_DAYS",
    meaning="number of days after the end of a run until `muster prune` may delete the files of "
    "the run; `inf` for never",
    default_text="`60`",
    default=60.0,
    parse=_parse_days,
)
PRUNE_OUTPUTS = Setting(
    name="MUSTER_PRUNE_OUTPUTS",
    meaning="`true` if `muster prune` may also delete the output of a run's programs",
    default_text="`false`",
    default=False,
    parse=_parse_truth,
)
RAY_CLUSTERS: Setting[tuple[Mapping[str, object], ...]] = Setting(
    name="MUSTER_RAY_CLUSTERS",
    meaning="JSON list of Ray clusters, for commands that do not ask a Prefect server",
    default_text="none",
    default=(),
    parse=_parse_clusters,
)

#: All settings of Muster, in the order of the document `settings.md`.
SETTINGS: tuple[Setting[object], ...] = (
    HOME,
    UMASK,
    HOME_OWNER,
    GPUS,
    HOST,
    SERVER_USERS,
    MAX_CONTAINMENT,
    CODE_MIB,
    IMAGE,
    PRUNE_DAYS,
    PRUNE_OUTPUTS,
    RAY_CLUSTERS,
)

#: Environment variables that Muster sets for the programs of a run, each with its meaning as
#: Markdown.
COMPONENT_VARIABLES: Mapping[str, str] = {
    "MUSTER_RUN_ID": "the run's id",
    "MUSTER_ATTEMPT": "number of the attempt, from 1",
    "MUSTER_COMPONENT": "name of the component",
    "MUSTER_DEADLINE": (
        "time at which the attempt reaches its time limit, in seconds since 1970 (Unix time). The "
        "variable exists only if the spec has the key `gang.max_hours`"
    ),
    "MUSTER_PROJECT": "folder of the original project, if the run uses a copy of the project's "
    "code",
    "MUSTER_NODES": "names of the nodes that the queue granted to the run",
    "MUSTER_DEVICES": "GPUs of this machine that the queue granted to the run",
    "MUSTER_ROLLOUT_TOKEN": "the token of the run's [fleet](rollout.md) of inference servers, if "
    "the fleet requires a token",
    "MUSTER_RESULT": "file to which a [step of a pipeline](pipelines.md) may write a JSON result",
}

#: Environment variables that Muster's processes set for each other, each with its meaning.
INTERNAL_VARIABLES: Mapping[str, str] = {
    "MUSTER_ROLE": (
        "type of a Muster process, such as `guardian`, the parent process of a component"
    ),
    "MUSTER_ROLLOUT_PLAN": (
        "JSON description of the inference servers of a run, for the process that starts these "
        "servers"
    ),
    "MUSTER_ROOM": (
        "filler text in the environment of a process that Muster starts in advance; the "
        "environment variables of a run later replace this text"
    ),
    "MUSTER_STACK": "id of the stack, started by `muster up`, to which a process belongs",
    "MUSTER_STACK_RAY": (
        "URL of the Ray dashboard that `muster up` started, for `python -m deployments.stack.setup`"
    ),
    "MUSTER_CHECK_ID": (
        "id of the test that started a process; `python -m deployments.cluster_check` makes these "
        "tests on Ray nodes"
    ),
    "MUSTER_CALLERS_UMASK": "umask of the user's shell or service, for the programs of a run",
    "MUSTER_STEP_ARGS": "arguments of a step's function as JSON, for the process of the step",
}


def find_setting_problems(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return a text for each setting whose value is not valid.

    Args:
        environment: The environment variables. None for the environment variables of this process.
    """
    problems: list[str] = []
    for setting in SETTINGS:
        try:
            setting.read(environment)
        except InvalidVariable as error:
            problems += error.problems
    return tuple(problems)


def find_unknown_variables(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return a warning for each unknown variable `MUSTER_*`.

    Variables that Kubernetes sets for a service with the name `muster` are not reported.

    Args:
        environment: The environment variables. None for the environment variables of this process.
    """
    variables = os.environ if environment is None else environment
    names = [setting.name for setting in SETTINGS]
    known = {*names, *COMPONENT_VARIABLES, *INTERNAL_VARIABLES, *_TEST_VARIABLES}
    warnings: list[str] = []
    for name in sorted(variables):
        is_own = name.startswith(_PREFIX) and not name.startswith(_TEST_PREFIXES)
        if not is_own or name in known or _is_of_kubernetes(name, variables[name]):
            continue
        suggestion = suggest_name(name, names)
        advice = f"{suggestion} " if suggestion else ""
        warnings.append(
            f"The environment variable {name} is no setting of Muster and has no effect: "
            f"{advice}docs/settings.md lists the settings of Muster."
        )
    return tuple(warnings)


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Return True if Kubernetes has set a variable with this name and value for a service."""
    if _SERVICE_VARIABLE.fullmatch(name):
        return True
    return name.endswith("_PORT") and _SERVICE_URL.fullmatch(value) is not None


def require_valid_settings(warn: Callable[[str], None]) -> None:
    """Check all variables `MUSTER_*` of this process.

    Args:
        warn: Function that is called with a text about each unknown variable.

    Raises:
        InvalidVariable: The value of a setting is not valid.
    """
    for warning in find_unknown_variables():
        warn(warning)
    if problems := find_setting_problems():
        raise InvalidVariable(*problems)
