"""Group-relative policy optimisation (GRPO): one step of Adam for each batch of scored answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from policy import WEIGHT_NAMES, Floats, Policy, Tokens, backward, forward, initial_policy

#: Clip range of GRPO, for the ratio of a token's new probability to its old probability. The
#: gradient is 0 for ratios above 1 + CLIP_RANGE if the advantage is positive, and for ratios below
#: 1 - CLIP_RANGE if the advantage is negative.
CLIP_RANGE = 0.2
ADAM_BETA1 = 0.9
ADAM_BETA2 = 0.999
ADAM_EPSILON = 1e-8
DEFAULT_LEARNING_RATE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The answers of one training step, with one row per generated token."""

    #: The tokens before each generated token. Shape: (rows, CONTEXT_TOKENS).
    contexts: Tokens
    #: The generated tokens. Shape: (rows,).
    actions: Tokens
    #: Log-probability of the generated token when it was sampled, in nats. Shape: (rows,).
    old_log_probs: Floats
    #: Advantage of the answer that contains the generated token. Shape: (rows,).
    advantages: Floats
    #: Mean reward of the answers, from 0 to 1.
    mean_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The state of a training after a step: the policy and the moments of the optimizer Adam."""

    #: Number of finished training steps.
    step: int
    policy: Policy
    #: Adam's moving average of the gradient.
    first_moment: Policy
    #: Adam's moving average of the squared gradient.
    second_moment: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Metrics of one training step, measured before the weights changed."""

    #: Mean reward of the batch, from 0 to 1.
    reward: float
    #: Mean entropy of the policy in nats per generated token.
    entropy: float
    #: Negative clipped objective of GRPO. It is about 0 if the present policy sampled the answers,
    #: because the advantages of each group add up to 0.
    loss: float
    #: Share of tokens whose gradient was set to 0 by the clipping, from 0 to 1.
    clip_fraction: float
    #: Number of generated tokens in the batch.
    tokens: int


def initial_state(rng: np.random.Generator) -> TrainState:
    """Return an untrained policy. Adam's moments are 0. Equal generators give equal states."""
    policy = initial_policy(rng)
    zeros = _map_weights(np.zeros_like, policy)
    return TrainState(step=0, policy=policy, first_moment=zeros, second_moment=zeros)


def group_advantages(rewards: Floats) -> Floats:
    """Return the advantage of each answer: its reward minus the group's mean, in standard
    deviations.

    All advantages are 0 if all rewards of the group are equal.
    """
    spread = rewards.std()
    if spread < 1e-9:
        return np.zeros_like(rewards)
    advantages: Floats = (rewards - rewards.mean()) / spread
    return advantages


def loss_and_gradient(policy: Policy, batch: Batch) -> tuple[StepStats, Policy]:
    """Return the metrics of the batch under `policy`, and the gradient of the loss."""
    rows = np.arange(len(batch.actions))
    forward_pass = forward(policy, batch.contexts)
    probs = np.exp(forward_pass.log_probs)

    ratios = np.exp(forward_pass.log_probs[rows, batch.actions] - batch.old_log_probs)
    unclipped = ratios * batch.advantages
    clipped = np.clip(ratios, 1.0 - CLIP_RANGE, 1.0 + CLIP_RANGE) * batch.advantages
    cut = clipped < unclipped

    # First compute the gradient of the loss with respect to the log-probabilities of the generated
    # tokens, and then the gradient with respect to the logits.
    log_prob_gradient = np.where(cut, 0.0, -unclipped) / len(rows)
    logits_gradient = -probs * log_prob_gradient[:, None]
    logits_gradient[rows, batch.actions] += log_prob_gradient

    stats = StepStats(
        reward=batch.mean_reward,
        entropy=float(-(probs * forward_pass.log_probs).sum(axis=1).mean()),
        loss=float(-np.minimum(unclipped, clipped).mean()),
        clip_fraction=float(cut.mean()),
        tokens=len(rows),
    )
    return stats, backward(policy, forward_pass, logits_gradient)


def train_step(
    state: TrainState, batch: Batch, *, learning_rate: float = DEFAULT_LEARNING_RATE
) -> tuple[TrainState, StepStats]:
    """Return the state after one step of Adam on `batch`, and the metrics of the step.

    `state` is not changed.

    Raises:
        FloatingPointError: A weight is no longer finite.
    """
    stats, gradient = loss_and_gradient(state.policy, batch)
    step = state.step + 1
    first_moment = _map_weights(
        lambda m, g: ADAM_BETA1 * m + (1 - ADAM_BETA1) * g, state.first_moment, gradient
    )
    second_moment = _map_weights(
        lambda v, g: ADAM_BETA2 * v + (1 - ADAM_BETA2) * g**2, state.second_moment, gradient
    )

    def update(weight: Floats, mean: Floats, square: Floats) -> Floats:
        mean = mean / (1 - ADAM_BETA1**step)
        square = square / (1 - ADAM_BETA2**step)
        return weight - learning_rate * mean / (np.sqrt(square) + ADAM_EPSILON)

    policy = _map_weights(update, state.policy, first_moment, second_moment)
    if not all(np.isfinite(getattr(policy, name)).all() for name in WEIGHT_NAMES):
        raise FloatingPointError(
            f"the weights after step {step} contain NaN or infinite numbers ({stats})"
        )
    next_state = replace(
        state, step=step, policy=policy, first_moment=first_moment, second_moment=second_moment
    )
    return next_state, stats


def _map_weights(function: Callable[..., Floats], *weights: Policy) -> Policy:
    """Return a policy whose weights are the results of `function`.

    For each weight name, `function` is called once, with the weights of this name from all given
    policies.
    """
    return Policy(
        **{name: function(*(getattr(policy, name) for policy in weights)) for name in WEIGHT_NAMES}
    )
