"""The environment of the quickstart: it poses the copy task and scores the answers.

    python environment.py serve --env.rollout_server_url http://127.0.0.1:8000 \\
        --openai.base_url http://127.0.0.1:8001/v1

The program is an Atropos environment. `--help` lists every setting, and `config_init` has the
defaults. The program exits with 0 when it has sent the trainer's last batch. If the Atropos API or
the inference server cannot be reached, the program prints the reason to stderr and exits with 1.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["WANDB_MODE"] = "disabled"

import asyncio
import logging
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import ClientError
from atropos_api import NOT_GENERATED
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from copy_task import ANSWER_TOKENS, build_prompt, compute_reward, draw_digits, format_tokens
from pydantic import Field
from tenacity import RetryError

#: Folder of the tokenizer.
TOKENIZER = Path(__file__).resolve().parent / "tokenizer"
#: Seconds between two lines of output about the progress.
SAY_EVERY_S = 2.0
#: Value in `inference_logprobs` for a token that the policy did not generate. The value 1 is never
#: a log-probability, because log-probabilities are at most 0.
NO_LOG_PROB = 1.0


class InferenceGone(Exception):
    """The inference server refuses connections.

    Without this exception, Atropos would wait for the inference server forever.
    """


class CopyConfig(BaseEnvConfig):
    """Settings of the environment: those of Atropos and those of the copy task."""

    seed: int = Field(default=0, description="Seed of the digits in the prompts")
    gone_after_s: float = Field(
        default=6.0,
        description="A server counts as ended after this number of seconds without a "
        "successful health check",
    )


class CopyEnvironment(BaseEnv):
    """The copy task: repeat four digits. The reward is the share of right tokens, from 0 to 1."""

    name = "copy-four-digits"
    env_config_cls = CopyConfig

    def __init__(self, config: CopyConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._rng = random.Random(config.seed)
        self._inference_seen_at_s = time.monotonic()
        self._said_at_s = -SAY_EVERY_S
        self._groups_scored = 0

    @classmethod
    def config_init(cls) -> tuple[CopyConfig, list[APIServerConfig]]:
        config = CopyConfig(
            tokenizer_name=str(TOKENIZER),
            group_size=8,
            max_token_length=32,
            # With -1, the environment uses the number of steps that the trainer has registered.
            total_steps=-1,
            wandb_name=cls.name,
            use_wandb=False,
            # Keep groups whose answers all have the same reward. By default, Atropos drops such
            # groups. A good policy makes no mistake in most groups, and the trainer needs these
            # groups, too.
            ensure_scores_are_not_same=False,
            steps_per_eval=0,
            max_batches_offpolicy=1,
            max_num_workers=64,
            worker_timeout=120,
        )
        server = APIServerConfig(
            server_type="vllm",
            model_name=cls.name,
            tokenizer_name=str(TOKENIZER),
            # The gateway of a rollout fleet requires this token if other users can reach the
            # gateway. The trainer's own server ignores the token.
            api_key=os.environ.get("MUSTER_ROLLOUT_TOKEN") or "none",
            # Longest time, in seconds, that a request to the trainer may take. Muster's liveness
            # probe detects a hanging trainer in less time. So the run reports the trainer, and not
            # this environment, as the cause of the failure.
            timeout=60,
        )
        # Return the config of the server in a list. Without the list, Atropos would ignore
        # `base_url` and wait for a server on port 9004.
        return config, [server]

    async def setup(self) -> None:
        """Let SIGTERM end the process through the interpreter's normal exit.

        The normal exit removes the temporary folders that the package wandb creates on import.
        """
        if (manager := asyncio.current_task()) is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, manager.cancel)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. A separate evaluation is not needed, because training reports the rewards."""

    async def register_env(self) -> None:
        """Register at the Atropos API after the trainer has registered, and print a line."""
        take_steps_from_trainer = self.config.total_steps == -1
        await super().register_env()
        if take_steps_from_trainer:
            # Reduce the value by one, so that the environment stops after `total_steps` batches,
            # like the trainer. Atropos would stop one batch later.
            self.config.total_steps -= 1
        print("environment registered", flush=True)

    async def env_manager(self) -> None:
        await super().env_manager()
        print(f"complete: {self._groups_scored} groups scored", flush=True)

    async def get_next_item(self) -> tuple[int, ...]:
        return draw_digits(self._rng)

    async def collect_trajectories(
        self, item: tuple[int, ...]
    ) -> tuple[ScoredDataGroup, list[tuple[int, ...]]]:
        prompt, answers, log_probs, _ = await self.server.tokens_and_logprobs_completion(
            prompt=format_tokens(build_prompt(item)),
            n=self.config.group_size,
            max_tokens=ANSWER_TOKENS,
            temperature=1.0,
        )
        group = ScoredDataGroup(
            tokens=[prompt + answer for answer in answers],
            masks=[[NOT_GENERATED] * len(prompt) + answer for answer in answers],
            scores=[compute_reward(item, answer) for answer in answers],
            inference_logprobs=[[NO_LOG_PROB] * len(prompt) + scores for scores in log_probs],
        )
        self._groups_scored += 1
        self._say_progress(sum(group["scores"]) / len(group["scores"]))
        return group, []

    async def env_step_checks(self) -> None:
        await super().env_step_checks()
        now_s = time.monotonic()
        if any(server.server_healthy for server in self.server.servers):
            self._inference_seen_at_s = now_s
        elif now_s - self._inference_seen_at_s > self.config.gone_after_s:
            url = self.server.servers[0].config.base_url
            raise InferenceGone(
                "no inference server has passed a health check for "
                f"{self.config.gone_after_s:g} s. The first of these servers has the URL {url}"
            )

    def _say_progress(self, mean_reward: float) -> None:
        now_s = time.monotonic()
        if now_s - self._said_at_s >= SAY_EVERY_S:
            self._said_at_s = now_s
            print(
                f"step {self.curr_step}: {self._groups_scored} groups scored, "
                f"mean reward of the last group {mean_reward:.2f}",
                flush=True,
            )


def main() -> None:
    # Hide the line that Atropos logs in each iteration of its main loop. Set the level of the
    # handlers: the level of the root logger has no effect, because Atropos sets the level of its
    # own logger.
    logging.basicConfig(format="%(levelname)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)
    try:
        CopyEnvironment.cli()
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except InferenceGone as error:
        sys.exit(f"environment: {error}")
    except (RetryError, ClientError) as error:
        cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
        sys.exit(f"environment: the Atropos API no longer answers: {cause}")


if __name__ == "__main__":
    main()
