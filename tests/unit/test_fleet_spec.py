"""Tests of the component `rollout` of a run spec."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.rollout import Rollout, choose_sglang_timeout_s
from tasks.spec.run import RunSpec

COMMAND: dict[str, Any] = {"backend": "command", "command": ["serve", "${server.port}"]}
SGLANG: dict[str, Any] = {"backend": "sglang", "model": "m"}
LMDEPLOY: dict[str, Any] = {"backend": "lmdeploy", "model": "m"}
VLLM: dict[str, Any] = {"backend": "vllm", "model": "m"}


def spec_of(fleet: dict[str, Any]) -> RunSpec:
    run = {"name": "run", "workload": "grpo", "ray": {"address": "http://127.0.0.1:8265"}}
    return RunSpec.model_validate({**run, "components": {"rollout": fleet}})


def faults_of(fleet: dict[str, Any]) -> list[Fault]:
    with pytest.raises(InvalidSpec) as raised:
        spec_of(fleet)
    return list(raised.value.faults)


def fleet_of(fleet: dict[str, Any]) -> Rollout:
    found = spec_of(fleet).components["rollout"]
    assert isinstance(found, Rollout)
    return found


def test_fleet_has_default_values() -> None:
    fleet = fleet_of(COMMAND)

    assert (fleet.engines, fleet.nodes_per_engine, fleet.placement) == (1, 1, "local")
    health = fleet.health
    assert (health.interval_s, health.timeout_s, health.misses) == (30, 15, 3)
    assert (fleet.recovery.parallel, fleet.recovery.budget) == (4, None)
    assert (fleet.stop.signal, fleet.stop.grace_s) == ("SIGTERM", 10)
    assert (fleet.start_within_s, fleet.host, fleet.concurrency) == (1800, "127.0.0.1", None)


def test_fleet_is_written_unchanged() -> None:
    token = {"path": "/generate", "json": {"prompt": "1"}}
    written = {**COMMAND, "health": {"misses": 0, "token": token}, "env": {"A": "1"}}

    assert spec_of(written).written()["components"]["rollout"] == written


@pytest.mark.parametrize(
    ("fleet", "gpus", "servers", "ranks"),
    [
        # a fleet without GPUs: each server process counts as one rank
        (COMMAND, 0, 1, 1),
        ({**COMMAND, "data_parallel": 3}, 0, 3, 3),
        ({**COMMAND, "nodes_per_engine": 2}, 0, 2, 2),
        # with the backend `command`, all servers of an engine share the engine's `gpus_per_node`
        # GPUs
        ({**COMMAND, "gpus_per_node": 4}, 4, 1, 4),
        ({**COMMAND, "gpus_per_node": 4, "data_parallel": 2}, 4, 2, 4),
        # the number of GPUs is calculated from the parallelism
        ({**SGLANG, "tensor_parallel": 8, "expert_parallel": 4}, 8, 1, 8),
        ({**SGLANG, "tensor_parallel": 2, "data_parallel": 4}, 8, 1, 8),
        # data-parallel (DP) attention uses the GPUs of tensor parallelism, and no further GPUs
        ({**SGLANG, "tensor_parallel": 8, "data_parallel": 8, "dp_attention": True}, 8, 1, 8),
        ({**SGLANG, "tensor_parallel": 4, "args": ["--pp-size", "2"]}, 8, 1, 8),
        ({**SGLANG, "tensor_parallel": 16, "nodes_per_engine": 2, "gpus_per_node": 8}, 16, 2, 16),
        ({**VLLM, "tensor_parallel": 4, "args": ["-pp=2"]}, 8, 1, 8),
        ({**VLLM, "tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 16}, 16, 1, 16),
        # expert parallelism needs several replicas of the server. The experts of a
        # mixture-of-experts model are spread over these replicas
        ({**LMDEPLOY, "tensor_parallel": 8}, 8, 1, 8),
        ({**LMDEPLOY, "expert_parallel": 8}, 8, 8, 8),
        ({**LMDEPLOY, "expert_parallel": 8, "data_parallel": 4}, 8, 4, 8),
    ],
)
def test_engine_size_follows_from_parallelism(
    fleet: dict[str, Any], gpus: int, servers: int, ranks: int
) -> None:
    sizes = fleet_of(fleet).sizes

    assert (sizes.gpus, sizes.servers, sizes.ranks) == (gpus, servers, ranks)


@pytest.mark.parametrize(
    ("fleet", "path", "problem", "remedy"),
    [
        # a key that the fleet or its backend needs is missing
        ({}, "backend", "missing: a fleet needs a backend", "for your own program"),
        ({"backend": "sglang"}, "model", "missing: SGLang needs a model", "model: PATH_OR_NAME"),
        ({"backend": "vllm"}, "model", "missing: vLLM needs a model", ""),
        (
            {"backend": "command"},
            "command",
            "missing: the backend `command` needs a command",
            "command: [",
        ),
        ({**VLLM, "command": ["a"]}, "command", "only for the backend `command`", "into `args`"),
        # neither the command nor the environment contains the placeholder of the server's port
        (
            {"backend": "command", "command": ["serve"]},
            "command",
            "must contain ${server.port}",
            "set a variable in env",
        ),
        # kinds of parallelism that the backend `command` does not support are rejected
        (
            {**COMMAND, "tensor_parallel": 2},
            "tensor_parallel",
            "the backend `command` does not support this key",
            "",
        ),
        (
            {**COMMAND, "expert_parallel": 2},
            "expert_parallel",
            "the backend `command` does not support this key",
            "",
        ),
        (
            {**COMMAND, "nodes_per_engine": 2, "data_parallel": 3},
            "nodes_per_engine",
            "must be a divisor of the number of replicas, which is 3, found 2",
            "multiple of 2",
        ),
        (
            {**COMMAND, "gpus_per_node": 3, "data_parallel": 2},
            "data_parallel",
            "must be a divisor of the number of GPUs of an engine, which is 3, found 2",
            "multiple of 2",
        ),
        # numbers of parallel ranks that SGLang does not support are rejected
        (
            {**SGLANG, "tensor_parallel": 8, "nodes_per_engine": 3},
            "nodes_per_engine",
            "must be a divisor of the number of GPUs of an engine, which is 8, found 3",
            "a multiple of 3",
        ),
        (
            {**SGLANG, "tensor_parallel": 8, "nodes_per_engine": 2, "data_parallel": 2},
            "data_parallel",
            "SGLang allows no replicas within an engine that spans 2 nodes",
            "write `data_parallel: 1` and `engines: 2`, or add `dp_attention: true`",
        ),
        (
            {**SGLANG, "tensor_parallel": 8, "dp_attention": True},
            "dp_attention",
            "needs at least 2 replicas in each engine (`data_parallel`), found 1",
            "write `data_parallel: N` with a divisor N of tensor_parallel",
        ),
        (
            {**SGLANG, "tensor_parallel": 8, "data_parallel": 3, "dp_attention": True},
            "data_parallel",
            "must be a divisor of tensor_parallel, which is 8, found 3",
            " to 1, 2, 4 or 8",
        ),
        (
            {**SGLANG, "data_parallel": 8, "dp_attention": True},
            "data_parallel",
            "must be a divisor of tensor_parallel, which is 1, found 8",
            "change tensor_parallel to a multiple of 8",
        ),
        (
            {
                **{**SGLANG, "tensor_parallel": 8, "data_parallel": 8, "dp_attention": True},
                "gpus_per_node": 4,
            },
            "gpus_per_node",
            "an engine would have 4 GPUs, 4 on each node, but its parallel ranks need 8",
            "write `gpus_per_node: 8`",
        ),
        (
            {**VLLM, "tensor_parallel": 8, "data_parallel": 8, "dp_attention": True},
            "dp_attention",
            "only the backend sglang",
            "leave out dp_attention, or write `backend: sglang`",
        ),
        ({**LMDEPLOY, "tensor_parallel": 8, "dp_attention": True}, "dp_attention", "only", ""),
        (
            {**COMMAND, "dp_attention": True},
            "dp_attention",
            "only the backend sglang",
            "leave out dp_attention",
        ),
        ({**SGLANG, "dp_attention": 1}, "dp_attention", "must be true or false, found 1", ""),
        (
            {**SGLANG, "tensor_parallel": 8, "expert_parallel": 3},
            "expert_parallel",
            "must be a divisor of tensor_parallel, which is 8, found 3",
            " to 1, 2, 4 or 8",
        ),
        # numbers of parallel ranks that LMDeploy does not support are rejected
        (
            {**LMDEPLOY, "tensor_parallel": 8, "expert_parallel": 8},
            "expert_parallel",
            "only one of expert_parallel and tensor_parallel, found 8 and 8",
            "leave out one of the two keys",
        ),
        (
            {**LMDEPLOY, "expert_parallel": 8, "nodes_per_engine": 3},
            "nodes_per_engine",
            "must be a divisor of the number of replicas, which is 8, found 3",
            "a multiple of 3",
        ),
        (
            {**LMDEPLOY, "expert_parallel": 8, "data_parallel": 3},
            "data_parallel",
            "must be a divisor of the number of GPUs of an engine, which is 8, found 3",
            " to 1, 2, 4 or 8",
        ),
        (
            {**LMDEPLOY, "data_parallel": 2},
            "data_parallel",
            "replicas only with tensor_parallel or expert_parallel",
            "",
        ),
        (
            {**LMDEPLOY, "tensor_parallel": 8, "nodes_per_engine": 3},
            "nodes_per_engine",
            "must be a divisor of the number of GPUs of an engine, which is 8, found 3",
            " to 1, 2, 4 or 8",
        ),
        # numbers of parallel ranks that vLLM does not support are rejected
        (
            {**VLLM, "tensor_parallel": 2, "data_parallel": 4, "expert_parallel": 4},
            "expert_parallel",
            "must be 1 or 8, found 4: vLLM distributes the experts over all ranks",
            "write `expert_parallel: 8`, or leave it out",
        ),
        (
            {**VLLM, "data_parallel": 3, "nodes_per_engine": 2},
            "nodes_per_engine",
            "must be a divisor of the number of replicas, which is 3, found 2",
            "",
        ),
        (
            {**VLLM, "tensor_parallel": 3, "nodes_per_engine": 2},
            "nodes_per_engine",
            "must be a divisor of the number of GPUs of an engine, which is 3, found 2",
            "",
        ),
        # numbers of GPUs that do not match the numbers of parallel ranks
        (
            {**SGLANG, "tensor_parallel": 16, "nodes_per_engine": 2, "gpus_per_node": 4},
            "gpus_per_node",
            "an engine would have 8 GPUs, 4 on each node, but its parallel ranks need 16",
            "write `gpus_per_node: 8`, or leave it out",
        ),
        (
            {**VLLM, "tensor_parallel": 4, "gpus_per_node": 8},
            "gpus_per_node",
            "an engine would have 8 GPUs, 8 on each node, but its parallel ranks need 4",
            "write `gpus_per_node: 4`",
        ),
        # invalid values of `recovery` are rejected
        (
            {**COMMAND, "engines": 2, "recovery": {"min_active": 3}},
            "recovery.min_active",
            "must be at most `engines`, which is 2, found 3",
            "write `min_active: 2` or less",
        ),
        (
            {**COMMAND, "recovery": {"backoff_s": 5, "max_backoff_s": 4}},
            "recovery.backoff_s",
            "must be at most `max_backoff_s`, which is 4, found 5",
            "write `backoff_s: 4` or less",
        ),
        (
            {**COMMAND, "recovery": {"budget": 0}},
            "recovery.budget",
            "must be a whole number, 1 or more, or unlimited, found 0",
            "leave out the key",
        ),
        ({**COMMAND, "recovery": {"budget": "no limit"}}, "recovery.budget", "or unlimited", ""),
        # invalid values of `health` are rejected
        (
            {**COMMAND, "health": {"path": "health"}},
            "health.path",
            "must be text that matches the pattern ^/",
            "",
        ),
        ({**SGLANG, "health": {"path": "/x"}}, "health.path", "only for the backend `command`", ""),
        (
            {**VLLM, "health": {"token": {"path": "/x"}}},
            "health.token",
            "this key is only for the backend `command`, because Muster itself knows the health "
            "check of vLLM",
            "leave it out",
        ),
        (
            {**COMMAND, "health": {"first_after_s": 61}, "start_within_s": 60},
            "health.first_after_s",
            "must be at most `start_within_s`, which is 60, found 61",
            "write `first_after_s: 60` or less",
        ),
        # the user sets the backend's own variable for the time limit of a health check
        (
            {**SGLANG, "env": {"SGLANG_HEALTH_CHECK_TIMEOUT": "15"}},
            "env.SGLANG_HEALTH_CHECK_TIMEOUT",
            "Muster itself sets this variable to the value of health.timeout_s",
            "write for example health: {timeout_s: 15}",
        ),
        (
            {**SGLANG, "health": {"timeout_s": 1}},
            "health.timeout_s",
            "must be more than 1, found 1",
            "",
        ),
    ],
)
def test_invalid_fleet_is_rejected_with_a_remedy(
    fleet: dict[str, Any], path: str, problem: str, remedy: str
) -> None:
    [fault] = faults_of(fleet)

    assert fault.path == f"components.rollout.{path}"
    assert problem in fault.problem
    assert remedy in fault.remedy


@pytest.mark.parametrize(
    ("fleet", "word", "remedy"),
    [
        # arguments that Muster sets itself, in several spellings: the value is in the next word or
        # after `=`, or the option has another name
        (SGLANG, "--port", "leave it out"),
        (SGLANG, "--port=1", "leave it out"),
        (SGLANG, "--tensor-parallel-size", "write `tensor_parallel: N` instead"),
        (SGLANG, "--model", "write `model: PATH_OR_NAME` instead"),
        (SGLANG, "--nnodes", "write `nodes_per_engine: N` instead"),
        (
            SGLANG,
            "--enable-dp-attention",
            "write `dp_attention: true, and data_parallel: N` instead",
        ),
        (LMDEPLOY, "--server-port", "leave it out"),
        (LMDEPLOY, "--ep", "write `expert_parallel: N` instead"),
        (VLLM, "-tp", "write `tensor_parallel: N` instead"),
        # vLLM accepts underscores instead of hyphens in the names of options
        (
            VLLM,
            "--data_parallel_size",
            "write `data_parallel: N` instead",
        ),
        (VLLM, "--headless", "leave it out"),
        # Muster itself sets these arguments, and the spec has no keys for them
        (SGLANG, "--api-key", "leave it out"),
        (LMDEPLOY, "--api-keys", "leave it out"),
    ],
)
def test_reserved_argument_is_rejected(fleet: dict[str, Any], word: str, remedy: str) -> None:
    [fault] = faults_of({**fleet, "args": ["--seed", "1", word]})

    assert fault.path == "components.rollout.args.2"
    assert fault.problem == f"Muster itself sets {word.partition('=')[0]} for each server"
    assert fault.remedy == remedy


@pytest.mark.parametrize(
    "fleet",
    [
        # Muster accepts all arguments that are not set by Muster itself
        {**SGLANG, "args": ["--mem-fraction-static", 0.8, "--no-such-option"]},
        {**COMMAND, "args": ["--port", "1"]},
        # the server gets its port in an environment variable or in an argument
        {"backend": "command", "command": ["serve"], "env": {"PORT": "${server.port}"}},
        {"backend": "command", "command": ["serve"], "args": ["${server.port}"]},
        # SGLang's newer option for data-parallel (DP) attention is allowed in `args`
        {**SGLANG, "tensor_parallel": 8, "args": ["--attn-dp-size", "8"], "gpus_per_node": 8},
        # arguments may contain an escaped placeholder (`$$`) and placeholders of the run
        {**COMMAND, "args": ["$${server.x}", "${run.dir}"]},
        # `misses: 0` turns the periodic health checks off
        {**COMMAND, "health": {"misses": 0}},
        {**COMMAND, "stop": {"signal": "SIGINT", "grace_s": 0}},
        {**COMMAND, "engines": 2, "recovery": {"min_active": 2, "backoff_s": 1}},
        {**COMMAND, "recovery": {"budget": "unlimited"}},
        {**LMDEPLOY, "expert_parallel": 16, "nodes_per_engine": 2, "gpus_per_node": 8},
    ],
)
def test_valid_fleet_is_accepted(fleet: dict[str, Any]) -> None:
    spec_of(fleet)


def test_all_faults_of_a_fleet_are_reported_together() -> None:
    fleet = {**VLLM, "args": ["-tp", "2"], "engines": 0, "recovery": {"min_active": "2"}}

    paths = {fault.path for fault in faults_of(fleet)}

    assert paths == {
        "components.rollout.args.0",
        "components.rollout.engines",
        "components.rollout.recovery.min_active",
    }


@pytest.mark.parametrize(
    ("timeout_s", "seconds"),
    [
        (15, 12),  # SGLang's timeout is 80 % of the fleet's timeout
        (60, 20),  # but at most SGLang's default of 20 s
        (1.5, 1),  # rounded down to whole seconds, but at least 1 s
    ],
)
def test_sglang_timeout_is_shorter_than_the_fleet_timeout(timeout_s: float, seconds: int) -> None:
    assert choose_sglang_timeout_s(timeout_s) == seconds
