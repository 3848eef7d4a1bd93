"""What the quickstart's trainer computes: advantages, the clipped loss, its gradient, Adam."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deployments" / "quickstart"))

from copy_task import EOS, VOCABULARY, prompt_of
from grpo import (
    CLIP_RANGE,
    Batch,
    group_advantages,
    initial_state,
    loss_and_gradient,
    train_step,
)
from policy import (
    CONTEXT_TOKENS,
    WEIGHT_NAMES,
    Policy,
    context_of,
    forward,
    initial_policy,
)


def a_policy(seed: int = 0) -> Policy:
    """A policy with opinions: a fresh one is so even that gradients nearly vanish."""
    policy = initial_policy(np.random.default_rng(seed))
    return replace(policy, output_weight=policy.output_weight * 20)


def a_batch(policy: Policy, *, seed: int = 0, rows: int = 40, drift: float = 0.4) -> Batch:
    """Random tokens, sampled by a policy whose log-probabilities are up to `drift` away."""
    rng = np.random.default_rng(seed)
    contexts = rng.integers(0, len(VOCABULARY), (rows, CONTEXT_TOKENS))
    actions = rng.integers(0, len(VOCABULARY), rows)
    now = forward(policy, contexts).log_probs[np.arange(rows), actions]
    return Batch(
        contexts=contexts,
        actions=actions,
        old_log_probs=now + rng.uniform(-drift, drift, rows),
        advantages=rng.normal(size=rows),
        mean_reward=0.5,
    )


def one_token_batch(policy: Policy, *, ratio: float, advantage: float) -> Batch:
    """One token that `policy` finds `ratio` times as likely as the policy that sampled it."""
    contexts = np.array([context_of(prompt_of([1, 2, 3, 4]))])
    now = forward(policy, contexts).log_probs[0, EOS]
    return Batch(
        contexts=contexts,
        actions=np.array([EOS]),
        old_log_probs=np.array([now - np.log(ratio)]),
        advantages=np.array([advantage]),
        mean_reward=0.5,
    )


def test_initial_policy_is_nearly_indifferent_between_all_tokens() -> None:
    contexts = np.array([context_of(prompt_of([1, 2, 3, 4])), context_of([])])

    probs = np.exp(forward(initial_policy(np.random.default_rng(0)), contexts).log_probs)

    assert probs.sum(axis=1) == pytest.approx([1, 1])
    assert probs == pytest.approx(np.full(probs.shape, 1 / len(VOCABULARY)), abs=0.05)


def test_equal_seeds_give_equal_policies_and_other_seeds_give_others() -> None:
    first, again, other = (initial_policy(np.random.default_rng(seed)) for seed in (7, 7, 8))

    assert np.array_equal(first.hidden_weight, again.hidden_weight)
    assert not np.array_equal(first.hidden_weight, other.hidden_weight)


@pytest.mark.parametrize(
    ("tokens", "context"),
    [
        # Shorter than the context: padded on the left.
        ([], ["<pad>"] * 5),
        ([7], ["<pad>"] * 4 + ["7"]),
        # Longer: the oldest tokens fall out.
        ([1, 2, 3, 4, 10, 1], ["2", "3", "4", "=", "1"]),
    ],
)
def test_context_is_the_last_five_tokens(tokens: list[int], context: list[str]) -> None:
    assert [VOCABULARY[token] for token in context_of(tokens)] == context


def test_advantages_of_a_group_have_mean_zero_and_deviation_one() -> None:
    advantages = group_advantages(np.array([0.0, 0.2, 0.2, 1.0]))

    assert advantages.mean() == pytest.approx(0)
    assert advantages.std() == pytest.approx(1)
    assert list(advantages.argsort())[-1] == 3


def test_group_with_equal_rewards_teaches_nothing() -> None:
    assert list(group_advantages(np.array([0.6, 0.6, 0.6]))) == [0, 0, 0]


@pytest.mark.parametrize("name", WEIGHT_NAMES)
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    policy = a_policy()
    batch = a_batch(policy)
    stats, gradient = loss_and_gradient(policy, batch)
    weights = getattr(policy, name)
    nudge = 1e-5
    for at in np.random.default_rng(1).integers(0, weights.size, 25):
        losses = []
        for sign in (1, -1):
            nudged = weights.copy()
            nudged.flat[at] += sign * nudge
            losses.append(loss_and_gradient(replace(policy, **{name: nudged}), batch)[0].loss)

        slope = (losses[0] - losses[1]) / (2 * nudge)

        assert getattr(gradient, name).flat[at] == pytest.approx(slope, rel=1e-4, abs=1e-8)
    assert 0 < stats.clip_fraction < 1, "both branches of the loss must be in the batch"


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [
        # A good token is encouraged until it is CLIP_RANGE likelier than it was.
        (1.0, +1.0, False),
        (1.0 + CLIP_RANGE - 0.01, +1.0, False),
        (1.0 + CLIP_RANGE + 0.01, +1.0, True),
        # One that has become unlikelier is brought back, however far it went.
        (0.1, +1.0, False),
        # A bad token is discouraged until it is CLIP_RANGE unlikelier.
        (1.0 - CLIP_RANGE + 0.01, -1.0, False),
        (1.0 - CLIP_RANGE - 0.01, -1.0, True),
        # One that has become likelier is brought back.
        (3.0, -1.0, False),
    ],
)
def test_gradient_is_cut_where_the_policy_moved_far_enough(
    ratio: float, advantage: float, cut: bool
) -> None:
    policy = a_policy()

    stats, gradient = loss_and_gradient(
        policy, one_token_batch(policy, ratio=ratio, advantage=advantage)
    )

    assert stats.clip_fraction == (1.0 if cut else 0.0)
    assert np.any(gradient.output_bias) != cut


def test_loss_is_zero_on_policy() -> None:
    policy = a_policy()
    batch = a_batch(policy, drift=0.0)
    centred = replace(batch, advantages=batch.advantages - batch.advantages.mean())

    stats, _ = loss_and_gradient(policy, centred)

    assert stats.loss == pytest.approx(0)
    assert stats.clip_fraction == 0


def test_step_makes_a_rewarded_token_likelier() -> None:
    state = initial_state(np.random.default_rng(0))
    batch = one_token_batch(state.policy, ratio=1.0, advantage=1.0)

    after, stats = train_step(state, batch)

    before_log_prob, after_log_prob = (
        forward(policy, batch.contexts).log_probs[0, EOS] for policy in (state.policy, after.policy)
    )
    assert after_log_prob > before_log_prob
    assert (after.step, stats.tokens, stats.reward) == (1, 1, 0.5)


def test_first_adam_step_moves_each_weight_by_the_learning_rate() -> None:
    # With its bias corrected, Adam's first step is the gradient's sign times the learning rate.
    state = initial_state(np.random.default_rng(0))
    batch = a_batch(state.policy, drift=0.0)
    _, gradient = loss_and_gradient(state.policy, batch)

    after, _ = train_step(state, batch, learning_rate=0.01)

    moved = after.policy.output_bias - state.policy.output_bias
    assert moved == pytest.approx(-0.01 * np.sign(gradient.output_bias), rel=1e-3)


def test_step_leaves_the_old_state_alone() -> None:
    state = initial_state(np.random.default_rng(0))
    before = {name: getattr(state.policy, name).copy() for name in WEIGHT_NAMES}

    train_step(state, a_batch(state.policy))

    assert state.step == 0
    assert all(np.array_equal(getattr(state.policy, name), before[name]) for name in WEIGHT_NAMES)


def test_step_that_diverges_is_an_error() -> None:
    state = initial_state(np.random.default_rng(0))
    batch = replace(a_batch(state.policy), advantages=np.full(40, np.nan))

    with pytest.raises(FloatingPointError, match="step 1"):
        train_step(state, batch)
