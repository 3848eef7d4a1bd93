"""The spec key `watch`: alarm rules for the metrics of a training, and their evaluation.

A training can run without failing and still be useless: its loss is NaN, its reward has collapsed,
or its rewards never change. `watch.yaml` has the default rules of each workload.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from tasks.spec.formatting import join_words
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.values import Count, Model, Refusal, Text, get_value, is_number, make_refusal
from tasks.spec.workloads import Workload

Then = Literal["tell", "stop"]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Names = Annotated[
    tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]

#: Largest relative difference of two metric values that count as equal.
_EQUAL_WITHIN = 1e-9
#: Largest range of the values of a steady metric, as a share of their mean.
_STEADY_WITHIN = 0.1
#: A decline of a metric is treated as noise if it is smaller than this number times the metric's
#: mean change from step to step.
_NOISE_FACTOR = 4.0
#: Advice about a metric that is NaN or infinite.
NOT_FINITE_ADVICE = (
    "The training diverged: a metric is NaN or infinite. Check the learning rate, and the data of "
    "the last steps."
)
#: Advice about a metric that is null, but not NaN or infinite.
_NULL_ADVICE = (
    "A metric is null, which often stands for NaN. Check the learning rate, and the data of the "
    "last steps."
)
#: An alarm about null values is raised only if the metric is null in at least this number of
#: consecutive lines.
_MANY_NULLS = 10


class WatchRule(Model):
    """Rule that raises an alarm if a condition on a metric is true for several steps in a row."""

    metric: Names = Field(
        (),
        description="Name of the metric in the file of `progress.jsonl`, or a list of possible "
        "names. Muster uses the first of these names that a line of the file contains.",
        examples=[["actor/ppo_kl", "train/ppo_kl"]],
    )
    finite: Literal[True] | None = Field(
        None,
        description="true: raise an alarm if the metric is NaN or infinite, or is null in too many "
        "consecutive lines of the metrics file. Some trainers write null between two values. So "
        "too many means at least 10 lines, and at least twice the longest earlier series of nulls.",
    )
    above: Finite | None = Field(
        None, description="Raise an alarm if the metric is above this number.", examples=[1.0]
    )
    below: Finite | None = Field(
        None, description="Raise an alarm if the metric of this rule is below this number."
    )
    constant: Literal[True] | None = Field(
        None,
        description="true: raise an alarm if the metric still has its first value, for "
        "`for_steps` steps in a row.",
    )
    loses: Share | None = Field(
        None,
        description="Number from 0 to 1. Raise an alarm if the metric has lost this share of its "
        "best value. With 0.5 and a best value of 0.8, the alarm comes at 0.4. Each value is a "
        "mean over `for_steps` steps. If the improvement from the first to the best value is "
        "larger than the best value, the number is a share of the improvement. With 0.5 and an "
        "improvement from -3 to 1, the alarm comes at -1.",
        examples=[0.5],
    )
    better: Literal["higher", "lower"] = Field(
        "higher",
        description="Direction in which the metric improves. Only rules with the condition `loses` "
        "use this key.",
    )
    spent: Share | None = Field(
        None,
        description="Number from 0 to 1. Raise an alarm if the metric has fallen by this share of "
        "its highest value. With 0.95, the alarm comes at 5 % of the highest value.",
        examples=[0.95],
    )
    unless_steady: Names = Field(
        (),
        description="Name of another metric, or a list of its possible names. The condition "
        "`spent` raises no alarm while this other metric is steady: its last values differ from "
        "their mean by at most a tenth.",
    )
    for_steps: Count = Field(
        5,
        description="Number of steps in a row in which the condition of the rule must hold "
        "before an alarm is raised. For `finite`, one step is enough.",
    )
    then: Then | None = Field(
        None,
        description="Reaction to an alarm of this rule: tell (report it) or stop (fail the "
        "attempt). If omitted, the key `then` of `watch` applies.",
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        conditions = [key for key in _CONDITIONS if written.get(key) is not None]
        if len(conditions) > 1:
            problem = f"must have exactly 1 condition, found {join_words(conditions)}"
            yield (), make_refusal(problem, "keep one of them")

    def with_defaults(self, other: WatchRule) -> WatchRule:
        """Return this rule with missing keys copied from another rule.

        A rule has exactly one condition. If this rule has a condition, the condition of the other
        rule is not copied.
        """
        written = {key: getattr(self, key) for key in self.model_fields_set}
        if written.keys() & _CONDITIONS:
            written = {**dict.fromkeys(_CONDITIONS), **written}
        return other.model_copy(update=written)


#: Keys of an alarm rule that contain a condition on its metric. A rule has exactly one of these
#: keys.
_CONDITIONS = ("finite", "above", "below", "constant", "loses", "spent")


class Watch(Model):
    """Alarms for a training that runs but makes no useful progress."""

    preset: Literal[Workload, "none"] | None = Field(
        None,
        description="Name of a set of predefined alarm rules. none: no predefined rules. If "
        "omitted, the set for the `workload` of the run applies.",
    )
    then: Then = Field(
        "tell",
        description="Reaction to an alarm. tell: report the alarm as an event, in the message of "
        "the run's state and on the page of the run. stop: fail the attempt as ALARM. If `retry` "
        "lists ALARM, the next attempt starts from a checkpoint before the alarm.",
    )
    rules_: Mapping[Text, WatchRule | None] = Field(
        default_factory=dict,
        alias="rules",
        description="Alarm rules by name, in addition to the predefined rules of `preset`. A "
        "rule with the name of a predefined rule changes that rule, and null removes it.",
        examples=[{"kl": {"metric": ["actor/ppo_kl"], "above": 0.5, "then": "stop"}}],
    )

    def choose_rules(self, workload: str) -> dict[str, WatchRule]:
        """Return a mapping from names to the alarm rules of the run.

        These are the rules of the preset, changed by the user's rules. In each returned rule, the
        key `then` has a value.

        Args:
            workload: Workload of the run. If the user chose no preset, the preset with the name of
                the workload is used.
        """
        preset = _load_presets().get(self.preset or workload, {})
        own_rules = {
            name: rule and rule.with_defaults(preset.get(name, rule))
            for name, rule in self.rules_.items()
        }
        return {
            name: rule.model_copy(update={"then": rule.then or self.then})
            for name, rule in {**preset, **own_rules}.items()
            if rule is not None
        }


def check_watch_rules(written: Mapping[str, Any], workload: object) -> Iterator[Refusal]:
    """Yield a fault for each alarm rule of the user that has no metric or no condition.

    If the preset contains a rule with the same name, missing keys of the user's rule are copied
    from that rule. The user's rule then needs neither a metric nor a condition.

    Args:
        written: The mapping `watch` as the user wrote it. Its values are not validated yet.
        workload: Workload of the run. If the user chose no preset, the preset with the name of the
            workload is used.
    """
    known = _load_presets().get(str(written.get("preset") or workload), {})
    for name, rule in mapping_or_empty(written.get("rules")).items():
        if not isinstance(rule, Mapping) or name in known:
            continue
        if rule.get("metric") is None:
            problem = "the rule has no `metric`, and the preset has no rule of this name"
            remedy = (
                f"write `metric: [NAME]`, or use a rule of the preset: {', '.join(known) or 'none'}"
            )
            yield ("rules", str(name)), make_refusal(problem, remedy)
        elif all(rule.get(key) is None for key in _CONDITIONS):
            remedy = f"write one of {', '.join(_CONDITIONS)}"
            yield ("rules", str(name)), make_refusal("has no condition", remedy)


@cache
def _load_presets() -> Mapping[str, Mapping[str, WatchRule]]:
    """Return the predefined rules in `watch.yaml`.

    The result is a mapping from names of presets to mappings from names to rules.
    """
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    rules = {name: WatchRule.model_validate(rule) for name, rule in content["rules"].items()}
    return {
        preset: {name: rules[name] for name in names}
        for preset, names in content["presets"].items()
    }


def list_metric_sections(entry: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the mappings in a line of a metrics file that can contain metrics.

    These are the line itself, and the mappings under its keys `data` and `metrics`. For example,
    verl writes its metrics under `data`.
    """
    return entry, *(mapping_or_empty(entry.get(name)) for name in ("data", "metrics"))


def find_metric(entry: Mapping[str, Any], names: Sequence[str]) -> tuple[str, float] | None:
    """Return the name and value of the first metric of `names` that a line contains.

    Args:
        entry: Decoded line of a metrics file.
        names: Possible names of the metric.

    Returns:
        The name and the value, which may be NaN or infinite. None if the line has no such metric.
    """
    for part in list_metric_sections(entry):
        for name in names:
            value = _get_metric(part, name)
            # JSON has no NaN and no infinity. Some programs write them as texts, so convert such a
            # text to a number.
            if isinstance(value, str) and value.lower().strip("+- ") in ("nan", "inf", "infinity"):
                value = float(value)
            if is_number(value):
                with suppress(OverflowError):
                    return name, float(value)
    return None


def advise_about_values(values: Collection[str]) -> str:
    """Return advice about metrics whose last values are not finite numbers.

    Args:
        values: Last values of these metrics, as in `Alarms.not_finite_values`.

    Returns:
        The advice, or an empty string if `values` is empty.
    """
    if not values:
        return ""
    return _NULL_ADVICE if {*values} == {"null"} else NOT_FINITE_ADVICE


def has_null(entry: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first metric of `names` whose value in a line is null.

    If there is no such metric, return an empty string.

    Args:
        entry: Decoded line of a metrics file.
        names: Possible names of the metric.
    """
    missing = object()
    for part in list_metric_sections(entry):
        for name in names:
            if _get_metric(part, name, missing) is None:
                return name
    return ""


def _get_metric(part: Mapping[str, Any], name: str, default: object = None) -> Any:
    """Return the value of a metric by its name, such as `train/loss`.

    The metric may also be nested, as in `{"train": {"loss": 0.5}}`.

    Args:
        part: Mapping that can contain metrics.
        name: Name of the metric.
        default: Result if there is no such metric.
    """
    missing = object()
    value = get_value(part, name, missing)
    return get_value(part, name.replace("/", "."), default) if value is missing else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Alarm that an alarm rule has raised."""

    #: Name of the rule that raised the alarm.
    rule: str
    #: Name of the metric, as it is written in the metrics file.
    metric: str
    #: Training step at which the alarm was raised.
    step: float
    #: First training step of the period in which the condition of the rule was true without
    #: interruption.
    since: float
    #: Value of the metric at `step`, or None if the value is NaN or infinite.
    value: float | None
    #: Reaction to the alarm. `tell` notifies the user, and `stop` ends the attempt as failed.
    then: Then
    #: Text that follows the name of the metric in the message: `is 0.5, above 0.2 for 3 steps`.
    predicate: str

    @property
    def message(self) -> str:
        """Message for the user: `rule kl: the metric actor/ppo_kl is 0.5, above 0.2 (step 12)`."""
        return f"rule {self.rule}: the metric {self.metric} {self.predicate} (step {self.step:g})"


class Alarms:
    """Evaluates alarm rules on the metrics of an attempt. Each rule raises at most one alarm."""

    def __init__(self, rules: Mapping[str, WatchRule]) -> None:
        #: Rules that have raised no alarm yet. A key of this mapping is the name of a rule. The
        #: entry contains the rule and recent values of the rule's metric.
        self._pending = {name: _RuleState(name, rule) for name, rule in rules.items()}
        self._last_step: float | None = None
        #: Metrics of the rules with the condition `finite`, each as a tuple of possible names.
        self._finite_metrics = {rule.metric for rule in rules.values() if rule.finite}
        #: Metrics whose last value is NaN or infinite, and metrics whose null values have raised an
        #: alarm. A key of this mapping lists the possible names of one metric. The entry contains
        #: the metric's name in the metrics file, its last value (`nan`, `inf`, `-inf` or `null`),
        #: and the first step of the period without a finite value.
        self._not_finite: dict[tuple[str, ...], tuple[str, str, float]] = {}

    def describe_not_finite(self) -> str:
        """Return a text about metrics without a finite value, such as `loss is nan since step 12`.

        Returns:
            The text, or an empty string if the last value of each metric is finite.
        """
        return " and ".join(
            f"{name} is {value} since step {step:g}"
            for name, value, step in self._not_finite.values()
        )

    @property
    def not_finite_values(self) -> tuple[str, ...]:
        """Last values of the metrics that `describe_not_finite` names, such as `nan` or `null`."""
        return tuple(value for _, value, _ in self._not_finite.values())

    def _note_not_finite(self, step: float, entry: Mapping[str, Any]) -> None:
        for names in self._finite_metrics:
            figure = find_metric(entry, names)
            if figure is None:
                continue
            name, value = figure
            if math.isfinite(value):
                self._not_finite.pop(names, None)
            else:
                since = self._not_finite[names][2] if names in self._not_finite else step
                self._not_finite[names] = (name, str(value), since)

    def evaluate(self, step: float, entry: Mapping[str, Any]) -> list[Alarm]:
        """Evaluate a line of the metrics file, and return the new alarms.

        If the step is lower than in the previous line, the training was resumed from a
        checkpoint. In this case, all earlier values are dropped.

        Args:
            step: Training step of the line.
            entry: The decoded line.
        """
        if self._last_step is not None and step < self._last_step:
            self._pending = {
                name: _RuleState(name, state.rule) for name, state in self._pending.items()
            }
            self._not_finite.clear()
        self._last_step = step
        self._note_not_finite(step, entry)

        alarms = [
            alarm for state in self._pending.values() if (alarm := state.evaluate(step, entry))
        ]
        for alarm in alarms:
            state = self._pending.pop(alarm.rule)
            if state.is_null:
                self._not_finite[state.rule.metric] = (alarm.metric, "null", alarm.since)
        return alarms


class _RuleState:
    """An alarm rule, with recent values of its metric and statistics about earlier values."""

    def __init__(self, name: str, rule: WatchRule) -> None:
        self.rule = rule
        self._name = name
        step_count = 1 if rule.finite else rule.for_steps
        #: Pairs `(step, value)` for the last `for_steps` training steps with a value of the metric.
        self._recent: deque[tuple[float, float]] = deque(maxlen=step_count)
        #: The last `for_steps` values of the other metric, whose name is in the rule's key
        #: `unless_steady`.
        self._other_recent: deque[float] = deque(maxlen=step_count)
        self._first_value = 0.0
        self._highest_value = 0.0
        #: Mean of the first `for_steps` values, or None if there are not enough values yet. If a
        #: lower metric is better, the sign is inverted, so that a larger number is always better.
        self._first_mean: float | None = None
        #: Best mean of `for_steps` consecutive values until now. If a lower metric is better, the
        #: sign is inverted, so that a larger number is always better.
        self._best_mean = 0.0
        self._value_count = 0
        #: Number of consecutive lines until now in which the metric is null, and the step of the
        #: first of these lines.
        self._null_count = 0
        self._null_since = 0.0
        #: Length of the longest series of null values that has already ended. A number ends the
        #: series.
        self._most_nulls = 0
        #: Sum of the absolute differences between consecutive values of the metric.
        self._total_change = 0.0

    @property
    def is_null(self) -> bool:
        """True if the metric was null in the last line that contained it."""
        return self._null_count > 0

    def evaluate(self, step: float, entry: Mapping[str, Any]) -> Alarm | None:
        """Add a line of the metrics file, and return an alarm if the rule's condition is now true.

        Args:
            step: Training step of the line.
            entry: The decoded line.
        """
        rule = self.rule
        is_repeated_step = self._recent and self._recent[-1][0] == step
        if not is_repeated_step and (other := find_metric(entry, rule.unless_steady)):
            self._other_recent.append(other[1])

        figure = find_metric(entry, rule.metric)
        if figure is None:
            return self._count_null(step, entry) if rule.finite else None
        self._most_nulls = max(self._most_nulls, self._null_count)
        self._null_count = 0
        metric, value = figure

        has_bound = rule.above is not None or rule.below is not None
        if math.isfinite(value) or (math.isinf(value) and has_bound):
            predicate = self._add_value(step, value)
        else:
            predicate = f"is {value}" if rule.finite else ""
        if not predicate:
            return None

        since = self._recent[0][0] if self._recent else step
        return Alarm(
            rule=self._name,
            metric=metric,
            step=step,
            since=min(since, step),
            value=value if math.isfinite(value) else None,
            then=rule.then or "tell",
            predicate=predicate,
        )

    def _count_null(self, step: float, entry: Mapping[str, Any]) -> Alarm | None:
        """Return an alarm if the metric is null in unusually many consecutive lines.

        Some trainers write null in the lines between two values of a metric, so a few nulls are
        normal. An alarm needs at least 10 consecutive nulls, and twice as many as in each earlier
        series of nulls.
        """
        metric = has_null(entry, self.rule.metric)
        if not metric:
            return None
        if self._null_count == 0:
            self._null_since = step
        self._null_count += 1
        if self._null_count < max(_MANY_NULLS, 2 * self._most_nulls):
            return None
        return Alarm(
            rule=self._name,
            metric=metric,
            step=step,
            since=self._null_since,
            value=None,
            then=self.rule.then or "tell",
            predicate=f"is null in {self._null_count} lines in a row",
        )

    def _add_value(self, step: float, value: float) -> str:
        """Add a value of the metric, and evaluate the condition of the rule.

        Returns:
            A text for the alarm's message if the condition is true, such as `is 0.5, above 0.2 for
            3 steps`. Otherwise an empty string.
        """
        if self._recent and self._recent[-1][0] == step:
            # A second line for the same step replaces the first, so drop the earlier value.
            self._recent.pop()
            self._value_count -= 1
        elif self._recent:
            self._total_change += abs(value - self._recent[-1][1])

        if self._value_count:
            self._highest_value = max(self._highest_value, value)
        else:
            self._first_value = value
            self._highest_value = value
        self._value_count += 1
        self._recent.append((step, value))

        if len(self._recent) < self.rule.for_steps:
            return ""
        values = [recent_value for _, recent_value in self._recent]
        predicate = self._evaluate_condition(values)
        return f"{predicate} for {len(values)} steps" if predicate else ""

    def _evaluate_condition(self, values: Sequence[float]) -> str:
        """Evaluate the condition of the rule with the last `for_steps` values of the metric.

        Returns:
            A text for the alarm's message if the condition is true, such as `is 0.5, above 0.2`.
            Otherwise an empty string.
        """
        rule = self.rule
        low = min(values)
        high = max(values)
        if rule.above is not None and low > rule.above:
            return f"is {values[-1]:.4g}, above {rule.above:g}"
        if rule.below is not None and high < rule.below:
            return f"is {values[-1]:.4g}, below {rule.below:g}"
        if rule.constant:
            tolerance = _EQUAL_WITHIN * max(1.0, abs(self._first_value))
            is_constant = max(abs(value - self._first_value) for value in values) <= tolerance
            return f"is still {values[-1]:.4g}, its first value," if is_constant else ""

        limit = (1 - (rule.spent or 0)) * self._highest_value
        is_spent = self._highest_value > 0 and high <= limit
        if rule.spent and is_spent and not self._is_other_metric_steady():
            return f"is {values[-1]:.4g}, far below its highest value {self._highest_value:.4g},"
        return self._evaluate_loss(values) if rule.loses else ""

    def _evaluate_loss(self, values: Sequence[float]) -> str:
        """Evaluate the condition `loses`: the last mean is much worse than the best mean.

        Each mean is the mean of `for_steps` consecutive values.

        Args:
            values: The last `for_steps` values of the metric.

        Returns:
            A text for the alarm's message if the condition is true. Otherwise an empty string.
        """
        sign = 1 if self.rule.better == "higher" else -1
        mean = sign * math.fsum(values) / len(values)
        if self._first_mean is None:
            self._first_mean = mean
            self._best_mean = mean
        self._best_mean = max(self._best_mean, mean)

        scale = max(self._best_mean - self._first_mean, abs(self._best_mean))
        noise = _NOISE_FACTOR * self._total_change / self._value_count
        threshold = max((self.rule.loses or 1) * scale, noise, _EQUAL_WITHIN)
        if self._best_mean - mean < threshold:
            return ""
        best = f"{sign * self._best_mean:.4g}"
        return f"is {sign * mean:.4g} on average, far from its best average {best},"

    def _is_other_metric_steady(self) -> bool:
        """Return True if the metric in the rule's key `unless_steady` hardly varies.

        The result is False if the rule has no such key, or if the metric has no values yet.
        """
        if not self._other_recent or not self.rule.unless_steady:
            return False
        mean = math.fsum(self._other_recent) / len(self._other_recent)
        return max(self._other_recent) - min(self._other_recent) <= _STEADY_WITHIN * abs(mean)
