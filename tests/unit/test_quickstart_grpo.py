"""What the quickstart's trainer computes: advantages, the clipped loss, its gradient, Adam."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deployments" / "quickstart"))

from copy_task import EOS, VOCABULARY, prompt_of
from grpo import CLIP_RANGE, Batch, initial_state, loss_and_gradient, train_step
from policy import CONTEXT_TOKENS, WEIGHT_NAMES, Policy, context_of, forward, initial_policy


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
def test_gradient_is_cut_where_the_policy_moved(ratio: float, advantage: float, cut: bool) -> None:
    policy = a_policy()

    stats, gradient = loss_and_gradient(
        policy, one_token_batch(policy, ratio=ratio, advantage=advantage)
    )

    assert stats.clip_fraction == (1.0 if cut else 0.0)
    assert np.any(gradient.output_bias) != cut


def test_step_that_diverges_is_an_error() -> None:
    state = initial_state(np.random.default_rng(0))
    batch = replace(a_batch(state.policy), advantages=np.full(40, np.nan))

    with pytest.raises(FloatingPointError, match="step 1"):
        train_step(state, batch)
