"""Tests of fleet topologies: servers, nodes, ports and command lines of each backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.rollout.backends import Ask, Questions
from tasks.rollout.topology import (
    Addresses,
    Engine,
    ServerSlot,
    TopologyPlan,
    build,
    nodes_needed,
    ports_needed,
)
from tasks.spec.rollout import Rollout

ALL = tuple(range(16))
FIRST = tuple(range(8))
SECOND = tuple(range(8, 16))
COMMAND: dict[str, Any] = {"backend": "command", "command": ["serve", "${server.port}"]}
QUESTIONS = Questions(ready=Ask(method="GET", path="/health"), token=None)


def fleet_of(**written: Any) -> Rollout:
    model = {} if written["backend"] == "command" else {"model": "m"}
    return Rollout.model_validate({**model, **written})


def addresses_of(fleet: Rollout, node_gpus: int | None = None) -> Addresses:
    """Return fleet addresses: hosts `n0`, `n1` and so on, and ports 30000, 30001 and so on."""
    port_names = ports_needed(fleet, node_gpus)
    return Addresses(
        hosts=tuple(f"n{index}" for index in range(nodes_needed(fleet, node_gpus))),
        ports={name: 30000 + index for index, name in enumerate(port_names)},
    )


def plan_of(node_gpus: int | None = None, **written: Any) -> TopologyPlan:
    fleet = fleet_of(**{"placement": "ray", **written})
    return build(fleet, addresses_of(fleet, node_gpus), node_gpus)


def server_of(plan: TopologyPlan, rank: int) -> ServerSlot:
    [server] = [slot for slot in plan.servers if slot.rank == rank]
    return server


def test_lmdeploy_tp16_is_one_entrypoint_for_all_ranks() -> None:
    plan = plan_of(backend="lmdeploy", tensor_parallel=16, nodes_per_engine=2, gpus_per_node=8)

    [server] = plan.servers
    assert (server.rank, server.is_entrypoint) == (0, True)
    assert server.bundles == server.weight_ranks == ALL
    assert server.argv == (
        *("lmdeploy", "serve", "api_server", "m", "--backend", "pytorch", "--tp", "16"),
        *("--server-name", "n0", "--server-port", "30001"),
    )
    assert server.env == {"LMDEPLOY_DIST_MASTER_ADDR": "n0", "LMDEPLOY_DIST_MASTER_PORT": "30000"}
    assert plan.engines[0].nodes == (0, 1)
    assert plan.groups == ((0,),)
    assert plan.training_mesh == (ALL,)


def test_lmdeploy_ep16_is_sixteen_entrypoints_in_one_group() -> None:
    plan = plan_of(backend="lmdeploy", expert_parallel=16, nodes_per_engine=2)

    assert [server.rank for server in plan.servers] == list(ALL)
    assert all(server.is_entrypoint for server in plan.servers)
    assert all(server.bundles == server.weight_ranks == (server.rank,) for server in plan.servers)
    assert [server.node for server in plan.servers] == [0] * 8 + [1] * 8
    assert plan.groups == (ALL,)
    assert plan.training_mesh == tuple((rank,) for rank in ALL)


def test_each_rank_of_lmdeploy_with_experts_has_its_own_process() -> None:
    plan = plan_of(backend="lmdeploy", expert_parallel=16, nodes_per_engine=2)

    server = server_of(plan, 9)

    assert server.argv[:2] == ("python", "-c")
    assert server.argv[3:] == (
        *("serve", "api_server", "m", "--backend", "pytorch", "--dp", "16", "--ep", "16"),
        *("--nnodes", "16", "--node-rank", "9", "--server-name", "n1", "--server-port", "30010"),
    )
    assert server.env == {
        "LMDEPLOY_DP_MASTER_ADDR": "n0",
        "LMDEPLOY_DP_MASTER_PORT": "30000",
        "RAY_ADDRESS": "local",
    }


def test_sglang_tp16_over_2x8_is_two_servers_and_one_entrypoint() -> None:
    plan = plan_of(backend="sglang", tensor_parallel=16, nodes_per_engine=2, gpus_per_node=8)

    first, second = plan.servers
    assert (first.rank, first.node, first.bundles) == (0, 0, FIRST)
    assert (second.rank, second.node, second.bundles) == (8, 1, SECOND)
    assert (first.is_entrypoint, second.is_entrypoint) == (True, False)
    assert (first.weight_ranks, second.weight_ranks) == (ALL, ())
    assert plan.engines[0].dist_init == "n0:30000"
    assert plan.groups == ((0, 8),)
    assert plan.training_mesh == (ALL,)


def test_sglang_over_several_nodes_meets_at_the_first_node() -> None:
    plan = plan_of(backend="sglang", tensor_parallel=16, nodes_per_engine=2, args=["--seed", "1"])

    assert server_of(plan, 8).argv == (
        *("python", "-m", "sglang.launch_server", "--model-path", "m", "--tp-size", "16"),
        *("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "n0:30000"),
        *("--host", "n1", "--port", "30002", "--seed", "1"),
    )
    assert server_of(plan, 8).env == {"SGLANG_HEALTH_CHECK_TIMEOUT": "12"}


def test_sglang_on_one_node_needs_no_meeting_address() -> None:
    plan = plan_of(backend="sglang", tensor_parallel=2, data_parallel=2, expert_parallel=2)

    [server] = plan.servers
    assert server.argv == (
        *("python", "-m", "sglang.launch_server", "--model-path", "m", "--tp-size", "2"),
        *("--ep-size", "2", "--dp-size", "2", "--host", "n0", "--port", "30000"),
    )
    assert plan.engines[0].dist_init is None


def test_sglang_dp_attention_is_within_tp_and_may_span_nodes() -> None:
    sizes = {"tensor_parallel": 16, "data_parallel": 16, "nodes_per_engine": 2}

    plan = plan_of(backend="sglang", dp_attention=True, **sizes)

    first, second = plan.servers
    assert first.argv == (
        *("python", "-m", "sglang.launch_server", "--model-path", "m", "--tp-size", "16"),
        *("--dp-size", "16", "--enable-dp-attention", "--nnodes", "2", "--node-rank", "0"),
        *("--dist-init-addr", "n0:30000", "--host", "n0", "--port", "30001"),
    )
    assert (first.bundles, second.bundles) == (FIRST, SECOND)
    assert (first.is_entrypoint, second.is_entrypoint) == (True, False)
    assert plan.training_mesh == (ALL,)


def test_vllm_tp16_over_2_nodes_has_a_headless_second_node() -> None:
    plan = plan_of(backend="vllm", tensor_parallel=16, nodes_per_engine=2)

    first, second = plan.servers
    meeting = ("--master-addr", "n0", "--master-port", "30000")
    assert first.argv == (
        *("vllm", "serve", "m", "-tp", "16", "--nnodes", "2", "-r", "0", *meeting),
        *("--host", "n0", "--port", "30001"),
    )
    assert second.argv == (
        *("vllm", "serve", "m", "-tp", "16", "--nnodes", "2", "-r", "1", *meeting, "--headless"),
    )
    assert (second.rank, second.port, second.url) == (8, None, None)
    assert (first.weight_ranks, second.weight_ranks) == (ALL, ())
    assert plan.groups == ((0, 8),)
    assert plan.training_mesh == (ALL,)


def test_vllm_dp16_ep_over_2_nodes_gives_each_node_its_replicas() -> None:
    plan = plan_of(backend="vllm", data_parallel=16, expert_parallel=16, nodes_per_engine=2)

    first, second = plan.servers
    common = ("vllm", "serve", "m", "-tp", "1", "-dp", "16", "-dpl", "8")
    assert first.argv == (
        *(*common, "-dpa", "n0", "-dpp", "30000", "-ep", "--host", "n0", "--port", "30001"),
    )
    assert second.argv == (
        *(*common, "-dpa", "n0", "-dpp", "30000", "--headless", "-dpr", "8", "-ep"),
    )
    assert (second.rank, second.port) == (8, None)
    assert [server.rank for server in plan.servers if server.is_entrypoint] == [0]
    assert plan.training_mesh == (ALL,)


def test_placeholders_of_a_command_are_replaced_for_each_server() -> None:
    command = ["serve", "--at", "${server.host}:${server.port}", "--me", "${server.rank}"]
    env = {"GROUP": "${server.group}", "NODE": "${server.node}", "HOME": "$${HOME}"}

    plan = plan_of(backend="command", command=command, engines=2, env=env, args=["${run.dir}"])

    second = server_of(plan, 1)
    # Only placeholders `${server.NAME}` are replaced. `$${` stands for a literal `${`.
    assert second.argv == ("serve", "--at", "n1:30001", "--me", "1", "${run.dir}")
    assert second.env == {"GROUP": "1", "NODE": "1", "HOME": "${HOME}"}
    assert second.bundles == ()
    assert plan.groups == plan.training_mesh == ((0,), (1,))


@pytest.mark.parametrize(
    ("sizes", "entrypoints", "weights"),
    [
        # Each data-parallel replica of an engine is a server that updates its own weights.
        ({"data_parallel": 2}, [0, 1], [(0,), (1,)]),
        # The engine spans two nodes: the server of rank 0 updates the weights of both
        # ranks.
        ({"nodes_per_engine": 2}, [0], [(0, 1), ()]),
        ({"nodes_per_engine": 2, "data_parallel": 2}, [0, 1], [(0,), (1,)]),
    ],
)
def test_engine_of_a_command_can_have_several_servers(
    sizes: dict[str, int], entrypoints: list[int], weights: list[tuple[int, ...]]
) -> None:
    plan = plan_of(**COMMAND, **sizes)

    assert [server.rank for server in plan.servers if server.is_entrypoint] == entrypoints
    assert [server.weight_ranks for server in plan.servers] == weights
    assert plan.groups == ((0, 1),)
    assert list(plan.training_mesh) == [ranks for ranks in weights if ranks]


def test_training_mesh_has_an_entry_for_each_server_that_updates_weights() -> None:
    plan = plan_of(
        backend="lmdeploy", expert_parallel=8, data_parallel=4, nodes_per_engine=2, engines=2
    )

    mesh = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert plan.groups == ((0, 2, 4, 6), (8, 10, 12, 14))
    assert plan.as_json()["training_mesh"] == mesh


@pytest.mark.parametrize(
    ("written", "node_gpus", "nodes"),
    [
        # Two engines fit on one node.
        ({"backend": "sglang", "tensor_parallel": 4, "engines": 3}, 8, [(0,), (0,), (1,)]),
        ({"backend": "sglang", "tensor_parallel": 3, "engines": 3}, 8, [(0,), (0,), (1,)]),
        # An engine on several nodes does not share these nodes with another engine.
        (
            {"backend": "sglang", "tensor_parallel": 2, "nodes_per_engine": 2, "engines": 2},
            8,
            [(0, 1), (2, 3)],
        ),
        # The spec names no number of GPUs per node: on Ray each engine has its own node, and local
        # engines share a node.
        ({"backend": "sglang", "engines": 2}, None, [(0,), (1,)]),
        ({"backend": "sglang", "engines": 2, "placement": "local"}, None, [(0,), (0,)]),
        # Engines without GPUs share the first node.
        ({**COMMAND, "engines": 2, "placement": "local"}, 8, [(0,), (0,)]),
    ],
)
def test_engines_are_packed_onto_nodes_by_their_gpus(
    written: dict[str, Any], node_gpus: int | None, nodes: list[tuple[int, ...]]
) -> None:
    plan = plan_of(node_gpus, **written)

    assert [engine.nodes for engine in plan.engines] == nodes


def test_engine_larger_than_a_node_is_rejected() -> None:
    fleet = fleet_of(backend="sglang", tensor_parallel=8)

    with pytest.raises(
        ValueError, match="needs 8 GPUs on one node, but each node of the run has only 4"
    ):
        ports_needed(fleet, 4)


@pytest.mark.parametrize(
    ("env", "devices", "expected"),
    [
        # By default, the servers use GPU 0, 1 and so on, in the order of their ranks.
        ({}, (), ["0,1", "2,3"]),
        # The GPUs that the run was granted take precedence over a variable in the spec.
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ("2", "3", "0", "1"), ["2,3", "0,1"]),
    ],
)
def test_local_servers_see_the_gpus_of_their_ranks(
    env: dict[str, str], devices: tuple[str, ...], expected: list[str]
) -> None:
    fleet = fleet_of(backend="vllm", tensor_parallel=2, engines=2, env=env)

    plan = build(fleet, replace(addresses_of(fleet), devices=devices))

    assert [server.env["CUDA_VISIBLE_DEVICES"] for server in plan.servers] == expected


@pytest.mark.parametrize(
    ("kind", "devices", "expected"),
    [
        # The names of the environment variables that select GPUs depend on the vendor of the GPUs.
        (
            "amd",
            ("4", "5"),
            [
                {"HIP_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "4"},
                {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "5"},
            ],
        ),
        (
            "ascend",
            ("4", "5"),
            [{"ASCEND_RT_VISIBLE_DEVICES": "4"}, {"ASCEND_RT_VISIBLE_DEVICES": "5"}],
        ),
        # By default, the servers use GPU 0, 1 and so on.
        (
            "ascend",
            (),
            [{"ASCEND_RT_VISIBLE_DEVICES": "0"}, {"ASCEND_RT_VISIBLE_DEVICES": "1"}],
        ),
    ],
)
def test_visible_gpus_are_set_by_the_variables_of_their_kind(
    kind: str, devices: tuple[str, ...], expected: list[dict[str, str]]
) -> None:
    fleet = fleet_of(backend="vllm", engines=2)

    plan = build(fleet, replace(addresses_of(fleet), devices=devices, kind=kind))

    visible_devices = [
        {name: text for name, text in server.env.items() if name.endswith("VISIBLE_DEVICES")}
        for server in plan.servers
    ]
    assert visible_devices == expected


def test_too_few_devices_are_rejected() -> None:
    fleet = fleet_of(backend="vllm", tensor_parallel=2)

    with pytest.raises(ValueError, match="need 2 GPUs, but CUDA_VISIBLE_DEVICES names only 1: 3"):
        build(fleet, replace(addresses_of(fleet), devices=("3",)))


@pytest.mark.parametrize("written", [{"placement": "ray"}, {**COMMAND, "placement": "local"}])
def test_no_visible_devices_are_set_on_ray_or_without_gpus(written: dict[str, str]) -> None:
    plan = plan_of(**{"backend": "vllm", **written})

    assert "CUDA_VISIBLE_DEVICES" not in plan.servers[0].env


def test_needed_ports_are_listed_with_their_nodes() -> None:
    fleet = fleet_of(backend="vllm", tensor_parallel=2, nodes_per_engine=2, engines=2)

    # A headless server, which is a server without an HTTP API, needs no port.
    assert ports_needed(fleet) == {"engine.0": 0, "server.0": 0, "engine.1": 2, "server.2": 2}
    assert nodes_needed(fleet) == 4


def test_new_ports_of_a_group_change_nothing_else() -> None:
    fleet = fleet_of(backend="sglang", tensor_parallel=2, nodes_per_engine=2, engines=2)
    old = addresses_of(fleet)
    new = replace(old, ports={**old.ports, "engine.1": 40000, "server.2": 40001})

    before, after = build(fleet, old), build(fleet, new)

    assert after.engines[0] == before.engines[0]
    first, second = after.engines[1].servers
    assert (first.port, second.port) == (40001, server_of(before, 3).port)
    assert after.engines[1].dist_init == "n2:40000"
    assert "n2:40000" in second.argv
    assert [slot.bundles for slot in after.servers] == [slot.bundles for slot in before.servers]


def test_sglang_health_check_generates_a_token_within_the_fleets_timeout() -> None:
    plan = plan_of(backend="sglang", health={"timeout_s": 10})

    questions = plan.questions
    assert questions.ready == Ask(method="GET", path="/health")
    assert questions.token == Ask(method="GET", path="/health_generate")
    assert plan.servers[0].env["SGLANG_HEALTH_CHECK_TIMEOUT"] == "8"


@pytest.mark.parametrize(
    ("backend", "args", "model"),
    [
        ("vllm", None, "m"),
        ("vllm", ["--served-model-name", "policy"], "policy"),
        ("vllm", ["--served-model-name=policy"], "policy"),
        ("lmdeploy", None, "m"),
        ("lmdeploy", ["--model-name", "policy"], "policy"),
    ],
)
def test_token_request_names_the_served_model_of_vllm_and_lmdeploy(
    backend: str, args: list[str] | None, model: str
) -> None:
    token = plan_of(backend=backend, args=args).questions.token

    assert token is not None
    assert (token.method, token.path) == ("POST", "/v1/completions")
    assert token.body == {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize(
    ("health", "ready", "token"),
    [
        ({}, "/health", None),
        ({"path": "/up"}, "/up", None),
        ({"token": {"path": "/t"}}, "/health", Ask(method="GET", path="/t")),
        (
            {"token": {"path": "/t", "json": {"n": 1}}},
            "/health",
            Ask(method="POST", path="/t", body={"n": 1}),
        ),
    ],
)
def test_probes_of_a_command_come_from_its_spec(
    health: dict[str, Any], ready: str, token: Ask | None
) -> None:
    questions = plan_of(**COMMAND, health=health).questions

    assert questions.ready == Ask(method="GET", path=ready)
    assert questions.token == token


def slot(rank: int, **changes: Any) -> ServerSlot:
    """Return the plan of a server of engine 0. The server has only the GPU with this rank."""
    defaults: dict[str, Any] = {
        "ranks": (rank,),
        "engine": 0,
        "index": 0,
        "node": 0,
        "bundles": (rank,),
        "weight_ranks": (rank,),
        "is_entrypoint": True,
        "host": "n0",
        "port": 30000 + rank,
        "argv": ("serve",),
    }
    return ServerSlot(**{**defaults, **changes})


def engine(*servers: ServerSlot) -> Engine:
    return Engine(nodes=(0,), servers=servers)


def plan(*engines: Engine) -> TopologyPlan:
    return TopologyPlan(engines=engines, questions=QUESTIONS, placement="local")


@pytest.mark.parametrize(
    ("engines", "fault"),
    [
        ((), "no engines"),
        # Plans with wrong ranks are rejected.
        ((engine(slot(0, ranks=(0, 0))),), "engine 0, server 0: a rank is listed twice: 0"),
        (
            (engine(slot(0)), engine(slot(1, engine=1, ranks=(1, 0)))),
            "engine 1, server 1: a rank is listed twice: 0",
        ),
        # Engines without a server, or without a server that accepts requests, are rejected.
        ((engine(),), "engine 0: no server"),
        (
            (engine(slot(0, is_entrypoint=False), slot(1, is_entrypoint=False)),),
            "engine 0: none of the servers 0, 1 of this engine accepts requests",
        ),
        # `weight_ranks` are the ranks whose weights a server updates. Wrong ranks are rejected.
        (
            (engine(slot(0, weight_ranks=(0, 7))),),
            "engine 0, server 0: this server is assigned to update the weights of ranks of another "
            "engine: 7",
        ),
        (
            (engine(slot(0), slot(1, weight_ranks=(0, 1))),),
            "engine 0, server 1: updates the weights of a rank twice: 0",
        ),
        (
            (engine(slot(0, ranks=(0, 1, 2))),),
            "engine 0: no server is assigned to update the weights of ranks 1, 2",
        ),
        # Two servers with the same address are rejected.
        (
            (engine(slot(0), slot(1, port=30000)),),
            "engine 0, server 1: an address is used twice: http://n0:30000",
        ),
    ],
)
def test_contradictory_topology_is_rejected_with_engine_and_ranks(
    engines: tuple[Engine, ...], fault: str
) -> None:
    with pytest.raises(ValueError) as raised:
        plan(*engines)

    assert fault in str(raised.value).split("; ")


def test_same_port_on_two_hosts_is_allowed() -> None:
    plan(engine(slot(0), slot(1, host="n1", port=30000)))


def test_json_of_a_plan_has_all_documented_keys() -> None:
    plan_json = plan(engine(slot(0, env={"A": "1"}))).as_json()

    assert plan_json == {
        "engines": [{"ranks": [0], "nodes": [0]}],
        "servers": [
            {
                "rank": 0,
                "node": 0,
                "argv": ["serve"],
                "env": {"A": "1"},
                "entrypoint": True,
                "group": 0,
                "bundles": [0],
            }
        ],
        "groups": [[0]],
        "training_mesh": [[0]],
    }
