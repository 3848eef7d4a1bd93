"""Group-relative policy optimisation of a transformers model, and the judgement on its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from digits_task import ANSWER_TOKENS, reward_of, tokens_of
from rollout_client import Answer
from tiny_model import END
from torch import Tensor
from torch.func import functional_call
from transformers import LlamaForCausalLM

#: How far a token's probability ratio may move from 1 before its gradient is cut.
CLIP_RANGE = 0.2
#: Maximal norm of the gradient. A longer gradient is scaled down to this norm.
GRADIENT_NORM = 1.0

#: A model's weights by their names.
Weights = Mapping[str, Tensor]


class OutOfStep(Exception):
    """An engine answered with weights other than those of the version that the gateway named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The answers to one prompt."""

    prompt: str
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The answers of one training step, one row per answer."""

    answers: Sequence[Answer]
    #: Prompts and answers, padded on the right, [row, token]
    tokens: Tensor
    #: 1 for each token that was generated, [row, ANSWER_TOKENS]
    mask: Tensor
    #: Log-probabilities of the tokens in nats, as the engines reported them, [row, ANSWER_TOKENS]
    old_log_probs: Tensor
    #: [row]
    advantages: Tensor
    #: Mean reward, 0 to 1
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Metrics of one training step."""

    reward: float
    #: Nats per token
    entropy: float
    loss: float
    #: Fraction of tokens whose gradient was cut, 0 to 1
    clip_fraction: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How far the engines' log-probabilities were from those of the weights that they named."""

    #: The largest difference in nats
    gap: float
    #: The least that it would have been, over the versions, by the weights of the one before:
    #: what the judgement would have seen; None where no earlier weights are known
    gap_before: float | None


def batch_of(groups: Sequence[Group]) -> Batch:
    """Convert the groups to tensors. All prompts must have the same length."""
    answers = [answer for group in groups for answer in group.answers]
    rows = [
        [*tokens_of(group.prompt), *_padded(answer.tokens, END)]
        for group in groups
        for answer in group.answers
    ]
    rewards = [torch.tensor([reward_of(one.tokens) for one in group.answers]) for group in groups]
    return Batch(
        answers=answers,
        tokens=torch.tensor(rows),
        mask=torch.tensor([_padded([1.0] * len(one.tokens), 0.0) for one in answers]),
        old_log_probs=torch.tensor([_padded(one.log_probs, 0.0) for one in answers]),
        advantages=torch.cat([_advantages(one) for one in rewards]),
        reward=float(torch.cat(rewards).mean()),
    )


def _padded(values: Sequence[float], filler: float) -> list[float]:
    return [*values, *[filler] * (ANSWER_TOKENS - len(values))]


def _advantages(rewards: Tensor) -> Tensor:
    """Return each reward relative to the mean of the group, in standard deviations."""
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)


def log_probs_of(model: LlamaForCausalLM, tokens: Tensor, weights: Weights | None = None) -> Tensor:
    """Of every token of the vocabulary at each place of the answers, [row, place, token].

    Args:
        weights: in place of the model's own.
    """
    inputs = (tokens[:, :-1],)
    output = model(*inputs) if weights is None else functional_call(model, dict(weights), inputs)
    log_probs: Tensor = output.logits[:, -ANSWER_TOKENS:].log_softmax(dim=-1)
    return log_probs


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch
) -> StepStats:
    """Change the model by one clipped step on a batch.

    Raises: FloatingPointError, where the loss is no longer finite; the model is as it was.
    """
    log_probs = log_probs_of(model, batch.tokens)
    ratios = (_chosen(log_probs, batch) - batch.old_log_probs).exp()
    unclipped = ratios * batch.advantages[:, None]
    clipped = ratios.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * batch.advantages[:, None]
    tokens = batch.mask.sum()
    loss = -(torch.minimum(unclipped, clipped) * batch.mask).sum() / tokens
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss.item()}")
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


def _chosen(log_probs: Tensor, batch: Batch) -> Tensor:
    """Return the log-probabilities of the sampled tokens, [row, ANSWER_TOKENS]."""
    return log_probs.gather(-1, batch.tokens[:, -ANSWER_TOKENS:, None])[..., 0]


def judge(
    model: LlamaForCausalLM, batch: Batch, known: Mapping[int, Weights], *, tolerance: float
) -> Judgement:
    """Recompute every answer with the weights of the version that it names.

    Args:
        known: `known[version]`.
        tolerance: in nats; a larger difference is a judgement against the engine.

    Raises: OutOfStep.
    """
    gap, before = 0.0, []
    for version in sorted({one.version for one in batch.answers}):
        rows = [row for row, one in enumerate(batch.answers) if one.version == version]
        if version not in known:
            raise OutOfStep(f"{_who(batch.answers[rows[0]])}, which is not known here")
        gaps = _gaps(model, batch, known[version])[rows]
        worst = int(gaps.argmax())
        if not gaps[worst] <= tolerance:
            row = rows[worst]
            fits = min(known, key=lambda one: float(_gaps(model, batch, known[one])[row]))
            raise OutOfStep(
                f"{_who(batch.answers[row])}, and its log-probabilities are {gaps[worst]:.3g} nats "
                f"off; those of version {fits} fit best"
            )
        gap = max(gap, float(gaps[worst]))
        if earlier := [one for one in known if one < version]:
            before.append(float(_gaps(model, batch, known[max(earlier)])[rows].max()))
    return Judgement(gap=gap, gap_before=min(before, default=None))


def _gaps(model: LlamaForCausalLM, batch: Batch, weights: Weights) -> Tensor:
    """Return the largest difference of each answer, [row]."""
    with torch.no_grad():
        recomputed = _chosen(log_probs_of(model, batch.tokens, weights), batch)
    return ((recomputed - batch.old_log_probs).abs() * batch.mask).amax(dim=1)


def _who(answer: Answer) -> str:
    return f"engine {answer.engine}, epoch {answer.epoch}, answered as version {answer.version}"
