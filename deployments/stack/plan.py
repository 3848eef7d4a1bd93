"""The plan of a stack: the command and the readiness probe of each part, in start order."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    build_ray_auth,
    client_env,
    renew_password,
)
from deployments.stack.nodes import NODE_RESOURCE, Fleet
from deployments.stack.ray_directory import create_ray_directory, make_temp_dir_option
from deployments.stack.state import RAY, RAYLET_HEALTH, Stack, StackNode, StackPlace
from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.identity import ProcessId, host_name
from tasks.processes.own_modules import make_own_command, make_own_env
from tasks.processes.ports import PortsReserved, has_listener
from tasks.record.places import server_password
from tasks.server.server import make_server_command
from tasks.spec.probes import ReadyProbe

#: Default port of the Ray dashboard in run specs. A stack uses this port if it is free.
RAY_DASHBOARD_PORT = 8265

#: Seconds from the stop of the `muster up` stack until its runs are killed. Usually, a run ends
#: earlier, within the grace periods of its components.
RUNS_WITHIN_S = 3600.0

#: Name of the `muster up` stack's Prefect server.
SERVER = "prefect-server"
#: Name of the `muster up` stack's program that sets up the Prefect server and then ends.
DEPLOYMENTS = "deployments"
#: Name of the `muster up` stack's program that cleans up after runs whose process was killed.
UPKEEP = "upkeep"
#: Name of the `muster up` stack's worker for the work pool of pipelines.
PIPELINES = "pipelines"
#: Name of the worker that `muster up` starts for the work pool of runs.
WORKER = "worker"

#: Names of the reserved ports of the Ray head. Each key is the option of `ray start --head` for the
#: port. Ray's default ports are not used, because two Ray heads with the same ports on one machine
#: end each other.
_RAY_PORTS = {
    "--port": f"{RAY}.gcs",
    "--ray-client-server-port": f"{RAY}.client",
    "--dashboard-agent-listen-port": f"{RAY}.agent",
}
#: Ray's environment variables for the Ray head and every Ray node.
#:
#: With the health check settings, Ray detects a crashed or stopped node after about 8 seconds
#: instead of 65. After that, Muster's queue grants GPUs of other nodes to the run that used the
#: node.
#:
#: The setting for process groups makes Ray kill the process group of a worker process when the
#: worker ends. Another setting turns off Ray's deprecated subreaper. With the subreaper, workers
#: ignore SIGCHLD, so a crashed child process of a worker appears to have exited with code 0.
_RAY_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_process_group_cleanup_enabled": "true",
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "false",
}
#: Size of the object store of each Ray node. Ray's default is 30 % of the machine's memory for each
#: node, which is too much for many nodes on one machine.
_NODE_OBJECT_STORE_BYTES = 200 * 1024 * 1024
#: Longest time, in seconds, from the start of a program of the `muster up` stack until the program
#: is ready. The time is long, because the machine may be very busy. A program that dies is
#: reported at once.
_READY_WITHIN_S = 300.0
#: Grace period of a stopped Prefect worker, in seconds. The grace period begins after the end of
#: the worker's runs.
_WORKER_GRACE_S = 20.0
#: Grace period of the Ray head and of each Ray node, in seconds.
_RAY_GRACE_S = 15.0
#: Seconds from SIGTERM to SIGKILL when the stack stops its Prefect server.
_SERVER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The data that a supervisor needs to start a new `muster up` stack."""

    #: Initial content of the file `stack.json`, which describes the `muster up` stack.
    stack: Stack
    #: Programs of the `muster up` stack, called its parts, in the order of their start.
    plan: AttemptPlan
    #: Ports that are reserved for the parts of the `muster up` stack.
    ports: PortsReserved
    #: Mapping from a part of the `muster up` stack to another part that it needs. If the other part
    #: dies, both parts are restarted.
    needs: Mapping[str, str]


def build_blueprint(
    place: StackPlace, port: int, ray_dashboard: int | None = None, fleet: Fleet | None = None
) -> Blueprint:
    """Return the data that this process needs to start and supervise a new `muster up` stack.

    The call also reserves the ports of the stack, creates a directory for Ray, and writes a new
    Prefect password into this MUSTER_HOME.

    Args:
        place: Directory of the stack.
        port: Port of the Prefect server.
        ray_dashboard: Port of the Ray dashboard. 0 for any free port. None for 8265 if free,
            otherwise any free port.
        fleet: Ray nodes with logical GPUs. None for a cluster that consists only of the Ray head.

    Raises:
        OSError: No port is free, or a file or directory cannot be created.
    """
    renew_password()

    node_names = [f"ray-node-{number + 1}" for number in range(fleet.nodes if fleet else 0)]
    agent_ports = [f"{name}.agent" for name in node_names]
    port_names = [*_RAY_PORTS.values(), f"{RAY}.dashboard", f"{WORKER}.health", *agent_ports]
    ports = PortsReserved(port_names)
    dashboard_port = ray_dashboard or ports.numbers[f"{RAY}.dashboard"]
    if ray_dashboard is None and not has_listener(RAY_DASHBOARD_PORT):
        dashboard_port = RAY_DASHBOARD_PORT

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
        ray_dashboard=f"http://{HOST}:{dashboard_port}",
        ray_auth={key: value for key, value in build_ray_auth().items() if key != RAY_TOKEN},
        ray_address=f"{HOST}:{ports.numbers[f'{RAY}.gcs']}",
        ray_temp=create_ray_directory(place.directory.parent),
        fleet=str(fleet or ""),
        nodes=tuple(
            StackNode(
                name=name,
                gpus=fleet.gpus,
                cpus=fleet.cpus,
                agent=f"http://{HOST}:{ports.numbers[agent_port]}",
            )
            for name, agent_port in zip(node_names, agent_ports, strict=True)
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
            _plan_server(place, stack),
            _plan_deployments(place, stack),
            _plan_ray_head(place, stack, ports.numbers, dashboard_port),
            # Start the nodes one after the other. Ray nodes that start at the same time may choose
            # the same ports.
            *(_plan_ray_node(place, stack, node) for node in stack.nodes),
            _plan_upkeep(place, stack),
            _plan_pipelines(place, stack),
            _plan_worker(place, stack, ports.numbers[f"{WORKER}.health"]),
        ),
    )
    # If the Ray head is restarted, restart all Ray nodes, too. A node that is still running cannot
    # join the new cluster of the restarted head.
    needs = dict.fromkeys(node_names, RAY)
    return Blueprint(stack=stack, plan=plan, ports=ports, needs=needs)


def _plan_server(place: StackPlace, stack: Stack) -> ComponentPlan:
    """Return the `ComponentPlan` of the Prefect server: its command and its readiness probe."""
    settings = {SERVER_AUTH: auth_string()}
    command = make_server_command(place.server_home, stack.port, settings=settings)
    server_variables = {
        key: value for key, value in command.env.items() if key.startswith("PREFECT_")
    }
    command = replace(
        command,
        # Limit the time of the shutdown. Otherwise a stopped server would wait until all browsers
        # have closed the UI.
        argv=(*command.argv, "--timeout-graceful-shutdown", "2"),
        env={**_build_env(place, stack, SERVER), **make_own_env(), **server_variables},
        log=place.log(SERVER),
        grace_s=_SERVER_GRACE_S,
    )
    ready = ReadyProbe(http=f"{stack.api_url}/health", within_s=_READY_WITHIN_S)
    return _plan_part(SERVER, command, ready)


def _plan_deployments(place: StackPlace, stack: Stack) -> ComponentPlan:
    """Return the `ComponentPlan` of the program that sets up the Prefect server and then ends."""
    command = Command(
        argv=make_own_command("deployments.stack.setup"),
        env={
            **_build_env(place, stack, DEPLOYMENTS),
            **make_own_env(),
            RAY_VARIABLE: stack.ray_dashboard,
        },
        cwd=ROOT,
        log=place.log(DEPLOYMENTS),
    )
    ready = ReadyProbe(log=f"^{SET_UP}", within_s=_READY_WITHIN_S)
    return replace(_plan_part(DEPLOYMENTS, command, ready), on_exit_zero="drain")


def _plan_ray_head(
    place: StackPlace, stack: Stack, ports: Mapping[str, int], dashboard_port: int
) -> ComponentPlan:
    """Return the `ComponentPlan` of the Ray head.

    Args:
        place: Directory of the `muster up` stack.
        stack: The new stack.
        ports: Mapping from the name of a reserved port to its number.
        dashboard_port: Port of the Ray dashboard.
    """
    port_options = [f"{option}={ports[name]}" for option, name in _RAY_PORTS.items()]
    command = Command(
        argv=(
            *make_own_command("ray.scripts.scripts"),
            "start",
            "--head",
            "--block",
            # Give the head no CPUs and GPUs, so that Ray starts no tasks and actors of runs on the
            # head. Only the drivers of Ray jobs run there.
            "--num-cpus=0",
            "--num-gpus=0",
            f"--node-name={RAY}",
            *port_options,
            # Let Ray take any free ports for its workers (0). With its default range of worker
            # ports, Ray would refuse to start if one of the head's own ports is in this range.
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--dashboard-host={HOST}",
            f"--dashboard-port={dashboard_port}",
            make_temp_dir_option(stack.ray_temp),
            "--disable-usage-stats",
            "--log-style=record",
            "--log-color=false",
        ),
        env={**_build_env(place, stack, RAY), **_RAY_SETTINGS},
        cwd=ROOT,
        log=place.log(RAY),
        # Stop `ray start` with SIGINT. After SIGTERM, `ray start` would first send requests for up
        # to 30 seconds to Ray's control store, which has already ended.
        stop_signal=signal.SIGINT,
        grace_s=_RAY_GRACE_S,
    )
    agent = f"http://{HOST}:{ports[_RAY_PORTS['--dashboard-agent-listen-port']]}"
    ready = ReadyProbe(http=f"{agent}{RAYLET_HEALTH}", within_s=_READY_WITHIN_S)
    return _plan_part(RAY, command, ready)


def _plan_ray_node(place: StackPlace, stack: Stack, node: StackNode) -> ComponentPlan:
    """Return the `ComponentPlan` of a Ray node with logical GPUs."""
    command = Command(
        argv=(
            *make_own_command("deployments.stack.ray_node"),
            stack.ray_address,
            "--block",
            f"--num-cpus={node.cpus}",
            f"--num-gpus={node.gpus}",
            # Muster's queue identifies a Ray node by this name. Ray's default is the host name,
            # which all nodes of this machine share.
            f"--node-name={node.name}",
            f"--resources={json.dumps({NODE_RESOURCE: 100})}",
            # Each node needs its own agent port. Otherwise the Ray dashboard cannot show the logs
            # of the Ray jobs on the node.
            f"--dashboard-agent-listen-port={urlsplit(node.agent).port}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--object-store-memory={_NODE_OBJECT_STORE_BYTES}",
            # Start no log monitor here. The Ray head's log monitor reads the logs of all nodes,
            # because all nodes run on this machine.
            "--include-log-monitor=false",
            make_temp_dir_option(stack.ray_temp),
            "--disable-usage-stats",
            "--log-style=record",
            "--log-color=false",
        ),
        env={**_build_env(place, stack, node.name), **_RAY_SETTINGS},
        cwd=ROOT,
        log=place.log(node.name),
        stop_signal=signal.SIGINT,
        grace_s=_RAY_GRACE_S,
    )
    return _plan_part(node.name, command, ReadyProbe(http=node.health, within_s=_READY_WITHIN_S))


def _plan_upkeep(place: StackPlace, stack: Stack) -> ComponentPlan:
    """Return the `ComponentPlan` of the program that cleans up after killed runs."""
    command = Command(
        argv=make_own_command("deployments.upkeep"),
        env={**_build_env(place, stack, UPKEEP), **make_own_env()},
        cwd=ROOT,
        log=place.log(UPKEEP),
    )
    ready = ReadyProbe(log="^Your flow 'reconcile' is being served", within_s=_READY_WITHIN_S)
    return _plan_part(UPKEEP, command, ready)


def _plan_pipelines(place: StackPlace, stack: Stack) -> ComponentPlan:
    """Return the `ComponentPlan` of the worker of the work pool for pipelines."""
    command = Command(
        argv=(
            *make_own_command("deployments.worker"),
            "--pool",
            PIPELINES_POOL,
            "--name",
            stack.worker,
            "--install-policy",
            "never",
        ),
        env={
            **_build_env(place, stack, PIPELINES),
            **make_own_env(),
            "PREFECT_WORKER_QUERY_SECONDS": "5",
            "PREFECT_WORKER_PREFETCH_SECONDS": "0",
        },
        cwd=ROOT,
        log=place.log(PIPELINES),
        grace_s=_WORKER_GRACE_S,
        children_grace_s=RUNS_WITHIN_S,
    )
    ready = ReadyProbe(log="^Worker .* started!", within_s=_READY_WITHIN_S)
    return _plan_part(PIPELINES, command, ready)


def _plan_worker(place: StackPlace, stack: Stack, health_port: int) -> ComponentPlan:
    """Return the `ComponentPlan` of the Prefect worker that starts runs.

    Args:
        place: Directory of the `muster up` stack.
        stack: The new stack.
        health_port: Port of the worker's health check.
    """
    command = Command(
        argv=(
            *make_own_command("deployments.worker"),
            "--pool",
            POOL,
            "--name",
            stack.worker,
            "--install-policy",
            "never",
            "--with-healthcheck",
        ),
        env={
            **_build_env(place, stack, WORKER),
            # Let the worker poll every 10 seconds. The poll is only needed after a lost event,
            # because normally an event of the Prefect server starts a scheduling pass at once.
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
    return _plan_part(WORKER, command, ready)


def _plan_part(name: str, command: Command, ready: ReadyProbe) -> ComponentPlan:
    """Return the plan of a part of the `muster up` stack: its command and its readiness probe.

    If the program of the part exits, even with 0, the part counts as failed.
    """
    return ComponentPlan(name=name, command=command, ready=ready, live=None, on_exit_zero="fail")


def _build_env(place: StackPlace, stack: Stack, component: str) -> dict[str, str]:
    """Return the environment variables of a program of the `muster up` stack.

    Args:
        place: Directory of the stack.
        stack: The new stack.
        component: Name of the program, such as `ray-head`.
    """
    return {
        **client_env(place.directory.parent, stack.api_url),
        **build_ray_auth(),
        "RAY_USAGE_STATS_ENABLED": "0",
        # If RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0, Ray listens only on the loopback interface.
        # With 1, Ray listens on every interface, even if Muster passes an address.
        # Source: ray/_private/services.py, get_node_ip_address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "MUSTER_RUN_ID": RUN_ID,
        "MUSTER_COMPONENT": component,
        STACK_VARIABLE: stack.stack_id,
    }
