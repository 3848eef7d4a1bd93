"""Rules that concern several keys of a run spec: about Ray jobs, and about GPUs of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tasks.spec.component import FLEET
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.rollout import Sizes
from tasks.spec.values import Refusal, make_refusal

#: Mapping from the kind of accelerator to the environment variables that restrict a program to
#: certain GPUs. Inference engines on ROCm (`amd`) do not start if the two variables for `amd` have
#: different values.
#: Source: vllm/platforms/rocm.py; verl/single_controller/base/worker.py.
DEVICE_VARIABLES = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "ascend": ("ASCEND_RT_VISIBLE_DEVICES",),
}


def check_ray_use(
    written: Mapping[str, Any], components: Mapping[str, Mapping[str, Any]]
) -> Iterator[Refusal]:
    """Yield the faults of a run spec that uses Ray.

    The faults are a missing Ray cluster, and keys that do not work for a component on Ray.

    Args:
        written: The run spec as the user wrote it. Its values are not validated yet.
        components: Mapping from names to components. Components that are not mappings are left out.
    """
    jobs = [
        name for name, component in components.items() if component.get("launcher") == "ray_job"
    ]
    uses_of_ray = [f"{jobs[0]} is a Ray job"] if jobs else []
    if components.get(FLEET, {}).get("placement") == "ray":
        uses_of_ray.append("rollout is placed on Ray")
    if uses_of_ray and written.get("ray") is None:
        problem = f"missing: the run needs a Ray cluster, because {uses_of_ray[0]}"
        yield ("ray",), make_refusal(problem, 'write `ray: {address: "http://127.0.0.1:8265"}`')

    yield from _check_entrypoint_gpus(written, jobs)
    for name in jobs:
        if mapping_or_empty(components[name].get("live")).get("processes") is not None:
            problem = "a Ray job runs on another machine, where Muster cannot watch its processes"
            yield ("components", name, "live", "processes"), make_refusal(problem, "leave it out")
        if mapping_or_empty(components[name].get("ready")).get("notify"):
            problem = "a Ray job runs on another machine and cannot send READY=1 to this machine"
            remedy = "write `log: REGEX`, or `http: URL` with the address of the job"
            yield ("components", name, "ready", "notify"), make_refusal(problem, remedy)

    if written.get("on_lost_flow") == "adopt" and len(jobs) < len(components):
        other = next(name for name in components if name not in jobs)
        problem = (
            "`adopt` is only possible if every component is a Ray job, but the component "
            f"{other} is a process on this machine. This process would end together with the "
            "process of Muster that controls the run"
        )
        remedy = "write `on_lost_flow: stop`, or `launcher: ray_job` for every component"
        yield ("on_lost_flow",), make_refusal(problem, remedy)


def _check_entrypoint_gpus(written: Mapping[str, Any], jobs: Sequence[str]) -> Iterator[Refusal]:
    """Yield a fault if the driver of a Ray job would use GPUs that the queue does not grant.

    Args:
        written: The run spec as the user wrote it. Its values are not validated yet.
        jobs: Names of the components that are Ray jobs.
    """
    ray = mapping_or_empty(written.get("ray"))
    gpus = ray.get("entrypoint_gpus")
    if type(gpus) is not int:
        return
    place = ("ray", "entrypoint_gpus")
    gang = mapping_or_empty(written.get("gang"))
    per_node = gang.get("gpus_per_node")
    if not gang:
        problem = (
            f"the driver of the Ray job takes {gpus} GPUs, but the run requests no GPUs with the "
            "key `gang`"
        )
        yield place, make_refusal(problem, f"write `gang: {{gpus_per_node: {gpus}}}`")
    elif type(per_node) is int and gpus > per_node:
        problem = (
            f"the driver of the job takes {gpus} GPUs of one node, but gang.gpus_per_node is "
            f"{per_node}"
        )
        yield place, make_refusal(problem, f"write `entrypoint_gpus: {per_node}` or less")
    if len(jobs) > 1:
        problem = (
            f"this key is only allowed for a run with a single Ray job, found {len(jobs)} jobs: "
            f"the driver of each job would take {gpus} GPUs"
        )
        yield place, make_refusal(problem, "leave it out, or use only one Ray job")
    for key in ("entrypoint_resources", "entrypoint_label_selector"):
        if ray.get(key):
            problem = (
                f"the queue chooses the node of the driver's GPUs, but `{key}` may require "
                "another node"
            )
            yield place, make_refusal(problem, f"leave out entrypoint_gpus or {key}")


def check_device_use(
    written: Mapping[str, Any], components: Mapping[str, Mapping[str, Any]]
) -> Iterator[Refusal]:
    """Yield the faults in the keys that assign this machine's GPUs to components.

    Args:
        written: The run spec as the user wrote it. Its values are not validated yet.
        components: Mapping from names to components. Components that are not mappings are left out.
    """
    #: Mapping from each component that reserves GPUs to the number of GPUs.
    reserved: dict[str, int] = {}
    for name, component in components.items():
        has_gpus = type(component.get("gpus")) is int and name != FLEET
        if has_gpus and component.get("launcher") == "ray_job":
            problem = (
                "this key is not allowed for a Ray job, because a Ray job requests its GPUs from "
                "Ray"
            )
            remedy = "leave out gpus, and request the GPUs from Ray in the program of the job"
            yield ("components", name, "gpus"), make_refusal(problem, remedy)
        elif has_gpus:
            reserved[name] = component["gpus"]
    requests = ", ".join(f"{name} needs {gpus}" for name, gpus in reserved.items() if gpus)

    fleet = components.get(FLEET, {})
    engines = fleet.get("engines", 1)
    if fleet and fleet.get("placement", "local") == "local" and type(engines) is int:
        sizes = Sizes.of(fleet)
        reserved[FLEET] = engines * sizes.gpus if sizes is not None else 0
    total = sum(reserved.values())

    if requests and written.get("gang") is None:
        remedy = f"write `gang: {{gpus_per_node: {total}}}`"
        yield ("gang",), make_refusal(f"missing: {requests} GPUs", remedy)

    gang = mapping_or_empty(written.get("gang"))
    if not gang or written.get("ray") is not None:
        return
    gpus_per_node = gang.get("gpus_per_node")
    nodes = gang.get("nodes", 1)
    if type(nodes) is int and nodes > 1:
        problem = (
            f"must be 1 for a run without `ray`, found {nodes}: processes start on one machine"
        )
        remedy = (
            "write `nodes: 1`, or for a run on Ray `launcher: ray_job` and "
            "`ray: {address: ADDRESS}`"
        )
        yield ("gang", "nodes"), make_refusal(problem, remedy)
    elif requests and type(gpus_per_node) is int and total > gpus_per_node:
        parts = " + ".join(f"{name} {gpus}" for name, gpus in reserved.items() if gpus)
        problem = f"found {gpus_per_node}, but the components reserve {total} GPUs: {parts}"
        remedy = f"write `gpus_per_node: {total}`, or reduce the GPUs of the components"
        yield ("gang", "gpus_per_node"), make_refusal(problem, remedy)

    yield from _find_device_variable_faults(("env",), written.get("env"))
    for name, component in components.items():
        yield from _find_device_variable_faults(("components", name, "env"), component.get("env"))


def _find_device_variable_faults(place: tuple[str, ...], env: object) -> Iterator[Refusal]:
    """Yield a fault for each variable in `env` with a name such as CUDA_VISIBLE_DEVICES.

    These variables select the GPUs of a program. Users must not set these variables, because Muster
    sets them to the GPUs that the queue has granted.

    Args:
        place: Keys that lead to `env` in the spec.
        env: The mapping as the user wrote it. Its values are not validated yet.
    """
    for variable in sorted({*chain(*DEVICE_VARIABLES.values())} & mapping_or_empty(env).keys()):
        problem = "Muster itself sets this variable to the GPUs that the queue has granted"
        remedy = (
            "leave out the variable; to reserve GPUs for a component, write for example gpus: 2"
        )
        yield (*place, variable), make_refusal(problem, remedy)
