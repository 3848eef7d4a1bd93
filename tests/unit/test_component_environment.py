"""Tests of the GPUs and environment variables that each component of a run gets."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.train.plan import GpuGrant, component_env

FLEET = {"backend": "command", "command": ["serve", "${server.port}"], "gpus_per_node": 2}


def spec(gang: dict[str, Any] | None = None, **components: Any) -> Any:
    """Return the spec of a run with these components."""
    content: dict[str, Any] = {"name": "x", "workload": "sft", "components": components}
    if gang:
        content["gang"] = gang
    return parse_spec(content)


def program(**keys: Any) -> dict[str, Any]:
    """Return the spec of a component with a command and the given further keys."""
    return {"command": ["run"], **keys}


@pytest.mark.parametrize(
    ("components", "shares"),
    [
        # components without the key `gpus` share all devices
        ({"api": program(), "trainer": program()}, {"api": "4567", "trainer": "4567"}),
        # components with the key `gpus` get their own devices, in start order
        ({"api": program(gpus=1), "trainer": program(gpus=3)}, {"api": "4", "trainer": "567"}),
        ({"api": program(gpus=0), "trainer": program()}, {"api": "", "trainer": "4567"}),
        # the fleet `rollout` gets the devices of its engines, and the trainer gets the others
        ({"rollout": FLEET, "trainer": program()}, {"rollout": "45", "trainer": "67"}),
        # no device remains for the trainer, so the trainer shares all devices with the other
        # components
        (
            {"rollout": {**FLEET, "engines": 2}, "trainer": program()},
            {"rollout": "4567", "trainer": "4567"},
        ),
    ],
)
def test_devices_are_divided_among_components(
    components: dict[str, Any], shares: dict[str, str]
) -> None:
    grant = GpuGrant(nodes={"n1": 4}, devices=(4, 5, 6, 7))

    divided = grant.divide_devices(spec({"gpus_per_node": 4}, **components))

    assert {name: "".join(map(str, devices)) for name, devices in divided.items()} == shares


@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        ("nvidia", "CUDA_VISIBLE_DEVICES"),
        ("amd", "HIP_VISIBLE_DEVICES"),
        # on ROCm, vLLM and verl start only if CUDA_VISIBLE_DEVICES equals HIP_VISIBLE_DEVICES
        ("amd", "CUDA_VISIBLE_DEVICES"),
        ("ascend", "ASCEND_RT_VISIBLE_DEVICES"),
    ],
)
def test_each_vendor_has_its_own_device_variables(kind: str, variable: str) -> None:
    grant = GpuGrant(nodes={"n1": 2}, devices=(1, 3), kind=kind)

    env = component_env(spec({"gpus_per_node": 2}, trainer=program()), "trainer", "x-sft", 1, grant)

    assert (env[variable], env["MUSTER_DEVICES"], env["MUSTER_NODES"]) == ("1,3", "1,3", "n1")
    assert env.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if kind == "nvidia" else None)


def test_component_on_ray_gets_node_names_but_no_devices() -> None:
    env = GpuGrant(nodes={"n1": 8, "n2": 8}).env(spec(trainer=program()), "trainer")

    assert env == {"MUSTER_NODES": "n1,n2"}


@pytest.mark.parametrize(
    ("gang", "components", "fault"),
    [
        (
            {"gpus_per_node": 4},
            {"rollout": FLEET, "trainer": program(gpus=3)},
            "gang.gpus_per_node: found 4, but the components reserve 5 GPUs: trainer 3 + rollout 2",
        ),
        (
            {"gpus_per_node": 1},
            {"api": program(gpus=1), "trainer": program(gpus=1)},
            "2 GPUs: api 1 + trainer 1",
        ),
        (None, {"trainer": program(gpus=2)}, "gang: missing: trainer needs 2 GPUs"),
        (
            {"nodes": 2, "gpus_per_node": 8},
            {"trainer": program()},
            "gang.nodes: must be 1 for a run without `ray`, found 2",
        ),
        (
            {"gpus_per_node": 2},
            {"trainer": program(env={"CUDA_VISIBLE_DEVICES": "0"})},
            "components.trainer.env.CUDA_VISIBLE_DEVICES: Muster itself sets this variable",
        ),
        (None, {"trainer": program(gpus=-1)}, "components.trainer.gpus: must be at least 0"),
    ],
)
def test_contradictory_gpu_counts_are_rejected(
    gang: dict[str, Any] | None, components: dict[str, Any], fault: str
) -> None:
    with pytest.raises(InvalidSpec) as error:
        spec(gang, **components)

    assert fault in str(error.value)
