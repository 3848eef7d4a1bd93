"""The order in which `muster explain` lists the metrics of a training."""

from __future__ import annotations

from tasks.show.lines import _summarize_metrics
from tasks.show.metric_order import sort_by_meaning

#: Names of the metrics that TRL writes in each step of a GRPO training, in TRL's order.
GRPO = (
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "rewards/length_reward/mean",
    "rewards/length_reward/std",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "clip_ratio/low_mean",
    "step_time",
    "kl",
)


def test_first_metrics_have_different_meanings() -> None:
    names = sort_by_meaning(GRPO)

    assert names[:7] == [
        "reward",
        "loss",
        "entropy",
        "kl",
        "grad_norm",
        "num_tokens",
        "learning_rate",
    ]
    assert sorted(names) == sorted(GRPO)


def test_summary_has_the_reward_and_the_number_of_other_metrics() -> None:
    rows = [{"step": step, **dict.fromkeys(GRPO, float(step))} for step in (1, 2, 3)]

    lines = list(_summarize_metrics(rows))

    assert lines[0] == "reward: first 1, last 3, range 1 to 3"
    assert len(lines) == 9
    assert lines[-1].startswith("and 9 more metrics (see `muster metrics`): ")


def test_metrics_below_data_are_summarised() -> None:
    rows = [{"step": 1, "data": {"critic/rewards/mean": 0.5}}]

    assert list(_summarize_metrics(rows)) == [
        "critic/rewards/mean: first 0.5, last 0.5, range 0.5 to 0.5"
    ]


def test_metric_that_is_missing_in_the_last_line_is_summarised() -> None:
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "loss": 1.0}]

    assert [line.partition(":")[0] for line in _summarize_metrics(rows)] == ["reward", "loss"]


def test_name_that_ends_with_the_word_data_is_shown_whole() -> None:
    rows = [{"step": 1, "traindata": {"loss": 2.0}, "data": {"reward": 0.5}}]

    names = [line.partition(":")[0] for line in _summarize_metrics(rows)]

    assert names == ["reward", "traindata.loss"]
