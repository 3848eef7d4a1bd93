"""Read the JSON results of steps, and keep large values in files of the pipeline's directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from tasks.record.disk import write_json
from tasks.record.metrics_of_run import read_rows
from tasks.record.places import RunPlace, muster_home
from tasks.record.result_file import InvalidResult, read_result_file
from tasks.record.run_json import RunJson
from tasks.spec.probes import get_number
from tasks.spec.secrets import mask_nested
from tasks.spec.step import RESULT_FILE
from tasks.spec.values import describe_value, get_value

#: Largest size of a value that is inserted into a run spec, in bytes of JSON. Larger values are
#: written to files, because programs get values of the run spec as arguments and environment
#: variables, whose size Linux limits.
MAX_INLINE_BYTES = 32 << 10
#: Stands for the value of a key that the JSON result of a step does not have.
_MISSING = object()


def locate_result(place: RunPlace) -> Path | None:
    """Return the path of a step's result in the directory of the last attempt.

    A step is a stage of a pipeline that runs a function or a command.

    Returns:
        The path, which may not exist. None if the run has no directory on this host.
    """
    attempts = sorted(place.directory.glob("attempt-*"), key=lambda path: int(path.name[8:]))
    return attempts[-1] / RESULT_FILE if attempts else None


def read_result(place: RunPlace, *, is_required: bool, mask: Callable[[str], str]) -> Any:
    """Return the result of a completed step as JSON data, with its secrets masked.

    A step is a stage of a pipeline that runs a function or a command. If the file of the result
    contains secrets, a file with masked secrets replaces it.

    Args:
        place: Directory of the step's run.
        is_required: True if a missing result is an error. False to return None for a missing
            result.
        mask: Function that returns a text with its secrets masked.

    Raises:
        InvalidResult: The result is missing, too large, not JSON, or cannot be read.
    """
    path = locate_result(place)
    if path is None:
        raise InvalidResult(
            f"the result of the step is not on this host: {place.directory} contains no folder "
            "attempt-NUMBER. Make sure that this host and the host that ran the step use the same "
            "folder MUSTER_HOME"
        )
    try:
        result = read_result_file(path)
    except FileNotFoundError:
        if not is_required:
            return None
        raise InvalidResult(
            f"the result file {path} of the step does not exist. Make sure that this host and the "
            "node of the step use the same folder MUSTER_HOME"
        ) from None
    masked = mask_nested(result, mask)
    if masked != result:
        try:
            write_json(path, masked)
        except OSError as error:
            raise InvalidResult(
                f"the result file {path} contains the value of a secret, which Muster cannot "
                f"remove from the file: {error}"
            ) from error
    return masked


def select_value(result: Any, key: str) -> Any:
    """Return the value at a dotted key of a result, or the whole result for an empty key.

    Raises:
        InvalidResult: The result has no such key.
    """
    value = get_value(result, key, _MISSING) if key else result
    if value is not _MISSING:
        return value
    if isinstance(result, Mapping):
        existing = f"its keys are: {', '.join(map(str, result)) or 'none'}"
    else:
        existing = f"it is {describe_value(result)}"
    raise InvalidResult(f"the result has no key {key!r}; {existing}")


def keep_large_value(flow_run_id: UUID, name: str, value: Any) -> Any:
    """Return a value, or the path of a new file with the value if the value is large.

    Args:
        flow_run_id: Id of the pipeline's flow run. The file is written to the directory of this
            flow run.
        name: Name of the value, such as `prepare.result.rows`, for the name of the file.
        value: JSON data.

    Raises:
        OSError: The file could not be written.
    """
    if len(json.dumps(value)) <= MAX_INLINE_BYTES:
        return value
    file_name = re.sub(r"[^\w.-]", "_", name)[:150]
    path = muster_home() / "pipelines" / str(flow_run_id) / f"{file_name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)
    return str(path)


def read_last_metric(place: RunPlace, key: str) -> float | None:
    """Return the last value of a metric of a run, or None if the run has not written it.

    Raises:
        OSError, ValueError: The record or the metrics of the run cannot be read.
    """
    attempts = RunJson.read(place.record).attempts
    numbers = [get_number(row.metrics, key) for row in read_rows(place, attempts)]
    return next((number for number in reversed(numbers) if number is not None), None)


def choose_best(figures: Mapping[str, float | None], mode: str) -> str | None:
    """Return the name of the best run of a parameter sweep, or None if no run has a number.

    If several runs have the best number, the first of these runs is returned.

    Args:
        figures: Mapping from the name of a run to the number that is compared, in the order of the
            matrix.
        mode: `max` if a larger number is better, or `min`.
    """
    known = {unit: figure for unit, figure in figures.items() if figure is not None}
    choose = max if mode == "max" else min
    return choose(known, key=known.__getitem__, default=None)


def format_points(
    rows: Sequence[tuple[str, Mapping[str, Any], str, float | None]], best: str | None
) -> list[dict[str, str]]:
    """Return the rows of a table that shows a parameter sweep.

    Args:
        rows: A tuple for each combination of parameters: the name `STAGE.N`, the parameters, the
            state of the run, and the number that decides which combination is best.
        best: Name of the best combination, or None.
    """
    return [
        {
            "point": unit.partition(".")[2],
            **{key: str(value) for key, value in point.items()},
            "state": state,
            "figure": "" if figure is None else f"{figure:.6g}",
            "best": "best" if unit == best else "",
        }
        for unit, point, state, figure in rows
    ]
