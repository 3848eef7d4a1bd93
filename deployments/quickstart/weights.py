"""Convert the policy's weights to bytes for an inference server, and back."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass

import numpy as np
from policy import WEIGHT_NAMES, Policy, initial_policy


class BadWeights(Exception):
    """The bytes are not weights of this policy. The message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a policy after a training step, and the number of that step."""

    policy: Policy
    step: int

    def as_bytes(self) -> bytes:
        """Return the weights as the content of an .npz file. `Weights.of` reads this content."""
        content = io.BytesIO()
        arrays = {name: getattr(self.policy, name) for name in WEIGHT_NAMES}
        np.savez(content, step=np.array(self.step), **arrays)
        return content.getvalue()

    @staticmethod
    def of(content: bytes) -> Weights:
        """Read weights from the content of an .npz file.

        Raises:
            BadWeights: The content is not an .npz file, an array is missing, or an array has a
                wrong shape or contains NaN or infinity.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                policy = Policy(**{name: arrays[name] for name in WEIGHT_NAMES})
                step = int(arrays["step"])
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise BadWeights(f"not weights: {error}") from error
        example = initial_policy(np.random.default_rng(0))
        for name in WEIGHT_NAMES:
            weight = getattr(policy, name)
            expected_shape = getattr(example, name).shape
            if weight.shape != expected_shape:
                raise BadWeights(
                    f"{name} must have the shape {expected_shape}, found the shape {weight.shape}"
                )
            if not np.isfinite(weight).all():
                raise BadWeights(f"{name} must contain only finite numbers, found NaN or infinity")
        return Weights(policy=policy, step=step)
