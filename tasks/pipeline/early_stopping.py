"""Decide which points of a matrix are stopped early, with the pruners of Optuna.

A point is one of the value sets of a stage's matrix. Its run reports a metric by training step. The
values of the metric are called *figures* here.

The decision depends only on the figures of the points. So every process of the pipeline makes the
same decision for the same figures. Each point becomes an Optuna trial with a single figure. The
reason: Optuna compares only figures of the same step, but the points run at different speeds.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.matrix import MIN_OTHER_POINTS, StopEarly
from tasks.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

#: Factor of the rule `halving`. With 2, the better half of the runs continues after a comparison,
#: and the next comparison is at twice the training step.
_REDUCTION_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PointHistory:
    """The values of one metric that a run of a parameter sweep has reported so far."""

    #: Mapping from training step to the finite value of the metric, sorted by step.
    figures: Mapping[float, float] = field(default_factory=dict)
    #: Last training step that the run has reached, even if the metric has no value at this step. 0
    #: if unknown.
    last_step: float = 0.0
    #: True if the run has completed or was stopped early. The run then reports no further values.
    has_ended: bool = False

    def figure_at(self, step: float) -> float | None:
        """Return the last value at or before a training step, or None if there is no value."""
        earlier = [figure for reported, figure in self.figures.items() if reported <= step]
        return earlier[-1] if earlier else None


def require_optuna(spec: PipelineSpec) -> None:
    """Check that the package optuna can be imported, if a stage has the key `stop_early`.

    Raises:
        InvalidSpec: The package cannot be imported in this Python environment.
    """
    places = [
        f"stages.{index}.stop_early"
        for index, stage in enumerate(spec.stages)
        if stage.stop_early is not None
    ]
    if not places:
        return
    try:
        importlib.import_module("optuna")
    except ImportError as error:
        problem = (
            "this key needs the Python package optuna, but Muster cannot import the package "
            f"({error})"
        )
        remedy = 'run pip install "muster[sweeps]" in the Python environment of Muster'
        faults = [Fault(path=place, problem=problem, remedy=remedy) for place in places]
        raise InvalidSpec(tuple(faults)) from error


def find_reason_to_stop(
    rule: StopEarly, point: PointHistory, others: Sequence[PointHistory]
) -> str:
    """Return the reason for stopping an active run of a parameter sweep early, or "".

    The best metric value that the run has reported until now is compared with the values of the
    other runs at one training step. This run and at least three other runs have reached that step.

    For the rule `median`, runs that have ended keep their last value at all later steps. Otherwise,
    the median would no longer contain the bad values of stopped runs. The median would become
    better with each stop, and nearly all runs would be stopped.

    Args:
        rule: The key `stop_early` of the stage.
        point: Metric values of the active run.
        others: Metric values of all other runs of the sweep that have begun.
    """
    if not point.figures:
        return ""
    keeps_ended = rule.rule == "median"
    reached = [
        float("inf") if keeps_ended and other.has_ended else other.last_step
        for other in others
        if other.figures
    ]
    if len(reached) < MIN_OTHER_POINTS:
        return ""
    common_step = min(point.last_step, sorted(reached, reverse=True)[MIN_OTHER_POINTS - 1])
    if common_step < rule.after_step:
        return ""
    step = common_step if rule.rule == "median" else _find_rung(rule.after_step, common_step)
    figures = [
        figure
        for other in others
        if other.last_step >= step or (keeps_ended and other.has_ended)
        if (figure := other.figure_at(step)) is not None
    ]
    if len(figures) < MIN_OTHER_POINTS:
        return ""
    choose = max if rule.mode == "max" else min
    best = choose(point.figures.values())
    if not _is_pruned(rule, int(step), best, figures):
        return ""
    all_figures = [*figures, best]
    own = f"the best {rule.by} until step {point.last_step:g} is {best:.6g}"
    points = f"{len(all_figures)} points of the matrix at step {step:g}"
    if rule.rule == "median":
        side = "below" if rule.mode == "max" else "above"
        median = statistics.median(all_figures)
        return f"{own}, which is {side} {median:.6g}, the median of {points}"
    return f"{own}, which is not in the better half of {points}"


def _find_rung(after_step: int, step: float) -> int:
    """Return the last training step, up to `step`, at which the rule `halving` compares runs.

    The rule compares runs at `after_step`, at twice this step, at four times this step, and so on.
    """
    rung = after_step
    while rung * _REDUCTION_FACTOR <= step:
        rung *= _REDUCTION_FACTOR
    return rung


def _is_pruned(rule: StopEarly, step: int, best: float, others: Sequence[float]) -> bool:
    """Return True if Optuna would prune (stop) a run after a comparison with other runs.

    Each run is given to Optuna as a trial with a single metric value.

    Args:
        rule: The key `stop_early` of the stage.
        step: Training step of the comparison, the same for all trials.
        best: Best metric value of the run.
        others: Metric value of each other run.
    """
    # Import optuna only here, because most pipelines do not need this optional package.
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: BasePruner
    if rule.rule == "median":
        pruner = optuna.pruners.MedianPruner(n_startup_trials=MIN_OTHER_POINTS)
    else:
        # Set `min_resource`, the first training step at which Optuna compares trials, to `step`,
        # because each trial has a value only at `step`.
        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=step, reduction_factor=_REDUCTION_FACTOR
        )
    study = optuna.create_study(
        direction="maximize" if rule.mode == "max" else "minimize",
        pruner=pruner,
        sampler=optuna.samplers.RandomSampler(),
    )
    if rule.rule == "median":
        # Add the value of the run itself (`best`) to the compared values. Otherwise, the median can
        # be the mean of two values of other runs. This mean has a rounding error, which can stop a
        # run whose value equals the median.
        study.add_trials(
            optuna.trial.create_trial(value=figure, intermediate_values={step: figure})
            for figure in (*others, best)
        )
    else:
        for figure in others:
            trial = study.ask()
            trial.report(figure, step)
            # Ignore the result. The call is necessary, because the pruner for successive halving
            # stores the value of the trial only during this call.
            trial.should_prune()
    trial = study.ask()
    trial.report(best, step)
    return trial.should_prune()
