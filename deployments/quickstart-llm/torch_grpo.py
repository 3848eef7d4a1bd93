"""Group-relative policy optimisation (GRPO) of a transformers model.

The module also checks that each answer was sampled with the weights that its engine claims to have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from digits_task import ANSWER_TOKENS, compute_reward, tokenize
from rollout_client import Answer
from tiny_model import END
from torch import Tensor
from torch.func import functional_call
from transformers import LlamaForCausalLM

#: Clip range of GRPO, for the ratio of a token's new probability to its old probability. The
#: gradient is 0 for ratios above 1 + CLIP_RANGE if the advantage is positive, and for ratios below
#: 1 - CLIP_RANGE if the advantage is negative.
CLIP_RANGE = 0.2
#: Maximal norm of the gradient. A longer gradient is scaled down to this norm.
GRADIENT_NORM = 1.0

#: Mapping from the name of a weight of the model to the weight.
Weights = Mapping[str, Tensor]


class OutOfStep(Exception):
    """The weight version of an answer is wrong, or the weights of this version are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and the answers that were sampled for it."""

    prompt: str
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The answers of one training step as tensors, with one row per answer."""

    #: The answers, in the order of the rows of the tensors below.
    answers: Sequence[Answer]
    #: Tokens of prompts and answers, padded on the right. Shape: (rows, tokens).
    tokens: Tensor
    #: 1 for each generated token and 0 for padding. Shape: (rows, ANSWER_TOKENS).
    mask: Tensor
    #: Log-probabilities of the tokens in nats, as the engines reported them. Shape: (rows,
    #: ANSWER_TOKENS).
    old_log_probs: Tensor
    #: GRPO's advantage of each answer: its reward minus the mean reward of its group, in standard
    #: deviations of the group. Shape: (rows,).
    advantages: Tensor
    #: Mean reward of the answers, from 0 to 1.
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Metrics of one training step."""

    #: Mean reward of the answers, from 0 to 1.
    reward: float
    #: Mean entropy of the policy in nats per token.
    entropy: float
    loss: float
    #: Fraction of tokens whose gradient was set to 0 by the clipping, from 0 to 1.
    clip_fraction: float
    #: Number of generated tokens in the batch.
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """Comparison of recomputed log-probabilities with those that the engines reported.

    The values are recomputed with the weights that the engine should have used.
    """

    #: Largest difference between a reported and a recomputed log-probability, in nats.
    gap: float
    #: Like `gap`, but the log-probabilities are recomputed with wrong weights on purpose. If an
    #: engine sampled the answers with weight version N, the wrong weights are the newest kept
    #: version before N. The check can detect wrong weights only if this value is much larger than
    #: `gap`. If several versions sampled the answers, one value is computed for each version, and
    #: the smallest value is stored here. None if no such earlier version is kept.
    gap_before: float | None


def build_batch(groups: Sequence[Group]) -> Batch:
    """Convert groups to a batch of tensors. All prompts must have the same length."""
    answers = [answer for group in groups for answer in group.answers]
    rows = [
        [*tokenize(group.prompt), *_pad(answer.tokens, END)]
        for group in groups
        for answer in group.answers
    ]
    rewards = [
        torch.tensor([compute_reward(answer.tokens) for answer in group.answers])
        for group in groups
    ]
    return Batch(
        answers=answers,
        tokens=torch.tensor(rows),
        mask=torch.tensor([_pad([1.0] * len(answer.tokens), 0.0) for answer in answers]),
        old_log_probs=torch.tensor([_pad(answer.log_probs, 0.0) for answer in answers]),
        advantages=torch.cat([_compute_advantages(group_rewards) for group_rewards in rewards]),
        reward=float(torch.cat(rewards).mean()),
    )


def _pad(values: Sequence[float], filler: float) -> list[float]:
    """Return the values, extended with the filler to a length of ANSWER_TOKENS."""
    return [*values, *[filler] * (ANSWER_TOKENS - len(values))]


def _compute_advantages(rewards: Tensor) -> Tensor:
    """Return each reward minus the group's mean reward, in standard deviations of the group."""
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)


def compute_log_probs(
    model: LlamaForCausalLM, tokens: Tensor, weights: Weights | None = None
) -> Tensor:
    """Return the log-probability of each token of the vocabulary at each position of the answers.

    Args:
        model: The model.
        tokens: Tokens of prompts and answers. Shape: (rows, tokens).
        weights: Weights to use instead of the model's own weights, or None.

    Returns:
        Log-probabilities in nats. Shape: (rows, positions, len(vocabulary)).
    """
    inputs = (tokens[:, :-1],)
    output = model(*inputs) if weights is None else functional_call(model, dict(weights), inputs)
    log_probs: Tensor = output.logits[:, -ANSWER_TOKENS:].log_softmax(dim=-1)
    return log_probs


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch
) -> StepStats:
    """Train the model by one GRPO step with clipping on a batch, and return the step's metrics.

    Raises:
        FloatingPointError: The loss is not finite. The model is unchanged.
    """
    log_probs = compute_log_probs(model, batch.tokens)
    ratios = (_select_sampled(log_probs, batch) - batch.old_log_probs).exp()
    unclipped = ratios * batch.advantages[:, None]
    clipped = ratios.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * batch.advantages[:, None]
    tokens = batch.mask.sum()
    loss = -(torch.minimum(unclipped, clipped) * batch.mask).sum() / tokens
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss must be a finite number, found {loss.item()}")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return StepStats(
            reward=batch.reward,
            entropy=float((entropy * batch.mask).sum() / tokens),
            loss=float(loss),
            clip_fraction=float(((clipped < unclipped) * batch.mask).sum() / tokens),
            tokens=int(tokens),
        )


def _select_sampled(log_probs: Tensor, batch: Batch) -> Tensor:
    """Return the log-probabilities of the sampled tokens. Shape: (rows, ANSWER_TOKENS)."""
    return log_probs.gather(-1, batch.tokens[:, -ANSWER_TOKENS:, None])[..., 0]


def check_answers(
    model: LlamaForCausalLM,
    batch: Batch,
    kept_weights: Mapping[int, Weights],
    *,
    tolerance: float,
) -> AnswerCheck:
    """Recompute the log-probabilities of each answer, and compare the reported values with them.

    Args:
        model: The model, whose own weights are not used.
        batch: The answers.
        kept_weights: Mapping from a version to its weights, for all versions that are still kept.
        tolerance: Largest difference of two log-probabilities that is accepted, in nats.

    Raises:
        OutOfStep: A difference exceeds the tolerance, or the weights of a version are not kept.
    """
    largest_gap = 0.0
    gaps_before = []
    for version in sorted({answer.version for answer in batch.answers}):
        rows = [row for row, answer in enumerate(batch.answers) if answer.version == version]
        if version not in kept_weights:
            source = _describe_source(batch.answers[rows[0]])
            raise OutOfStep(f"{source}, but the trainer no longer has these weights")

        gaps = _compute_gaps(model, batch, kept_weights[version])[rows]
        worst = int(gaps.argmax())
        # Use `not a <= b` instead of `a > b`, because only the former is true if the difference is
        # NaN.
        if not gaps[worst] <= tolerance:
            row = rows[worst]
            best_version = min(
                kept_weights,
                key=lambda version: float(_compute_gaps(model, batch, kept_weights[version])[row]),
            )
            raise OutOfStep(
                f"{_describe_source(batch.answers[row])}, but the log-probabilities of "
                f"this answer differ by {gaps[worst]:.3g} nats from the trainer's values. The "
                f"weights of version {best_version} fit the answer best"
            )
        largest_gap = max(largest_gap, float(gaps[worst]))

        earlier_versions = [kept for kept in kept_weights if kept < version]
        if earlier_versions:
            earlier_weights = kept_weights[max(earlier_versions)]
            gaps_before.append(float(_compute_gaps(model, batch, earlier_weights)[rows].max()))
    return AnswerCheck(gap=largest_gap, gap_before=min(gaps_before, default=None))


def _compute_gaps(model: LlamaForCausalLM, batch: Batch, weights: Weights) -> Tensor:
    """Return the largest difference between reported and recomputed log-probabilities, in nats.

    Args:
        model: The model.
        batch: The answers with the reported log-probabilities.
        weights: Weights for the recomputation.

    Returns:
        The largest difference of each answer. Shape: (rows,).
    """
    with torch.no_grad():
        recomputed = _select_sampled(compute_log_probs(model, batch.tokens, weights), batch)
    return ((recomputed - batch.old_log_probs).abs() * batch.mask).amax(dim=1)


def _describe_source(answer: Answer) -> str:
    """Return a text with the engine, the engine's epoch and the weight version of an answer."""
    return (
        f"engine {answer.engine} (start number {answer.epoch}) answered with weights of version "
        f"{answer.version}"
    )
