"""Calculations of the quickstart's trainer: the clipped loss, its gradient, and a step of Adam."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deployments" / "quickstart"))

from copy_task import EOS, VOCABULARY, build_prompt
from grpo import CLIP_RANGE, Batch, initial_state, loss_and_gradient, train_step
from policy import CONTEXT_TOKENS, WEIGHT_NAMES, Policy, forward, initial_policy, take_context


def make_policy(seed: int = 0) -> Policy:
    """Return a policy with unequal probabilities.

    The probabilities of an untrained policy are almost equal, and its gradients are almost 0.
    """
    policy = initial_policy(np.random.default_rng(seed))
    return replace(policy, output_weight=policy.output_weight * 20)


def make_batch(policy: Policy, *, seed: int = 0, rows: int = 40, drift: float = 0.4) -> Batch:
    """Return a batch of random tokens.

    The old log-probabilities of the tokens differ from their log-probabilities under the policy.

    Args:
        policy: The policy.
        seed: Seed of the random numbers.
        rows: Number of tokens.
        drift: Largest difference between old and current log-probabilities, in nats.
    """
    rng = np.random.default_rng(seed)
    contexts = rng.integers(0, len(VOCABULARY), (rows, CONTEXT_TOKENS))
    actions = rng.integers(0, len(VOCABULARY), rows)
    log_probs = forward(policy, contexts).log_probs[np.arange(rows), actions]
    return Batch(
        contexts=contexts,
        actions=actions,
        old_log_probs=log_probs + rng.uniform(-drift, drift, rows),
        advantages=rng.normal(size=rows),
        mean_reward=0.5,
    )


def make_batch_of_one_token(policy: Policy, *, ratio: float, advantage: float) -> Batch:
    """Return a batch with one token.

    Args:
        policy: The policy.
        ratio: Probability of the token now, divided by its probability when it was sampled.
        advantage: Advantage of the token.
    """
    contexts = np.array([take_context(build_prompt([1, 2, 3, 4]))])
    log_prob = forward(policy, contexts).log_probs[0, EOS]
    return Batch(
        contexts=contexts,
        actions=np.array([EOS]),
        old_log_probs=np.array([log_prob - np.log(ratio)]),
        advantages=np.array([advantage]),
        mean_reward=0.5,
    )


@pytest.mark.parametrize("name", WEIGHT_NAMES)
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    policy = make_policy()
    batch = make_batch(policy)
    stats, gradient = loss_and_gradient(policy, batch)
    weights = getattr(policy, name)
    change = 1e-5
    for index in np.random.default_rng(1).integers(0, weights.size, 25):
        losses = []
        for sign in (1, -1):
            changed_weights = weights.copy()
            changed_weights.flat[index] += sign * change
            changed_policy = replace(policy, **{name: changed_weights})
            losses.append(loss_and_gradient(changed_policy, batch)[0].loss)

        slope = (losses[0] - losses[1]) / (2 * change)

        assert getattr(gradient, name).flat[index] == pytest.approx(slope, rel=1e-4, abs=1e-8)
    assert 0 < stats.clip_fraction < 1, "both branches of the loss must be in the batch"


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_cut"),
    [
        # The probability of a token with a positive advantage may rise by CLIP_RANGE.
        (1.0, +1.0, False),
        (1.0 + CLIP_RANGE - 0.01, +1.0, False),
        (1.0 + CLIP_RANGE + 0.01, +1.0, True),
        # If the advantage is positive and the probability has fallen, the gradient is not set to 0.
        (0.1, +1.0, False),
        # The probability of a token with a negative advantage may fall by CLIP_RANGE.
        (1.0 - CLIP_RANGE + 0.01, -1.0, False),
        (1.0 - CLIP_RANGE - 0.01, -1.0, True),
        # If the advantage is negative and the probability has risen, the gradient is not set to 0.
        (3.0, -1.0, False),
    ],
)
def test_gradient_is_cut_if_the_probability_changed_too_far(
    ratio: float, advantage: float, is_cut: bool
) -> None:
    policy = make_policy()
    batch = make_batch_of_one_token(policy, ratio=ratio, advantage=advantage)

    stats, gradient = loss_and_gradient(policy, batch)

    assert stats.clip_fraction == (1.0 if is_cut else 0.0)
    assert np.any(gradient.output_bias) != is_cut


def test_step_with_a_loss_that_is_not_finite_raises_an_error() -> None:
    state = initial_state(np.random.default_rng(0))
    batch = replace(make_batch(state.policy), advantages=np.full(40, np.nan))

    with pytest.raises(FloatingPointError, match="step 1"):
        train_step(state, batch)
