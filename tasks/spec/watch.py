"""Alarms over a run's figures: the rules, as a person writes them, and what they find.

A run may be alive and worthless: its loss is no number any more, its reward has collapsed, it has
nothing left to learn from. The rules of a workload stand in `watch.yaml`.
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

from tasks.spec.placeholders import mapping
from tasks.spec.values import Count, Model, Refusal, Text, is_number, refused, value_at

Then = Literal["tell", "stop"]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Names = Annotated[
    tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]

#: What differs by less is the same, and what varies by less, in parts of itself, is steady.
_SAME, _STEADY = 1e-9, 0.1
#: A figure has lost something where that is so many times what it varies by from step to step.
_NOISE = 4.0


class WatchRule(Model):
    """What raises one alarm, by the figures of a few steps in a row."""

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
        asked = [key for key in _CONDITIONS if written.get(key) is not None]
        if len(asked) > 1:
            yield (), refused(f"asks for {' and '.join(asked)}", "write one of them")

    def over(self, other: WatchRule) -> WatchRule:
        """This rule, with what it leaves out as the other one has it."""
        said = {key: getattr(self, key) for key in self.model_fields_set}
        if said.keys() & _CONDITIONS:
            said = {**dict.fromkeys(_CONDITIONS), **said}
        return other.model_copy(update=said)


_CONDITIONS = ("finite", "above", "below", "constant", "loses", "spent")


class Watch(Model):
    """What is held to be wrong with a training that goes on."""

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
        """The rules that hold, by name, each with what follows."""
        preset = _presets().get(self.preset or workload, {})
        own = {
            name: rule and rule.over(preset.get(name, rule)) for name, rule in self.rules_.items()
        }
        return {
            name: rule.model_copy(update={"then": rule.then or self.then})
            for name, rule in {**preset, **own}.items()
            if rule is not None
        }


def refusals_of_rules(written: Mapping[str, Any], workload: object) -> Iterator[Refusal]:
    """One for each rule that is no preset's, and does not say what it is about."""
    known = _presets().get(str(written.get("preset") or workload), {})
    for name, rule in mapping(written.get("rules")).items():
        if not isinstance(rule, Mapping) or name in known:
            continue
        if rule.get("metric") is None:
            problem = "names no metric, and the preset has no rule of this name"
            remedy = f"write metric: [NAME]; the preset has {', '.join(known) or 'none'}"
            yield ("rules", str(name)), refused(problem, remedy)
        elif all(rule.get(key) is None for key in _CONDITIONS):
            remedy = f"write one of {', '.join(_CONDITIONS)}"
            yield ("rules", str(name)), refused("asks for nothing", remedy)


@cache
def _presets() -> Mapping[str, Mapping[str, WatchRule]]:
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    rules = {name: WatchRule.model_validate(rule) for name, rule in content["rules"].items()}
    return {
        preset: {name: rules[name] for name in names}
        for preset, names in content["presets"].items()
    }


def parts_with_figures(entry: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Of a line those parts in which figures may stand: verl writes its own below `data`."""
    return entry, *(mapping(entry.get(name)) for name in ("data", "metrics"))


def figure_of(entry: Mapping[str, Any], names: Sequence[str]) -> tuple[str, float] | None:
    """The first of these figures that a line has, and its value, which may be NaN or infinite."""
    for part in parts_with_figures(entry):
        for name in names:
            value = value_at(part, name)
            # As JSON that has no word for it is written by some.
            if isinstance(value, str) and value.lower().strip("+- ") in ("nan", "inf", "infinity"):
                value = float(value)
            if is_number(value):
                with suppress(OverflowError):
                    return name, float(value)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What a rule found."""

    rule: str
    metric: str
    #: The last step that it was found at, and the first one.
    step: float
    since: float
    #: None: it is no number.
    value: float | None
    then: Then
    #: For people, of the figure: `0.5 for 10 steps, as it began`.
    said: str

    @property
    def message(self) -> str:
        return f"{self.rule}: {self.metric} {self.said} (step {self.step:g})"


class Alarms:
    """Takes in the figures of an attempt, line by line; each rule is heard once."""

    def __init__(self, rules: Mapping[str, WatchRule]) -> None:
        self._open = {name: _Course(name, rule) for name, rule in rules.items()}
        self._step: float | None = None

    def take(self, step: float, entry: Mapping[str, Any]) -> list[Alarm]:
        """What a line of the file raises.

        A step that is not beyond the last one, as after a way back to a checkpoint, begins anew.
        """
        if self._step is not None and step < self._step:
            self._open = {name: _Course(name, one.rule) for name, one in self._open.items()}
        self._step = step
        found = [alarm for one in self._open.values() if (alarm := one.take(step, entry))]
        for alarm in found:
            del self._open[alarm.rule]
        return found


class _Course:
    """How one figure went, as far as its rule asks."""

    def __init__(self, name: str, rule: WatchRule) -> None:
        self.rule = rule
        self._name = name
        count = 1 if rule.finite else rule.for_steps
        #: `(step, value)`, and what the figure beside it was.
        self._last: deque[tuple[float, float]] = deque(maxlen=count)
        self._beside: deque[float] = deque(maxlen=count)
        self._first = self._most = 0.0
        #: Means over `for_steps`: the first one and the best, the latter of what is long past.
        self._first_mean: float | None = None
        self._best = 0.0
        self._seen = 0
        self._moved = 0.0

    def take(self, step: float, entry: Mapping[str, Any]) -> Alarm | None:
        rule = self.rule
        is_again = self._last and self._last[-1][0] == step
        if not is_again and (beside := figure_of(entry, rule.unless_steady)):
            self._beside.append(beside[1])
        if (found := figure_of(entry, rule.metric)) is None:
            return None
        metric, value = found
        is_bound = rule.above is not None or rule.below is not None
        if math.isfinite(value) or (math.isinf(value) and is_bound):
            said = self._said(step, value)
        else:
            said = f"is {value}" if rule.finite else ""
        if not said:
            return None
        since = self._last[0][0] if self._last else step
        return Alarm(
            rule=self._name,
            metric=metric,
            step=step,
            since=min(since, step),
            value=value if math.isfinite(value) else None,
            then=rule.then or "tell",
            said=said,
        )

    def _said(self, step: float, value: float) -> str:
        """What is wrong, in words; empty where nothing is."""
        if self._last and self._last[-1][0] == step:
            self._last.pop()  # The last word on a step.
            self._seen -= 1
        elif self._last:
            self._moved += abs(value - self._last[-1][1])
        self._first = self._first if self._seen else value
        self._most = max(self._most, value) if self._seen else value
        self._seen += 1
        self._last.append((step, value))
        if len(self._last) < self.rule.for_steps:
            return ""
        values = [one for _, one in self._last]
        said = self._judged(values)
        return f"{said} for {len(values)} steps" if said else ""

    def _judged(self, values: Sequence[float]) -> str:
        rule, low, high = self.rule, min(values), max(values)
        if rule.above is not None and low > rule.above:
            return f"is {values[-1]:.4g}, above {rule.above:g}"
        if rule.below is not None and high < rule.below:
            return f"is {values[-1]:.4g}, below {rule.below:g}"
        if rule.constant:
            same = _SAME * max(1.0, abs(self._first))
            is_same = max(abs(one - self._first) for one in values) <= same
            return f"has been {values[-1]:.4g}, as it began," if is_same else ""
        spent = self._most > 0 and high <= (1 - (rule.spent or 0)) * self._most
        if rule.spent and spent and not self._is_beside_steady():
            return f"is {values[-1]:.4g}, of {self._most:.4g} at its most,"
        return self._lost(values) if rule.loses else ""

    def _lost(self, values: Sequence[float]) -> str:
        sign = 1 if self.rule.better == "higher" else -1
        mean = sign * math.fsum(values) / len(values)
        if self._first_mean is None:
            self._first_mean = self._best = mean
        self._best = max(self._best, mean)
        size = max(self._best - self._first_mean, abs(self._best))
        least = max((self.rule.loses or 1) * size, _NOISE * self._moved / self._seen, _SAME)
        if self._best - mean < least:
            return ""
        return f"is {sign * mean:.4g}, and was {sign * self._best:.4g} at its best,"

    def _is_beside_steady(self) -> bool:
        if not self._beside or not self.rule.unless_steady:
            return False
        mean = math.fsum(self._beside) / len(self._beside)
        return max(self._beside) - min(self._beside) <= _STEADY * abs(mean)
