"""The parts of a stack, in the order of their start: what each runs and when it is ready."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from deployments.stack.env import (
    HOST,
    PIPELINES_POOL,
    POOL,
    RAY_TOKEN,
    RAY_VARIABLE,
    ROOT,
    RUN_ID,
    SERVER_AUTH,
    SET_UP,
    STACK_VARIABLE,
    auth_string,
    client_env,
    ray_auth,
    renew_password,
)
from deployments.stack.nodes import NODE_RESOURCE, Fleet
from deployments.stack.state import RAY_TEMP_PREFIX, RAYLET_HEALTH, Stack, StackNode, StackPlace
from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.identity import ProcessId, host_name
from tasks.processes.ports import PortsReserved, is_listened
from tasks.record.places import server_password
from tasks.server.server import server_command
from tasks.spec.probes import ReadyProbe

#: Where run specs look for Ray unless they say otherwise; taken where it is free.
RAY_DASHBOARD_PORT = 8265

#: Longest time, in seconds, that the runs of a stack have at a stop before they are killed. A run
#: ends earlier by itself, within the grace periods of its components.
RUNS_WITHIN_S = 3600.0

SERVER, DEPLOYMENTS, RAY = "prefect-server", "deployments", "ray-head"
UPKEEP, PIPELINES, WORKER = "upkeep", "pipelines", "worker"
_RAY_PORTS = {
    # Without ports of their own, two heads on a machine end each other.
    "--port": f"{RAY}.gcs",
    "--ray-client-server-port": f"{RAY}.client",
    "--dashboard-agent-listen-port": f"{RAY}.agent",
}
#: On every node, the head included. A crashed or stopped node is known as dead after about 8 s, in
#: place of 65, so that its job's GPUs are asked for again soon. What a worker process of Ray leaves
#: in its process group dies with it. Ray's subreaper would reach further, but is deprecated, and
#: makes every worker ignore SIGCHLD, by which a crashed child counts as one that exited 0.
_RAY_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_process_group_cleanup_enabled": "true",
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "false",
}
#: By default 30 % of the machine's memory for each node, of which there are many here.
_NODE_OBJECT_STORE_BYTES = 200 * 1024 * 1024
_READY_WITHIN_S = 120.0
#: Of a worker at a stop, after its runs have ended.
_WORKER_GRACE_S = 20.0
_RAY_GRACE_S = 15.0
_SERVER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A stack that can be started."""

    stack: Stack
    plan: AttemptPlan
    ports: PortsReserved
    #: `needs[part]`: the part without which it can't go on.
    needs: Mapping[str, str]


def draw_up(
    place: StackPlace, port: int, ray_dashboard: int | None = None, fleet: Fleet | None = None
) -> Blueprint:
    """The stack of this process, with ports and Ray's directory of its own.

    Args:
        port: of the Prefect server.
        ray_dashboard: its port; 0: any free one, None: 8265 where that is free.
        fleet: nodes with GPUs; None: the head is alone.

    Raises: OSError, when no port is free or no directory can be made.
    """
    renew_password()
    node_names = [f"ray-node-{number + 1}" for number in range(fleet.nodes if fleet else 0)]
    agents = [f"{name}.agent" for name in node_names]
    names = [*_RAY_PORTS.values(), f"{RAY}.dashboard", f"{WORKER}.health", *agents]
    ports = PortsReserved(names)
    dashboard = ray_dashboard or ports.numbers[f"{RAY}.dashboard"]
    if ray_dashboard is None and not is_listened(RAY_DASHBOARD_PORT):
        dashboard = RAY_DASHBOARD_PORT
    url = f"http://{HOST}:{port}"
    stack = Stack(
        stack_id=uuid.uuid4().hex,
        state="starting",
        started_at=time.time(),
        supervisor=ProcessId.of(os.getpid()),
        port=port,
        api_url=f"{url}/api",
        ui_url=url,
        has_own_password=auth_string() == server_password(),
        ray_dashboard=f"http://{HOST}:{dashboard}",
        ray_auth={key: value for key, value in ray_auth().items() if key != RAY_TOKEN},
        ray_address=f"{HOST}:{ports.numbers[f'{RAY}.gcs']}",
        # Short, since the sockets in it may have 107 characters in all.
        ray_temp=Path(tempfile.mkdtemp(prefix=RAY_TEMP_PREFIX, dir="/tmp")),
        fleet=str(fleet or ""),
        nodes=tuple(
            StackNode(
                name=name,
                gpus=fleet.gpus,
                cpus=fleet.cpus,
                agent=f"http://{HOST}:{ports.numbers[agent]}",
            )
            for name, agent in zip(node_names, agents, strict=True)
            if fleet is not None
        ),
        worker=host_name(),
        worker_health=f"http://{HOST}:{ports.numbers[f'{WORKER}.health']}/health",
    )
    plan = AttemptPlan(
        run_id=RUN_ID,
        number=1,
        cwd=ROOT,
        components=(
            _server(place, stack),
            _deployments(place, stack),
            _ray_head(place, stack, ports.numbers, dashboard),
            # One after the other: nodes that start at once on one machine race for ports.
            *(_ray_node(place, stack, node) for node in stack.nodes),
            _upkeep(place, stack),
            _pipelines(place, stack),
            _worker(place, stack, ports.numbers[f"{WORKER}.health"]),
        ),
    )
    # A node joins the cluster of one head process, and never that of the next one.
    needs = dict.fromkeys(node_names, RAY)
    return Blueprint(stack=stack, plan=plan, ports=ports, needs=needs)


def _server(place: StackPlace, stack: Stack) -> ComponentPlan:
    settings = {SERVER_AUTH: auth_string()}
    command = server_command(place.server_home, stack.port, settings=settings)
    own = {key: value for key, value in command.env.items() if key.startswith("PREFECT_")}
    command = replace(
        command,
        # A browser that looks at the UI would hold it up for ever.
        argv=(*command.argv, "--timeout-graceful-shutdown", "2"),
        env={**_env(place, stack, SERVER), **own},
        log=place.log(SERVER),
        grace_s=_SERVER_GRACE_S,
    )
    ready = ReadyProbe(http=f"{stack.api_url}/health", within_s=_READY_WITHIN_S)
    return _component(SERVER, command, ready)


def _deployments(place: StackPlace, stack: Stack) -> ComponentPlan:
    command = Command(
        argv=(sys.executable, "-m", "deployments.stack.setup"),
        env={**_env(place, stack, DEPLOYMENTS), RAY_VARIABLE: stack.ray_dashboard},
        cwd=ROOT,
        log=place.log(DEPLOYMENTS),
    )
    ready = ReadyProbe(log=f"^{SET_UP}", within_s=_READY_WITHIN_S)
    return replace(_component(DEPLOYMENTS, command, ready), on_exit_zero="drain")


def _ray_head(
    place: StackPlace, stack: Stack, ports: Mapping[str, int], dashboard: int
) -> ComponentPlan:
    command = Command(
        argv=(
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            # Nothing of a run lands on the head but the drivers of its jobs.
            *("--num-cpus=0", "--num-gpus=0"),
            f"--node-name={RAY}",
            *(f"{option}={ports[name]}" for option, name in _RAY_PORTS.items()),
            # Any free ones; by default a range in which ours may lie, which Ray refuses.
            *("--min-worker-port=0", "--max-worker-port=0"),
            *(f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}"),
            *(f"--temp-dir={stack.ray_temp}/r", "--disable-usage-stats"),
            *("--log-style=record", "--log-color=false"),
        ),
        env={**_env(place, stack, RAY), **_RAY_SETTINGS},
        cwd=ROOT,
        log=place.log(RAY),
        # At SIGTERM it first asks Ray's head, which has got the same signal, for 30 s.
        stop_signal=signal.SIGINT,
        grace_s=_RAY_GRACE_S,
    )
    agent = f"http://{HOST}:{ports[_RAY_PORTS['--dashboard-agent-listen-port']]}"
    ready = ReadyProbe(http=f"{agent}{RAYLET_HEALTH}", within_s=_READY_WITHIN_S)
    return _component(RAY, command, ready)


def _ray_node(place: StackPlace, stack: Stack, node: StackNode) -> ComponentPlan:
    command = Command(
        argv=(
            *(sys.executable, "-m", "deployments.stack.ray_node", stack.ray_address, "--block"),
            *(f"--num-cpus={node.cpus}", f"--num-gpus={node.gpus}"),
            # The name by which the queue knows it; by default that of the machine.
            f"--node-name={node.name}",
            f"--resources={json.dumps({NODE_RESOURCE: 100})}",
            # Without one of its own, the logs of the jobs on it can't be had from the head.
            f"--dashboard-agent-listen-port={urlsplit(node.agent).port}",
            *("--min-worker-port=0", "--max-worker-port=0"),
            f"--object-store-memory={_NODE_OBJECT_STORE_BYTES}",
            # That of the head looks after the logs of the whole machine.
            "--include-log-monitor=false",
            *(f"--temp-dir={stack.ray_temp}/r", "--disable-usage-stats"),
            *("--log-style=record", "--log-color=false"),
        ),
        env={**_env(place, stack, node.name), **_RAY_SETTINGS},
        cwd=ROOT,
        log=place.log(node.name),
        stop_signal=signal.SIGINT,
        grace_s=_RAY_GRACE_S,
    )
    return _component(node.name, command, ReadyProbe(http=node.health, within_s=_READY_WITHIN_S))


def _upkeep(place: StackPlace, stack: Stack) -> ComponentPlan:
    command = Command(
        argv=(sys.executable, "-m", "deployments.upkeep"),
        env=_env(place, stack, UPKEEP),
        cwd=ROOT,
        log=place.log(UPKEEP),
    )
    ready = ReadyProbe(log="^Your flow 'reconcile' is being served", within_s=_READY_WITHIN_S)
    return _component(UPKEEP, command, ready)


def _pipelines(place: StackPlace, stack: Stack) -> ComponentPlan:
    command = Command(
        argv=(
            *(sys.executable, "-m", "deployments.worker"),
            *("--pool", PIPELINES_POOL, "--name", stack.worker, "--install-policy", "never"),
        ),
        env={
            **_env(place, stack, PIPELINES),
            "PREFECT_WORKER_QUERY_SECONDS": "5",
            "PREFECT_WORKER_PREFETCH_SECONDS": "0",
        },
        cwd=ROOT,
        log=place.log(PIPELINES),
        grace_s=_WORKER_GRACE_S,
        children_grace_s=RUNS_WITHIN_S,
    )
    ready = ReadyProbe(log="^Worker .* started!", within_s=_READY_WITHIN_S)
    return _component(PIPELINES, command, ready)


def _worker(place: StackPlace, stack: Stack, health_port: int) -> ComponentPlan:
    command = Command(
        argv=(
            *(sys.executable, "-m", "deployments.worker"),
            *("--pool", POOL, "--name", stack.worker),
            *("--install-policy", "never", "--with-healthcheck"),
        ),
        env={
            **_env(place, stack, WORKER),
            # Events wake it; this is for those that are lost.
            "PREFECT_WORKER_QUERY_SECONDS": "10",
            "PREFECT_WORKER_PREFETCH_SECONDS": "0",
            "PREFECT_WORKER_WEBSERVER_HOST": HOST,
            "PREFECT_WORKER_WEBSERVER_PORT": str(health_port),
        },
        cwd=ROOT,
        log=place.log(WORKER),
        grace_s=_WORKER_GRACE_S,
        children_grace_s=RUNS_WITHIN_S,
    )
    ready = ReadyProbe(log="^Worker .* started!", within_s=_READY_WITHIN_S)
    return _component(WORKER, command, ready)


def _component(name: str, command: Command, ready: ReadyProbe) -> ComponentPlan:
    return ComponentPlan(name=name, command=command, ready=ready, live=None, on_exit_zero="fail")


def _env(place: StackPlace, stack: Stack, component: str) -> dict[str, str]:
    return {
        **client_env(place.directory.parent, stack.api_url),
        **ray_auth(),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray on loopback only: by default it listens on every interface, whatever address it is
        # given. Source: ray/_private/services.py, get_node_ip_address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "MUSTER_RUN_ID": RUN_ID,
        "MUSTER_COMPONENT": component,
        STACK_VARIABLE: stack.stack_id,
    }
