"""Alarm rules over the metrics of a run, and their evaluation.

A training can run without failing and still be useless: its loss is NaN, its reward has collapsed,
or its rewards no longer vary. `watch.yaml` has the default rules of each workload.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.values import Count, Model, Refusal, Text, get_value, is_number, make_refusal

Then = Literal["tell", "stop"]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Names = Annotated[
    tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]

#: Two values that differ by at most this relative amount count as equal.
_EQUAL_WITHIN = 1e-9
#: A metric whose range is at most this share of its mean counts as steady.
_STEADY_WITHIN = 0.1
#: A loss must be at least this multiple of the mean change from step to step; less is noise.
_NOISE_FACTOR = 4.0


class WatchRule(Model):
    """Condition on a metric that raises an alarm if it holds for several consecutive steps."""

    metric: Names = Field(
        (),
        description="Its names in the file; the first one counts that a line has.",
        examples=[["actor/ppo_kl", "train/ppo_kl"]],
    )
    finite: Literal[True] | None = Field(None, description="It is NaN or infinite.")
    above: Finite | None = Field(None, description="It is above this.", examples=[1.0])
    below: Finite | None = Field(None, description="It is below this.")
    constant: Literal[True] | None = Field(
        None, description="It has the one value that it began with."
    )
    loses: Share | None = Field(
        None,
        description="It lost this part of its best: of what it had gained, or of itself where that "
        "is more.",
        examples=[0.5],
    )
    better: Literal["higher", "lower"] = Field("higher", description="Which way is its best.")
    spent: Share | None = Field(
        None, description="Of the most that it was, this part is gone.", examples=[0.95]
    )
    unless_steady: Names = Field(
        (), description="No alarm while this other figure varies by less than a tenth."
    )
    for_steps: Count = Field(5, description="So many steps in a row; NaN counts at once.")
    then: Then | None = Field(None, description="For this rule alone: tell or stop.")

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        conditions = [key for key in _CONDITIONS if written.get(key) is not None]
        if len(conditions) > 1:
            yield (), make_refusal(f"asks for {' and '.join(conditions)}", "write one of them")

    def over(self, other: WatchRule) -> WatchRule:
        """Return this rule, with its omitted keys taken from another rule.

        If this rule has a condition, the condition of the other rule does not apply.
        """
        written = {key: getattr(self, key) for key in self.model_fields_set}
        if written.keys() & _CONDITIONS:
            written = {**dict.fromkeys(_CONDITIONS), **written}
        return other.model_copy(update=written)


#: Keys of a rule that are conditions. A rule has exactly one condition.
_CONDITIONS = ("finite", "above", "below", "constant", "loses", "spent")


class Watch(Model):
    """Alarms for a training that runs but makes no useful progress."""

    preset: Literal["ppo", "grpo", "sft", "none"] | None = Field(
        None, description="Rules for the figures of a kind of training; left out: the workload's."
    )
    then: Then = Field(
        "tell",
        description="tell: an event, the state's message, the page. stop: the attempt has failed "
        "as ALARM; where `retry` lists that, the next one starts from a checkpoint before it.",
    )
    rules_: Mapping[Text, WatchRule | None] = Field(
        default_factory=dict,
        alias="rules",
        description="By name, beside the preset's; one of the preset's names changes it, and "
        "null takes it out.",
        examples=[{"kl": {"metric": ["actor/ppo_kl"], "above": 0.5, "then": "stop"}}],
    )

    def of(self, workload: str) -> dict[str, WatchRule]:
        """Return the effective rules by name: those of the preset, changed by the user's own.

        Each returned rule has its `then` set.
        """
        preset = _presets().get(self.preset or workload, {})
        own_rules = {
            name: rule and rule.over(preset.get(name, rule)) for name, rule in self.rules_.items()
        }
        return {
            name: rule.model_copy(update={"then": rule.then or self.then})
            for name, rule in {**preset, **own_rules}.items()
            if rule is not None
        }


def check_watch_rules(written: Mapping[str, Any], workload: object) -> Iterator[Refusal]:
    """Yield a fault for each rule that lacks a metric or a condition and changes no preset rule."""
    known = _presets().get(str(written.get("preset") or workload), {})
    for name, rule in mapping_or_empty(written.get("rules")).items():
        if not isinstance(rule, Mapping) or name in known:
            continue
        if rule.get("metric") is None:
            problem = "names no metric, and the preset has no rule of this name"
            remedy = f"write metric: [NAME]; the preset has {', '.join(known) or 'none'}"
            yield ("rules", str(name)), make_refusal(problem, remedy)
        elif all(rule.get(key) is None for key in _CONDITIONS):
            remedy = f"write one of {', '.join(_CONDITIONS)}"
            yield ("rules", str(name)), make_refusal("asks for nothing", remedy)


@cache
def _presets() -> Mapping[str, Mapping[str, WatchRule]]:
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    rules = {name: WatchRule.model_validate(rule) for name, rule in content["rules"].items()}
    return {
        preset: {name: rules[name] for name in names}
        for preset, names in content["presets"].items()
    }


def list_metric_sections(entry: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the mappings of a line that can contain metrics: the line, its `data` and `metrics`.

    verl writes its metrics under `data`.
    """
    return entry, *(mapping_or_empty(entry.get(name)) for name in ("data", "metrics"))


def find_metric(entry: Mapping[str, Any], names: Sequence[str]) -> tuple[str, float] | None:
    """Return the name and value of the first of these metrics that a line has, or None.

    The value may be NaN or infinite.
    """
    for part in list_metric_sections(entry):
        for name in names:
            value = get_value(part, name)
            # JSON has no NaN, so some programs write it as a string.
            if isinstance(value, str) and value.lower().strip("+- ") in ("nan", "inf", "infinity"):
                value = float(value)
            if is_number(value):
                with suppress(OverflowError):
                    return name, float(value)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Alarm that a rule has raised."""

    #: Name of the rule.
    rule: str
    #: Name of the metric, as it is written in the metrics file.
    metric: str
    #: Last step at which the condition held.
    step: float
    #: First step at which the condition held.
    since: float
    #: Last value of the metric, or None if it is NaN or infinite.
    value: float | None
    #: Reaction to the alarm: `tell` notifies the user, `stop` fails the attempt.
    then: Then
    #: Predicate for the message, such as `is 0.5, above 0.2 for 3 steps`.
    predicate: str

    @property
    def message(self) -> str:
        return f"{self.rule}: {self.metric} {self.predicate} (step {self.step:g})"


class Alarms:
    """Evaluates alarm rules over the metrics of an attempt. Each rule raises one alarm at most."""

    def __init__(self, rules: Mapping[str, WatchRule]) -> None:
        #: Rules that have raised no alarm yet, with the recent values of their metrics.
        self._pending = {name: _RuleState(name, rule) for name, rule in rules.items()}
        self._last_step: float | None = None

    def take(self, step: float, entry: Mapping[str, Any]) -> list[Alarm]:
        """Evaluate a line of the metrics file and return the new alarms.

        If the step is lower than the previous step, the training went back to a checkpoint. The
        rules then forget all earlier values.
        """
        if self._last_step is not None and step < self._last_step:
            self._pending = {
                name: _RuleState(name, state.rule) for name, state in self._pending.items()
            }
        self._last_step = step

        alarms = [
            alarm for state in self._pending.values() if (alarm := state.evaluate(step, entry))
        ]
        for alarm in alarms:
            del self._pending[alarm.rule]
        return alarms


class _RuleState:
    """A rule, with the statistics over its metric that the rule needs."""

    def __init__(self, name: str, rule: WatchRule) -> None:
        self.rule = rule
        self._name = name
        step_count = 1 if rule.finite else rule.for_steps
        #: Last steps with their values: `(step, value)`.
        self._recent: deque[tuple[float, float]] = deque(maxlen=step_count)
        #: Last values of the metric that `unless_steady` names.
        self._other_recent: deque[float] = deque(maxlen=step_count)
        self._first_value = 0.0
        self._highest_value = 0.0
        #: First mean over `for_steps` values, or None if there were too few values so far.
        self._first_mean: float | None = None
        #: Best mean over `for_steps` values. If lower is better, its sign is inverted.
        self._best_mean = 0.0
        self._value_count = 0
        #: Sum of the absolute changes from step to step.
        self._total_change = 0.0

    def evaluate(self, step: float, entry: Mapping[str, Any]) -> Alarm | None:
        """Evaluate a line of the metrics file; return an alarm if the condition holds."""
        rule = self.rule
        is_repeated_step = self._recent and self._recent[-1][0] == step
        if not is_repeated_step and (other := find_metric(entry, rule.unless_steady)):
            self._other_recent.append(other[1])

        figure = find_metric(entry, rule.metric)
        if figure is None:
            return None
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

    def _add_value(self, step: float, value: float) -> str:
        """Add a value; return the predicate of the message if the condition holds, else ""."""
        if self._recent and self._recent[-1][0] == step:
            # A second line for the same step replaces the first one.
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
        predicate = self._judge(values)
        return f"{predicate} for {len(values)} steps" if predicate else ""

    def _judge(self, values: Sequence[float]) -> str:
        """Return the predicate of the message if the condition holds for the values, else ""."""
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
            return f"has been {values[-1]:.4g}, as it began," if is_constant else ""

        limit = (1 - (rule.spent or 0)) * self._highest_value
        is_spent = self._highest_value > 0 and high <= limit
        if rule.spent and is_spent and not self._is_other_metric_steady():
            return f"is {values[-1]:.4g}, of {self._highest_value:.4g} at its most,"
        return self._judge_loss(values) if rule.loses else ""

    def _judge_loss(self, values: Sequence[float]) -> str:
        """Return the predicate of the message if the mean fell far below its best, else ""."""
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
        return f"is {sign * mean:.4g}, and was {sign * self._best_mean:.4g} at its best,"

    def _is_other_metric_steady(self) -> bool:
        if not self._other_recent or not self.rule.unless_steady:
            return False
        mean = math.fsum(self._other_recent) / len(self._other_recent)
        return max(self._other_recent) - min(self._other_recent) <= _STEADY_WITHIN * abs(mean)
