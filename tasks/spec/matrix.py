"""The points of a stage's matrix: each combination of values becomes one run or step."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from tasks.spec.formatting import format_count
from tasks.spec.values import (
    Count,
    DottedKey,
    Model,
    Refusal,
    Text,
    describe_value,
    is_number,
    make_refusal,
)

#: Largest number of combinations of values that one matrix may have.
MAX_POINTS = 1000


class Range(Model):
    """Range of numbers from which `sample` draws the values of a matrix."""

    min: float = Field(strict=True, description="Smallest value.", examples=[0.000001])
    max: float = Field(strict=True, description="Largest value.", examples=[0.0001])
    scale: Literal["linear", "log", "integer"] = Field(
        "linear",
        description="linear: all values are equally likely. log: all orders of magnitude are "
        "equally likely. integer: all whole numbers are equally likely.",
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        low = written.get("min")
        high = written.get("max")
        if not is_number(low) or not is_number(high):
            return
        if low >= high:
            problem = f"must be more than `min`, which is {low:g}, found {high:g}"
            yield ("max",), make_refusal(problem, "write a larger number")
        if written.get("scale") == "log" and low <= 0:
            yield ("min",), make_refusal(f"a log scale needs a positive number, found {low:g}")

    def draw(self, generator: random.Random) -> float:
        """Return a random value in the range, rounded to five significant digits."""
        if self.scale == "integer":
            return generator.randint(math.ceil(self.min), math.floor(self.max))
        if self.scale == "log":
            value = math.exp(generator.uniform(math.log(self.min), math.log(self.max)))
        else:
            value = generator.uniform(self.min, self.max)
        return float(f"{value:.5g}")


def _values_or_range(value: object, _handler: ValidatorFunctionWrapHandler) -> Any:
    # Decide here whether the value must be a `Range` or a list. Otherwise, pydantic would compare
    # the value with both types, and report two errors for one fault.
    if isinstance(value, Range):
        return value
    if isinstance(value, Mapping):
        return Range.model_validate(value)
    if not isinstance(value, list | tuple):
        remedy = "write `[VALUE, ...]`, or `{min: A, max: B}` together with `sample`"
        raise make_refusal(f"must be a list of values, found {describe_value(value)}", remedy)
    if not value:
        raise make_refusal("must not be empty", "write at least one value")
    texts = [json.dumps(item, sort_keys=True, default=str) for item in value]
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise make_refusal(f"contains {twice} twice", "write each value once")
    return tuple(value)


#: Type of a matrix: a mapping from keys to values. A key is a dotted path in the run spec, or the
#: name of an argument of the step.
Matrix = Mapping[
    DottedKey,
    Annotated[tuple[Any, ...] | Range, WrapValidator(_values_or_range)],
]


class Best(Model):
    """Rule that selects the best run of a matrix."""

    by: Text = Field(
        description="Number that decides which point of the matrix is best. In a matrix of runs: "
        "the name of a metric, or EVALUATION.KEY for a number from an evaluation in `evals`. In a "
        "matrix of steps: a key of the step's result.",
        examples=["reward"],
    )
    mode: Literal["max", "min"] = Field(
        "max", description="max: a larger number is better. min: a smaller number is better."
    )


#: A run of a matrix is stopped early only after a comparison with at least this number of other
#: runs. With fewer other runs, Muster could not judge whether a value of the metric is good.
MIN_OTHER_POINTS = 3


class StopEarly(Best):
    """Rule that stops a run of the matrix early if other runs of the matrix are better."""

    by: Text = Field(
        description="Name of the metric by which Muster compares the runs of the matrix.",
        examples=["reward"],
    )
    rule: Literal["median", "halving"] = Field(
        "median",
        description="median: a run of the matrix stops if its best value of the metric is worse "
        "than the median of all runs at the same step. halving: the worse half of the runs stops "
        "at `after_step`, again at twice this step, at four times this step, and so on.",
    )
    after_step: Count = Field(
        description="First training step at which Muster compares the points of the matrix.",
        examples=[20],
    )


def check_matrix(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults in a stage's key `matrix`, and in the keys that need `matrix`.

    Args:
        written: The stage as the user wrote it. Its values are not validated yet.
    """
    matrix = written.get("matrix")
    if matrix is None:
        for key in ("sample", "at_most", "best", "stop_early"):
            if written.get(key) is not None:
                problem = (
                    "this key needs `matrix`, because a stage without `matrix` has a single run"
                )
                yield (key,), make_refusal(problem, "write `matrix: {KEY: [VALUE, ...]}`")
        return
    if not isinstance(matrix, Mapping):
        return
    if not matrix:
        yield ("matrix",), make_refusal("must not be empty", "write {KEY: [VALUE, ...]}")
    sample = written.get("sample")
    ranges = [key for key, values in matrix.items() if isinstance(values, Mapping | Range)]
    if ranges and sample is None:
        problem = (
            "missing: Muster needs the number of random points to draw, because "
            f"{ranges[0]} has a range of values"
        )
        yield ("sample",), make_refusal(problem, "write for example sample: 16")
    lists = [values for values in matrix.values() if isinstance(values, list | tuple)]
    count = math.prod(map(len, lists))
    if type(sample) is int:
        if not ranges and sample > count:
            problem = f"must be at most {count}, the number of points of the matrix, found {sample}"
            yield (
                ("sample",),
                make_refusal(problem, f"write `sample: {count}` or less, or leave out `sample`"),
            )
        count = sample
    if written.get("stop_early") is not None and matrix and count <= MIN_OTHER_POINTS:
        problem = (
            f"early stopping compares each point with at least {MIN_OTHER_POINTS} other points, "
            f"but the matrix has only {format_count(count, 'point')}"
        )
        yield ("stop_early",), make_refusal(problem, "leave out stop_early, or write more values")
    if count > MAX_POINTS:
        problem = f"the matrix has {count} points, but at most {MAX_POINTS} are possible"
        yield ("matrix",), make_refusal(problem, "write fewer values, or `sample: N`")


def list_points(
    name: str, matrix: Mapping[str, Sequence[Any] | Range], sample: Count | None
) -> list[dict[str, Any]]:
    """Return the points of a matrix. Each point is a mapping from keys to values.

    The result depends only on the arguments, so every process of a pipeline gets the same points.

    Args:
        name: Name of the stage. It is part of the seed of the random points.
        matrix: Mapping from each key to its possible values.
        sample: Number of random points. If None, the result contains all combinations, and the last
            key changes fastest.
    """
    if sample is None:
        lists = [values for values in matrix.values() if not isinstance(values, Range)]
        return [dict(zip(matrix, point, strict=True)) for point in itertools.product(*lists)]
    generator = random.Random(f"{name}:{','.join(matrix)}")
    if not any(isinstance(values, Range) for values in matrix.values()):
        return generator.sample(list_points(name, matrix, None), sample)
    return [
        {
            key: values.draw(generator) if isinstance(values, Range) else generator.choice(values)
            for key, values in matrix.items()
        }
        for _ in range(sample)
    ]
