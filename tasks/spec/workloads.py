"""The spec key `workload`: the kinds of training that Muster knows."""

from __future__ import annotations

from typing import Literal, get_args

#: Kind of training: `rm` is a reward model, and `other` is any other kind. The value `step` means a
#: step of a pipeline, which is no training.
Workload = Literal["ppo", "grpo", "sft", "dpo", "rm", "pretrain", "other", "step"]
WORKLOADS: tuple[str, ...] = get_args(Workload)
