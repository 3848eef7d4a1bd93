"""From a spec whose placeholders are filled in to what a supervisor is to do."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.containment import Containment, probe
from tasks.processes.devices import listed
from tasks.processes.guarded import Command
from tasks.ray.dashboard import CLUSTERS_VARIABLE, Dashboard
from tasks.ray.job import RayJob
from tasks.ray.submission import JobPlan, submission_file, submission_id
from tasks.record.checkpoints import is_writing_checkpoint
from tasks.record.code_store import PROJECT, import_path, links_in
from tasks.record.metrics_file import FileFingerprint
from tasks.record.places import AttemptPlace
from tasks.record.run_json import AttemptRecord
from tasks.rollout.component import FleetPlan, fleet_component
from tasks.server.trusted_clients import UNPLUGGED_PREFECT
from tasks.spec.programs import build_component_path, find_python
from tasks.spec.run import RunSpec
from tasks.spec.run_rules import DEVICE_VARIABLES
from tasks.spec.secrets import looks_secret
from tasks.spec.values import select_literals
from tasks.spec.watch import WatchRule

#: Variables of this process that are about this process, and no component's business.
_PRIVATE_ENV = (
    *("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "MUSTER_ROLE"),
    *("PYTHONSAFEPATH", CLUSTERS_VARIABLE),
)
_PYTHON_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def component_search_path(root: Path | None = None) -> str:
    """Where the commands of processes are looked for: the project's own environment first."""
    root = root or Path(os.environ.get(PROJECT) or Path.cwd())
    return build_component_path(find_python(root), os.environ.get("PATH", os.defpath))


def containment_of(spec: RunSpec) -> Containment:
    """What will hold the run's processes on this machine."""
    return probe(namespace=spec.containment == "namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What one attempt at a run is planned by."""

    #: With its placeholders and secrets filled in.
    spec: RunSpec
    run_id: str
    place: AttemptPlace
    containment: Containment
    #: The attempt in the run's record, where it was begun by another process.
    adopted: AttemptRecord | None = None
    fleet: FleetPlan | None = None
    grant: GpuGrant | None = None
    #: The file of figures as it was when the attempt began. Of one that is not on record
    #: everything may be the attempt's own.
    metrics: FileFingerprint | None = None
    #: It starts from a checkpoint.
    resumes: bool = False
    mask: Callable[[str], str] = str

    def plan(self) -> AttemptPlan:
        spec, given = self.spec, self.grant
        return AttemptPlan(
            run_id=self.run_id,
            number=self.place.number,
            cwd=Path(spec.cwd),
            components=tuple(map(self._component, spec.components)),
            progress=spec.progress,
            alarms=self._alarms(),
            success_step=spec.success.step if spec.success else None,
            stall_after_s=spec.stall_after_s,
            time_limit_s=spec.gang.max_hours * 3600 if spec.gang and spec.gang.max_hours else None,
            devices=given.devices if given else (),
            gpu_use=partial(_gpu_use, spec.ray.address or "", given) if spec.ray else None,
            containment=self.containment,
            began_at=self.adopted.started_at if self.adopted is not None else None,
            mask=self.mask,
            metrics=self.metrics or FileFingerprint(),
        )

    def _alarms(self) -> dict[str, WatchRule]:
        """Not those that the attempt has raised already; and where it starts with what was learned
        before, a figure may well be what it was at first."""
        raised = {alarm.rule for alarm in self.adopted.alarms} if self.adopted else set()
        return {
            name: rule
            for name, rule in self.spec.alarms.items()
            if name not in raised and not (rule.constant and self.resumes)
        }

    def _component(self, name: str) -> ComponentPlan:
        spec, fleet, component = self.spec, self.fleet, self.spec.processes.get(name)
        env = component_env(spec, name, self.run_id, self.place.number, self.grant)
        if component is None:
            assert fleet is not None
            return fleet_component(fleet, env, spec.on_exit_zero(name))
        is_job, folder = component.launcher == "ray_job", component.checkpoints
        command = Command(
            argv=component.command,
            env={**env, **(fleet.env_of(name, others=spec.components) if fleet else {})},
            cwd=Path(component.cwd or spec.cwd),
            log=self.place.log(name),
            stop_signal=signals.Signals[component.stop.signal],
            grace_s=component.stop.grace_s,
        )
        return ComponentPlan(
            name=name,
            command=command,
            ready=component.ready,
            live=component.live,
            on_exit_zero=spec.on_exit_zero(name),
            is_saving=partial(is_writing_checkpoint, folder, command.cwd) if folder else None,
            make_member=partial(RayJob, job=self._job(name, command)) if is_job else None,
        )

    def _job(self, name: str, command: Command) -> JobPlan:
        """Of a component that is a Ray job; its command's directory is sent along."""
        ray, gang, place = self.spec.ray, self.spec.gang, self.place
        assert ray is not None and ray.address is not None
        is_only = [c.launcher for c in self.spec.processes.values()].count("ray_job") == 1
        takes_all = is_only and self.spec.fleet is None
        linked = links_in(command.cwd) if PROJECT in os.environ else ()
        return JobPlan(
            address=ray.address,
            submission_id=submission_id(self.run_id, place.number, name, is_only=is_only),
            run_id=self.run_id,
            attempt=place.number,
            component=name,
            command=command,
            entrypoint_resources=ray.entrypoint_resources or {},
            entrypoint_label_selector=ray.entrypoint_label_selector or {},
            nodes=self.grant.nodes if self.grant is not None else (),
            # Of several jobs, or beside a fleet, nobody knows which takes how many.
            gpus=gang.nodes * gang.gpus_per_node if gang and takes_all else 0,
            start_within_s=ray.start_within_s,
            submission_file=submission_file(place, name, is_only=is_only),
            # What is linked is no code.
            excludes=tuple(f"/{one}" for one in linked),
            may_be_submitted_since=self.adopted.started_at if self.adopted is not None else None,
            mask=self.mask,
        )


async def _gpu_use(address: str, given: GpuGrant | None) -> Mapping[str, float]:
    async with aclosing(Dashboard(address)) as dashboard:
        return await dashboard.gpu_use(given.nodes if given else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGrant:
    """What the queue has given a run for an attempt."""

    #: `gpus[node name]`.
    nodes: Mapping[str, int]
    #: Of this host, as its driver numbers them; empty where Ray gives them.
    devices: tuple[int, ...] = ()
    #: nvidia | amd | ascend
    kind: str = "nvidia"

    def env(self, spec: RunSpec, name: str) -> dict[str, str]:
        """By which a component knows, and sees, what is its own."""
        nodes = {"MUSTER_NODES": ",".join(self.nodes)}
        if not self.devices:
            return nodes
        seen = listed(self.shares(spec)[name])
        # As the driver numbers them, and not by their speed.
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.kind == "nvidia" else {}
        shown = dict.fromkeys(DEVICE_VARIABLES[self.kind], seen)
        return {**nodes, **order, "MUSTER_DEVICES": seen, **shown}

    def shares(self, spec: RunSpec) -> dict[str, tuple[int, ...]]:
        """`devices[component]`: those that say how many they need have them for themselves; the
        others see what is left, or all where nothing is."""
        left, own = list(self.devices), dict[str, tuple[int, ...]]()
        for name in spec.components:
            if (count := spec.count_reserved_gpus(name)) is not None:
                own[name], left = tuple(left[:count]), left[count:]
        rest = tuple(left) or self.devices
        return {name: own.get(name, rest) for name in spec.components}


def component_env(
    spec: RunSpec, name: str, run_id: str, attempt: int, given: GpuGrant | None = None
) -> dict[str, str]:
    """The variables of a component: all of them, or those that its job adds to its node's."""
    component = spec.processes.get(name)
    # A job runs on another machine: nothing of this one's environment is true there.
    is_job = component is not None and component.launcher == "ray_job"
    inherited = {key: value for key, value in os.environ.items() if not _is_private(key)}
    if inherited.pop("PREFECT_PLUGINS_ALLOW", None) or "PREFECT_PLUGINS_ENABLED" in inherited:
        # Muster's plugin would give a component the password of the stack.
        inherited.update(UNPLUGGED_PREFECT)
    own: dict[str, str] = {}
    if (project := os.environ.get(PROJECT)) and component is not None and not is_job:
        # What is installed as editable would be imported from the project as it is now.
        paths = import_path(Path(project), Path.cwd())
        before = select_literals({**spec.env, **component.env}).get(
            "PYTHONPATH", inherited.get("PYTHONPATH")
        )
        own = {"PYTHONPATH": os.pathsep.join(filter(None, (*paths, before)))} if paths else {}
        # `uv run` would install the project anew, from this copy, into the environment of all.
        inherited.setdefault("UV_NO_SYNC", "1")
    known, tracked = (
        {**({} if is_job else inherited), **select_literals(spec.env)},
        dict[str, str](),
    )
    if "WANDB_RUN_ID" not in known and "WANDB_RESUME" not in known:
        # All attempts are one run of Weights & Biases, for each component its own.
        tracked["WANDB_RUN_ID"] = run_id if name == "trainer" else f"{run_id}-{name}"
        tracked["WANDB_RESUME"] = "allow"
    return {
        **({} if is_job else {**inherited, "PATH": component_search_path()}),
        **_PYTHON_ENV,
        **select_literals(spec.env),
        **tracked,
        # A fleet's are its servers', and come to them by another way.
        **(select_literals(component.env) if component is not None else {}),
        **own,
        **(given.env(spec, name) if given is not None else {}),
        "MUSTER_RUN_ID": run_id,
        "MUSTER_ATTEMPT": str(attempt),
        "MUSTER_COMPONENT": name,
    }


@cache
def _is_private(name: str) -> bool:
    """About this process, or a key to its Prefect server, with which a component could start and
    end the runs of others; one that needs it gets it by the `env` of its spec."""
    if name in _PRIVATE_ENV or name.startswith("PREFECT__"):
        return True
    is_key = looks_secret(name) or name.endswith("_CONNECTION_URL")
    return name.startswith("PREFECT_") and is_key
