"""Turn the resolved run spec of an attempt into the plan that the supervisor executes."""

from __future__ import annotations

import os
import signal as signals
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.containment import Containment, probe
from tasks.processes.devices import format_devices
from tasks.processes.guarded import Command
from tasks.processes.warning_signal import StopWarning
from tasks.ray.dashboard import CLUSTERS_VARIABLE, Dashboard
from tasks.ray.job import RayJob
from tasks.ray.submission import JobPlan, submission_file, submission_id
from tasks.record.checkpoints import CheckpointGrowth, find_newest_step, is_writing_checkpoint
from tasks.record.code_store import PROJECT, find_absolute_links, list_import_folders
from tasks.record.metrics_file import FileFingerprint
from tasks.record.places import CALLERS_UMASK, AttemptPlace, callers_umask
from tasks.record.run_json import AttemptRecord, ResumeRecord
from tasks.rollout.component import FleetPlan, fleet_component
from tasks.server.trusted_clients import UNPLUGGED_PREFECT
from tasks.spec.checkpoint_urls import is_url
from tasks.spec.component import ComponentStop
from tasks.spec.run import RunSpec
from tasks.spec.run_rules import DEVICE_VARIABLES
from tasks.spec.secrets import looks_secret
from tasks.spec.values import select_literals
from tasks.spec.watch import WatchRule
from tasks.train.interpreters import component_interpreter, component_search_path
from tasks.train.trackers import tracker_env

#: Environment variables that are only for this process. Components do not inherit them.
_PRIVATE_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "MUSTER_ROLE",
    CALLERS_UMASK,
    "PYTHONSAFEPATH",
    "MUSTER_DEADLINE",
    CLUSTERS_VARIABLE,
)
#: Environment variables that every component gets. The spec can set other values.
_PYTHON_VARIABLES = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def find_containment(spec: RunSpec) -> Containment:
    """Return the kernel features with which this machine can end all processes of a run."""
    return probe(namespace=spec.containment == "namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All values from which the plan of one attempt is computed."""

    #: The run spec with the values of placeholders and of Prefect Secret blocks.
    spec: RunSpec
    #: Id of the run.
    run_id: str
    #: Paths of the attempt's files.
    place: AttemptPlace
    #: The kernel features with which this machine can end all processes of the attempt.
    containment: Containment
    #: Record of the attempt if an earlier process of the run started this attempt, otherwise None.
    adopted: AttemptRecord | None = None
    #: Plan of the inference servers. None if the run has no inference servers.
    fleet: FleetPlan | None = None
    #: The nodes and GPUs that the queue granted to the run. None if the run needs no GPUs.
    grant: GpuGrant | None = None
    #: Fingerprint of the metrics file at the start of the attempt. Lines that were added later
    #: belong to the attempt. None has two meanings. For a new attempt, the supervisor makes the
    #: fingerprint when the attempt starts. For an attempt that an earlier process of the run
    #: started, all lines of the file belong to the attempt.
    metrics: FileFingerprint | None = None
    #: True if the attempt starts from a checkpoint.
    resumes: bool = False
    #: The checkpoint from which the attempt starts, and the reasons for its choice. None if
    #: unknown.
    resume: ResumeRecord | None = None
    #: Highest training step of all earlier attempts. None if no earlier attempt completed a step.
    best_step_before: float | None = None
    #: Checkpoints that other runs wrote into the same folder: a mapping from the path to the hash
    #: of each checkpoint.
    foreign: Mapping[str, str] = field(default_factory=dict)
    #: Mapping from component names to the ids of their parent runs in MLflow. A component may have
    #: no parent run.
    mlflow_parents: Mapping[str, str] = field(default_factory=dict)
    #: Function that replaces each secret in a text by `***`.
    mask: Callable[[str], str] = str
    #: Start of the attempt, in UTC epoch seconds. Ignored if an earlier process of the run started
    #: the attempt.
    begins_at: float = field(default_factory=time.time)

    @property
    def began_at(self) -> float:
        """Start of the attempt, in UTC epoch seconds."""
        return self.adopted.started_at if self.adopted is not None else self.begins_at

    @property
    def time_limit_s(self) -> float | None:
        """Time limit of the attempt in seconds, or None if there is no limit."""
        gang = self.spec.gang
        limits = [self.spec.timeout_s]
        if gang is not None and gang.max_hours:
            limits.append(gang.max_hours * 3600)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def deadline(self) -> float | None:
        """End of the attempt's time limit, in UTC epoch seconds. None if there is no limit."""
        return self.began_at + self.time_limit_s if self.time_limit_s is not None else None

    def plan(self) -> AttemptPlan:
        """Return the plan of the attempt, with the plans of all components in start order."""
        spec = self.spec
        gpu_use = None
        if spec.ray is not None:
            gpu_use = partial(_read_gpu_use, spec.ray.address or "", self.grant)
        return AttemptPlan(
            run_id=self.run_id,
            number=self.place.number,
            cwd=Path(spec.cwd),
            components=tuple(self._plan_component(name) for name in spec.components),
            progress=spec.progress,
            alarms=self._select_alarms(),
            success_step=spec.success.step if spec.success else None,
            resume=self.resume,
            best_step_before=self.best_step_before,
            finish_within_s=spec.finish_within_s,
            stall_after_s=spec.stall_after_s,
            time_limit_s=self.time_limit_s,
            time_limit_text=self._describe_time_limit(),
            devices=self.grant.devices if self.grant else (),
            gpu_use=gpu_use,
            containment=self.containment,
            began_at=self.began_at,
            mask=self.mask,
            metrics=self.metrics or (FileFingerprint() if self.adopted is not None else None),
        )

    def _describe_time_limit(self) -> str:
        """Return a text about the time limit that the spec key `timeout_s` sets.

        Returns:
            The text. Empty if the time limit comes from another key, such as `gang.max_hours`.
        """
        limit_s = self.spec.timeout_s
        is_used = limit_s and limit_s == self.time_limit_s
        return f"time limit of {limit_s:g} seconds (timeout_s)" if is_used else ""

    def _select_alarms(self) -> dict[str, WatchRule]:
        """Return a mapping from names to the alarm rules that apply to the attempt.

        Alarms that the attempt has already raised are left out. If the attempt starts from a
        checkpoint, rules about a constant metric are left out, too: the checkpoint may be close to
        the end of the training, where a constant metric is no fault.
        """
        raised = {alarm.rule for alarm in self.adopted.alarms} if self.adopted else set()
        return {
            name: rule
            for name, rule in self.spec.alarms.items()
            if name not in raised and not (rule.constant and self.resumes)
        }

    def _plan_component(self, name: str) -> ComponentPlan:
        """Return the plan of a component: how it is started, checked and stopped."""
        spec = self.spec
        fleet = self.fleet
        component = spec.processes.get(name)
        env = component_env(
            spec,
            name,
            self.run_id,
            self.place.number,
            self.grant,
            mlflow_parent=self.mlflow_parents.get(name, ""),
        )
        if self.deadline is not None:
            env["MUSTER_DEADLINE"] = str(int(self.deadline))
        if component is None:
            # The component consists of the inference servers. Muster itself builds the command for
            # them.
            assert fleet is not None
            return fleet_component(fleet, env, spec.on_exit_zero(name))

        fleet_env = fleet.env_of(name, others=spec.components) if fleet else {}
        command = Command(
            argv=component.command,
            env={**env, **fleet_env},
            cwd=Path(component.cwd or spec.cwd),
            log=self.place.log(name),
            stop_signal=signals.Signals[component.stop.signal],
            grace_s=component.stop.grace_s,
            save_grace_s=component.stop.save_grace_s,
            umask=callers_umask(),
            memory_limit_bytes=component.memory_bytes,
        )
        is_saving = None
        seconds_since_growth = None
        find_checkpoint = None
        if folder := component.checkpoints:
            is_saving = partial(is_writing_checkpoint, folder, command.cwd)
            growth = CheckpointGrowth(folder, command.cwd)
            seconds_since_growth = growth.seconds_since_growth
            find_checkpoint = partial(find_newest_step, folder, command.cwd, self.foreign)
        make_component = None
        if component.launcher == "ray_job":
            make_component = partial(RayJob, job=self._plan_job(name, command))
        return ComponentPlan(
            name=name,
            command=command,
            ready=component.ready,
            live=component.live,
            on_exit_zero=spec.on_exit_zero(name),
            checkpoints=_locate_checkpoints(folder or "", command.cwd),
            is_saving=is_saving,
            seconds_since_growth=seconds_since_growth,
            find_checkpoint=find_checkpoint,
            warning=_plan_warning(component.stop),
            log_max_bytes=component.log_max_bytes,
            make_component=make_component,
        )

    def _plan_job(self, name: str, command: Command) -> JobPlan:
        """Return the plan of a component that is a Ray job.

        Ray uploads the working directory of the component's command to the cluster.
        """
        ray = self.spec.ray
        gang = self.spec.gang
        assert ray is not None and ray.address is not None
        launchers = [component.launcher for component in self.spec.processes.values()]
        is_only_job = launchers.count("ray_job") == 1
        # `gpus` is the number of GPUs that the actors of the job must use. The value is 0 (unknown)
        # in three cases: the run has several jobs, the run has inference servers, or the driver of
        # the job uses GPUs (`entrypoint_gpus`).
        takes_all_gpus = is_only_job and self.spec.fleet is None and not ray.entrypoint_gpus
        gpus = gang.nodes * gang.gpus_per_node if gang and takes_all_gpus else 0
        # The folder with the submitted code contains symbolic links to data outside of the code. Do
        # not upload this data.
        links = find_absolute_links(command.cwd) if PROJECT in os.environ else ()
        return JobPlan(
            address=ray.address,
            submission_id=submission_id(self.run_id, self.place.number, name, is_only=is_only_job),
            run_id=self.run_id,
            attempt=self.place.number,
            component=name,
            command=command,
            entrypoint_resources=ray.entrypoint_resources or {},
            entrypoint_label_selector=ray.entrypoint_label_selector or {},
            entrypoint_cpus=ray.entrypoint_cpus,
            entrypoint_gpus=ray.entrypoint_gpus,
            entrypoint_memory_bytes=round((ray.entrypoint_memory_gib or 0) * (1 << 30)) or None,
            nodes=self.grant.nodes if self.grant is not None else (),
            gpus=gpus,
            start_within_s=ray.start_within_s,
            submission_file=submission_file(self.place, name, is_only=is_only_job),
            excludes=tuple(f"/{link}" for link in links),
            may_be_submitted_since=self.adopted.started_at if self.adopted is not None else None,
            mask=self.mask,
        )


def _locate_checkpoints(written: str, root: Path) -> str:
    """Return the absolute path or the URL of a folder of checkpoints.

    Args:
        written: The path or URL that the user wrote. Empty if the component has no checkpoints.
        root: Directory from which a relative path starts.

    Returns:
        The path or URL, or an empty string if `written` is empty.
    """
    return written if not written or is_url(written) else str(root / written)


def _plan_warning(stop: ComponentStop) -> StopWarning | None:
    """Return the signal that warns a component before it is ended, or None for no warning."""
    if stop.warn is None:
        return None
    return StopWarning(signum=signals.Signals[stop.warn], before_s=stop.warn_s)


async def _read_gpu_use(address: str, grant: GpuGrant | None) -> Mapping[str, float]:
    """Return a mapping from each granted node to its GPU utilisation, from 0 to 1.

    The values come from the Ray dashboard.
    """
    async with aclosing(Dashboard(address)) as dashboard:
        return await dashboard.gpu_use(grant.nodes if grant else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGrant:
    """The nodes and GPUs that the queue granted to a run for one attempt."""

    #: Mapping from the name of each node to the number of granted GPUs.
    nodes: Mapping[str, int]
    #: Indices of the granted GPUs of this machine, in the numbering of the GPU driver. Empty if Ray
    #: assigns the GPUs.
    devices: tuple[int, ...] = ()
    #: Vendor of the devices: nvidia, amd or ascend.
    kind: str = "nvidia"

    def env(self, spec: RunSpec, name: str) -> dict[str, str]:
        """Return environment variables with the nodes and devices that a component may use.

        Args:
            spec: The spec of the run.
            name: Name of the component.
        """
        env = {"MUSTER_NODES": ",".join(self.nodes)}
        if not self.devices:
            return env
        devices = format_devices(self.divide_devices(spec)[name])
        if self.kind == "nvidia":
            # By default, CUDA numbers the devices by speed. Muster uses the numbers of the GPU
            # driver, so make CUDA use the same numbers.
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["MUSTER_DEVICES"] = devices
        return {**env, **dict.fromkeys(DEVICE_VARIABLES[self.kind], devices)}

    def divide_devices(self, spec: RunSpec) -> dict[str, tuple[int, ...]]:
        """Return a mapping from component names to devices.

        A component that reserves GPUs gets devices of its own. All other components share the
        remaining devices. If no device remains, these components share all devices.
        """
        remaining = self.devices
        reserved: dict[str, tuple[int, ...]] = {}
        for name in spec.components:
            count = spec.count_reserved_gpus(name)
            if count is not None:
                reserved[name] = remaining[:count]
                remaining = remaining[count:]
        shared = remaining or self.devices
        return {name: reserved.get(name, shared) for name in spec.components}


def component_env(
    spec: RunSpec,
    name: str,
    run_id: str,
    attempt: int,
    grant: GpuGrant | None = None,
    *,
    mlflow_parent: str = "",
) -> dict[str, str]:
    """Return the environment variables of a component.

    A component that is a Ray job runs on another machine, so it does not inherit the variables of
    this process. Ray adds the returned variables to the variables of the node.

    Args:
        spec: The resolved spec of the run.
        name: Name of the component.
        run_id: Id of the run.
        attempt: Number of the attempt.
        grant: The nodes and GPUs that the queue granted to the run, or None.
        mlflow_parent: Id of the MLflow run under which the component's MLflow runs are grouped.
            Empty if there is no such run.
    """
    component = spec.processes.get(name)
    is_job = component is not None and component.launcher == "ray_job"
    inherited = {} if is_job else inherit_env()
    # The inference servers are not in `spec.processes`. Their own variables are in `FleetPlan`.
    own_env = select_literals(component.env) if component is not None else {}
    spec_env = {**select_literals(spec.env), **own_env}

    code_env: dict[str, str] = {}
    project = os.environ.get(PROJECT)
    if project and component is not None and not is_job:
        # Prevent `uv run` from installing this run's copy of the project into the Python
        # environment, because other runs use the same environment.
        inherited.setdefault("UV_NO_SYNC", "1")
        # With this PYTHONPATH, the component imports the submitted code. Otherwise, it would import
        # an editable package from the project's folder, whose files may have changed since the
        # submission.
        environment = component_interpreter({**spec.env, **component.env}).environment
        paths = list_import_folders(Path(project), Path.cwd(), environment)
        if paths:
            present = spec_env.get("PYTHONPATH", inherited.get("PYTHONPATH"))
            code_env = {"PYTHONPATH": os.pathsep.join(filter(None, (*paths, present)))}

    tracker_variables: dict[str, str] = {}
    if spec.tracker == "on" and component is not None:
        tracker_variables = tracker_env(
            name, run_id, attempt, {**inherited, **spec_env}, mlflow_parent=mlflow_parent
        )

    return {
        **inherited,
        **({} if is_job else {"PATH": component_search_path({**spec.env, **own_env})}),
        **_PYTHON_VARIABLES,
        **tracker_variables,
        **spec_env,
        **code_env,
        **(grant.env(spec, name) if grant is not None else {}),
        "MUSTER_RUN_ID": run_id,
        "MUSTER_ATTEMPT": str(attempt),
        "MUSTER_COMPONENT": name,
    }


def inherit_env() -> dict[str, str]:
    """Return the environment variables of this process that components inherit."""
    inherited = {key: value for key, value in os.environ.items() if not _is_private(key)}
    if inherited.pop("PREFECT_PLUGINS_ALLOW", None) or "PREFECT_PLUGINS_ENABLED" in inherited:
        # Prevent Prefect in the component from loading Muster's plugin, because the plugin provides
        # the password of the Prefect server.
        inherited.update(UNPLUGGED_PREFECT)
    return inherited


@cache
def _is_private(name: str) -> bool:
    """Return True if components must not inherit an environment variable of this process.

    Credentials of the Prefect server are private, because a component could use them to start and
    end the runs of other users. If a component needs the variable, the run spec must set it under
    `env`.
    """
    if name in _PRIVATE_VARIABLES or name.startswith("PREFECT__"):
        return True
    is_key = looks_secret(name) or name.endswith("_CONNECTION_URL")
    return name.startswith("PREFECT_") and is_key
