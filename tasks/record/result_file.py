"""Read the JSON result of a pipeline step.

The step writes its result to the file that the environment variable `MUSTER_RESULT` names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tasks.record.places import read_own_file
from tasks.spec.errors import MusterError
from tasks.spec.probes import get_number

#: Largest size in bytes of the result of a pipeline step.
MAX_RESULT_BYTES = 16 << 20
#: Largest number of figures that are read from one result. A figure is a finite number.
_MAX_FIGURES = 100


class InvalidResult(MusterError):
    """A pipeline step has completed, but its result file is missing or not valid.

    A person must correct the step and run the step again.
    """


def read_result_file(path: Path) -> Any:
    """Return the content of a result file as JSON data.

    Raises:
        FileNotFoundError: The file does not exist.
        InvalidResult: The file is too large, contains no JSON, or cannot be read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_RESULT_BYTES:
            raise InvalidResult(
                f"the result file {path} has {size} bytes, but at most {MAX_RESULT_BYTES} bytes "
                "are allowed. Write the data to a file, and return the path of the file"
            )
        content = read_own_file(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidResult(f"the result {path} cannot be read: {error}") from error
    try:
        return json.loads(content, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidResult(f"the result {path} is not JSON: {error}") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def list_figures(result: Any) -> dict[str, float]:
    """Return a mapping from dotted keys to the finite numbers in a result, at most 100.

    If the result is a single number, its key is "".
    """
    figures: dict[str, float] = {}
    for key, value in _walk_values(result, ""):
        number = get_number({"value": value}, "value")
        if number is not None and len(figures) < _MAX_FIGURES:
            figures[key] = number
    return figures


def _walk_values(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values from nested mappings. Lists are skipped."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk_values(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
