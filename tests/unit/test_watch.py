"""Tests of the alarm rules, with curves of healthy and failing trainings."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deployments" / "quickstart"))

from atropos_api import NOT_GENERATED, build_batch
from copy_task import ANSWER_TOKENS, build_prompt, compute_reward, draw_digits
from grpo import DEFAULT_LEARNING_RATE, initial_state, train_step
from sampler import Sampler

from tasks.processes.containment import Containment, Level
from tasks.record.places import AttemptPlace
from tasks.record.run_json import AttemptRecord
from tasks.spec.errors import InvalidSpec
from tasks.spec.run import RunSpec
from tasks.spec.watch import Alarms, Watch, advise_about_values, find_metric
from tasks.spec.workloads import WORKLOADS
from tasks.train.plan import PlanInputs

Lines = Iterable[dict[str, object]]


def simulate_training(
    seed: int, *, steps: int, rate: float = DEFAULT_LEARNING_RATE, reward: float | None = None
) -> Lines:
    """Return the metrics of the quickstart's training, simulated without its processes.

    Args:
        seed: Seed of all random numbers.
        steps: Number of training steps.
        rate: Learning rate.
        reward: Constant reward of all answers. None means their real reward.
    """
    for_weights, for_sampling = np.random.SeedSequence(seed).spawn(2)
    state = initial_state(np.random.default_rng(for_weights))
    sampler = Sampler(state.policy, step=0, rng=np.random.default_rng(for_sampling))
    rng = random.Random(seed)
    for _ in range(steps):
        groups = []
        for digits in [draw_digits(rng) for _ in range(16)]:
            prompt = build_prompt(digits)
            answers = sampler.sample(prompt, count=8, max_tokens=ANSWER_TOKENS)
            scores = [
                compute_reward(digits, answer.tokens) if reward is None else reward
                for answer in answers
            ]
            groups.append(
                {
                    "tokens": [[*prompt, *answer.tokens] for answer in answers],
                    "masks": [
                        [NOT_GENERATED] * len(prompt) + [*answer.tokens] for answer in answers
                    ],
                    "scores": scores,
                    "inference_logprobs": [
                        [1.0] * len(prompt) + [*answer.log_probs] for answer in answers
                    ],
                }
            )
        state, stats = train_step(state, build_batch(groups, group_size=8), learning_rate=rate)
        sampler.load(state.policy, step=state.step)
        yield {"step": state.step, "reward": stats.reward, "entropy": stats.entropy}


def find_alarms(
    lines: Lines, watch: Watch | None = None, workload: str = "grpo"
) -> dict[str, float]:
    """Return a mapping from the name of each rule that raised an alarm to the step of the alarm.

    Args:
        lines: Lines of the metrics file, one for each step.
        watch: Section `watch` of the spec. If None, the preset rules apply.
        workload: Workload of the run, which decides the preset rules.
    """
    alarms = Alarms((watch or Watch()).choose_rules(workload))
    found = [alarm for line in lines for alarm in alarms.evaluate(float(str(line["step"])), line)]
    assert len({alarm.rule for alarm in found}) == len(found), "one was heard twice"
    return {alarm.rule: alarm.step for alarm in found}


def curve(name: str, values: Iterable[float | str | None]) -> Lines:
    return [{"step": step, name: value} for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0] + [None] * 9, {}),
        ([1.0] + [None] * 10, {"loss_not_finite": 11}),
        ([None] * 10, {"loss_not_finite": 10}),
        # The trainer writes the metric only every 10 steps. The 9 null values between two numbers
        # raise no alarm.
        (([1.0] + [None] * 9) * 3, {}),
        # The values end with 18 null values (9 + 9). The longest earlier series has 9 null values.
        # A series of at least twice this length raises an alarm.
        (([1.0] + [None] * 9) * 3 + [None] * 9, {"loss_not_finite": 39}),
    ],
)
def test_many_null_values_in_a_row_raise_an_alarm(
    values: list[float | None], found: dict[str, float]
) -> None:
    assert find_alarms(curve("loss", values), workload="sft") == found


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 0.5], ""),
        ([1.0, math.nan, math.nan], "loss is nan since step 2"),
        ([1.0, "-inf"], "loss is -inf since step 2"),
        ([1.0, math.nan, 0.5], ""),
        ([1.0, math.nan, None], "loss is nan since step 2"),
        ([1.0] + [None] * 9, ""),
        ([1.0] + [None] * 20, "loss is null since step 2"),
        ([1.0] + [None] * 20 + [0.5], ""),
    ],
)
def test_metrics_that_end_without_a_finite_value_are_described(
    values: list[float | str | None], text: str
) -> None:
    alarms = Alarms(Watch().choose_rules("sft"))

    for step, value in enumerate(values, 1):
        alarms.evaluate(step, {"step": step, "loss": value})

    assert alarms.describe_not_finite() == text
    assert bool(advise_about_values(alarms.not_finite_values)) is bool(text)


@pytest.mark.parametrize("seed", range(10))
def test_healthy_training_raises_no_alarm(seed: int) -> None:
    assert find_alarms(simulate_training(seed, steps=60)) == {}


@pytest.mark.parametrize("rate", [0.5, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_divergence_raises_an_alarm_within_fifteen_steps(seed: int, rate: float) -> None:
    assert find_alarms(simulate_training(seed, steps=15, rate=rate))


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_constant_reward_raises_an_alarm_within_fifteen_steps(reward: float) -> None:
    assert find_alarms(simulate_training(0, steps=15, reward=reward)) == {"reward_constant": 10}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (curve("loss", [1.0, math.nan]), {"loss_not_finite": 2}),
        (curve("loss", [1.0, "NaN"]), {"loss_not_finite": 2}),
        (curve("actor/grad_norm", [1.0, math.inf]), {"gradient_not_finite": 2}),
        (curve("grad_norm", [5e3] * 3), {"gradient": 3}),
        (curve("grad_norm", [5e3, 1.0] * 20), {}),
        # metrics with the names that verl uses are recognized
        (
            [{"step": n, "data": {"actor/ppo_kl": 20.0}} for n in (1, 2, 3)],
            {"kl": 3},
        ),
        (curve("response_length/clip_ratio", [0.95] * 10), {"length": 10}),
        (curve("frac_reward_zero_std", [1.0] * 10), {"no_variance": 10}),
        # the reward rises and falls again, which raises an alarm
        (
            curve("reward", [*(n / 50 for n in range(50)), *([0.05, 0.07] * 5)]),
            {"reward_collapsed": 53},
        ),
        # the reward is high from the first step and then falls, which raises an alarm
        (curve("reward", [*([0.8, 0.78, 0.82] * 5), *([0.1, 0.12] * 4)]), {"reward_collapsed": 18}),
        # the reward rises and then stays almost the same, which raises no alarm
        (curve("reward", [-5.0, -4.0, -3.0, -2.0, -1.0, -1.1, -0.9, -1.2, -1.0]), {}),
    ],
)
def test_alarms_name_the_broken_rule_and_the_step(lines: Lines, found: dict[str, float]) -> None:
    assert find_alarms(lines) == found


def test_noise_is_not_a_collapse() -> None:
    rng = random.Random(7)
    for mean, spread in ((0.0, 1.0), (0.3, 0.15), (-2.0, 0.5), (10.0, 1.0)):
        lines = curve("reward", [rng.gauss(mean, spread) for _ in range(2000)])
        assert find_alarms(lines) == {}, (mean, spread)


def test_loss_that_rises_back_to_its_start_raises_an_alarm() -> None:
    falls = [2.5 * 0.95**n + 0.3 for n in range(60)]
    lines = curve("train/loss", [*falls, *([4.0] * 12)])

    assert [*find_alarms(lines, workload="sft")] == ["loss_rising"]
    assert find_alarms(curve("loss", falls), workload="sft") == {}


@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name != "step"])
def test_nan_loss_raises_an_alarm_in_every_workload(workload: str) -> None:
    assert "loss_not_finite" in find_alarms(curve("loss", [1.0, math.nan]), workload=workload)


@pytest.mark.parametrize(
    ("entry", "names", "metric"),
    [
        ({"train": {"loss": 0.5}}, ["loss", "train/loss"], ("train/loss", 0.5)),
        ({"reward": {"mean": 2.0}}, ["reward", "reward/mean"], ("reward/mean", 2.0)),
        ({"data": {"train": {"loss": 0.5}}}, ["train/loss"], ("train/loss", 0.5)),
        ({"train": 0.5}, ["train/loss"], None),
    ],
)
def test_nested_metric_is_found_by_its_name_with_a_slash(
    entry: dict[str, object], names: list[str], metric: tuple[str, float] | None
) -> None:
    assert find_metric(entry, names) == metric


def test_nan_of_a_nested_loss_raises_an_alarm() -> None:
    lines = [{"step": step, "train": {"loss": value}} for step, value in ((1, 1.0), (2, math.nan))]

    assert "loss_not_finite" in find_alarms(lines, workload="sft")


@pytest.mark.parametrize(
    ("workload", "found"),
    [
        ("dpo", ["loss_rising"]),
        ("rm", ["loss_rising"]),
        ("pretrain", ["loss_rising"]),
        ("other", []),
    ],
)
def test_rising_loss_is_an_alarm_if_the_workload_minimises_the_loss(
    workload: str, found: list[str]
) -> None:
    falls = [2.5 * 0.95**n + 0.3 for n in range(60)]
    lines = curve("train/loss", [*falls, *([4.0] * 12)])

    assert [*find_alarms(lines, workload=workload)] == found


def test_rules_forget_values_after_a_return_to_a_checkpoint() -> None:
    lines = [*curve("reward", [0.5] * 9), {"step": 5, "reward": 0.5}]

    assert find_alarms(lines) == {}


def test_own_rules_extend_the_preset() -> None:
    rules: dict[str, object] = {
        "reward_collapsed": {"then": "stop"},
        "entropy_spent": {"metric": "my_entropy", "below": 0.1},
        "kl": {"metric": ["my_kl"], "above": 0.1, "for_steps": 1, "then": "stop"},
        "reward_constant": None,
    }
    watch = Watch.model_validate({"rules": rules})

    found = watch.choose_rules("grpo")

    assert (found["kl"].then, found["length"].then) == ("stop", "tell")
    assert "reward_constant" not in found
    collapsed, entropy = found["reward_collapsed"], found["entropy_spent"]
    assert (collapsed.then, collapsed.loses, len(collapsed.metric) > 1) == ("stop", 0.5, True)
    assert (entropy.metric, entropy.below, entropy.spent) == (("my_entropy",), 0.1, None)
    assert find_alarms([{"step": 1, "my_kl": 0.2}], watch) == {"kl": 1}
    assert Watch.model_validate({"preset": "none"}).choose_rules("grpo") == {}


@pytest.mark.parametrize(
    ("watch", "path"),
    [
        ({"rules": {"a": {"metric": ["x"]}}}, "watch.rules.a"),
        ({"rules": {"a": {"metric": ["x"], "above": 1, "below": 2}}}, "watch.rules.a"),
        ({"rules": {"a": {"above": 1}}}, "watch.rules.a"),
        ({"rules": {"a": {"metric": ["x"], "loses": 2}}}, "watch.rules.a.loses"),
        ({"preset": "dance"}, "watch.preset"),
        ({"then": "panic"}, "watch.then"),
    ],
)
def test_faulty_rule_is_reported(watch: dict[str, object], path: str) -> None:
    spec = {
        "name": "a",
        "workload": "grpo",
        "components": {"trainer": {"command": ["true"]}},
        "progress": {"jsonl": "m.jsonl", "step": "step"},
        "watch": watch,
    }
    with pytest.raises(InvalidSpec) as refused:
        RunSpec.model_validate(spec)

    assert [fault.path for fault in refused.value.faults] == [path]


@pytest.mark.parametrize("times", [2, 10])
def test_several_lines_of_a_step_count_once(times: int) -> None:
    rng = random.Random(1)
    values = [rng.gauss(0.3, 0.12) for _ in range(120)]
    lines = [{"step": n, "reward": value} for n, value in enumerate(values) for _ in range(times)]

    assert find_alarms(lines) == {}


@pytest.mark.parametrize("entropy", [-0.69, 0.0])
def test_entropy_that_was_never_positive_is_not_spent(entropy: float) -> None:
    lines = [{"step": n, "entropy": entropy, "reward": n % 7} for n in range(40)]

    assert find_alarms(lines) == {}


def test_bounds_apply_to_infinite_values() -> None:
    assert find_alarms([{"step": n, "kl": float("inf")} for n in range(3)]) == {"kl": 2}


def test_resumed_attempt_skips_reward_constant_and_adopted_attempt_repeats_no_alarm(
    tmp_path: Path,
) -> None:
    component = {"command": ["true"]}
    progress = {"jsonl": "m", "step": "step"}
    written = {"name": "a", "workload": "grpo", "components": {"trainer": component}}
    spec = RunSpec.model_validate({**written, "progress": progress})
    place = AttemptPlace(directory=tmp_path, number=2)
    first = PlanInputs(spec=spec, run_id="a", place=place, containment=Containment(level=Level.L2))
    earlier_record = {
        "number": 2,
        "state": "running",
        "alarms": [{"rule": "kl", "message": "kl: 20"}],
    }
    adopted = AttemptRecord.model_validate({**earlier_record, "started_at": 1.0})

    rules, resumed, again = (
        set(one.plan().alarms)
        for one in (first, replace(first, resumes=True), replace(first, adopted=adopted))
    )

    assert rules - resumed == {"reward_constant"} and rules - again == {"kl"}
