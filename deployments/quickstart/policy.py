"""The policy: a perceptron with one hidden layer that predicts a token from the last five tokens.

All functions of this module return new objects. A `Policy` is never changed in place, so a thread
may sample from a policy while the trainer computes the next policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from copy_task import ANSWER_TOKENS, PAD, VOCABULARY
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]

#: Number of preceding tokens that the policy reads. These tokens include the digit that the policy
#: must repeat next.
CONTEXT_TOKENS = ANSWER_TOKENS
#: Number of units of the hidden layer.
HIDDEN_UNITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Arrays with the weights of the policy.

    The class is also used for other values with one number per weight: the gradients, and the
    moving averages of the optimizer Adam.
    """

    #: Weights of the hidden layer. Shape: (CONTEXT_TOKENS * len(VOCABULARY), HIDDEN_UNITS).
    hidden_weight: Floats
    #: Biases of the hidden layer. Shape: (HIDDEN_UNITS,).
    hidden_bias: Floats
    #: Weights of the output layer. Shape: (HIDDEN_UNITS, len(VOCABULARY)).
    output_weight: Floats
    #: Biases of the output layer. Shape: (len(VOCABULARY),).
    output_bias: Floats


#: Names of the fields of `Policy`.
WEIGHT_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Policy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Result of a forward pass, with the values that the backward pass needs."""

    #: Contexts in one-hot encoding. Shape: (rows, CONTEXT_TOKENS * len(VOCABULARY)).
    inputs: Floats
    #: Activations of the hidden layer. Shape: (rows, HIDDEN_UNITS).
    hidden: Floats
    #: Log-probabilities of the next token in nats. Shape: (rows, len(VOCABULARY)).
    log_probs: Floats


def initial_policy(rng: np.random.Generator) -> Policy:
    """Return a policy with nearly uniform probabilities. Equal generators give equal weights."""
    inputs = CONTEXT_TOKENS * len(VOCABULARY)
    return Policy(
        hidden_weight=rng.normal(0.0, 1.0 / np.sqrt(CONTEXT_TOKENS), (inputs, HIDDEN_UNITS)),
        hidden_bias=np.zeros(HIDDEN_UNITS),
        output_weight=rng.normal(0.0, 0.1 / np.sqrt(HIDDEN_UNITS), (HIDDEN_UNITS, len(VOCABULARY))),
        output_bias=np.zeros(len(VOCABULARY)),
    )


def take_context(tokens: Sequence[int]) -> list[int]:
    """Return the last `CONTEXT_TOKENS` of `tokens`, padded on the left."""
    last_tokens = list(tokens[-CONTEXT_TOKENS:])
    return [PAD] * (CONTEXT_TOKENS - len(last_tokens)) + last_tokens


def forward(policy: Policy, contexts: Tokens) -> Forward:
    """Run the policy on `contexts`, which have the shape (rows, CONTEXT_TOKENS)."""
    inputs = np.eye(len(VOCABULARY))[contexts].reshape(len(contexts), -1)
    hidden = np.tanh(inputs @ policy.hidden_weight + policy.hidden_bias)
    logits = hidden @ policy.output_weight + policy.output_bias
    logits -= logits.max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return Forward(inputs=inputs, hidden=hidden, log_probs=log_probs)


def backward(policy: Policy, forward_pass: Forward, logits_gradient: Floats) -> Policy:
    """Return the gradient of each weight.

    Args:
        policy: The weights of the forward pass.
        forward_pass: Result of the forward pass.
        logits_gradient: Gradient of the logits. Shape: (rows, len(VOCABULARY)).
    """
    hidden_gradient = (logits_gradient @ policy.output_weight.T) * (1.0 - forward_pass.hidden**2)
    return Policy(
        hidden_weight=forward_pass.inputs.T @ hidden_gradient,
        hidden_bias=hidden_gradient.sum(axis=0),
        output_weight=forward_pass.hidden.T @ logits_gradient,
        output_bias=logits_gradient.sum(axis=0),
    )
