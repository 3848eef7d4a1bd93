"""Send many random runs through the gang queue under faults: `python -m tests.faults.gang_storm`.

Each variant submits a hundred real runs to a real Prefect server. They run on three simulated hosts
with 8 GPUs each. Each host has its own name, its own process namespace and a real worker. The
variants inject different faults:

- `plain`: no fault;
- `worker-killed`: workers are killed and started again;
- `two-workers`: each host has two workers;
- `server-restarted`: the Prefect server is killed and started again;
- `cancels`: random runs are cancelled;
- `requeues`: some runs do not find their GPUs and return to the queue;
- `host-lost`: a host loses its only worker;
- `postgresql`: the server uses PostgreSQL, the hosts have separate networks, and each part is
  killed and started again;
- `ray`: a tenth of the runs, on a real Ray cluster.

Each component records its host and the GPUs that it saw. At the end, these records and the state
histories of the Prefect server must show that no GPU was granted twice and that each run ended
correctly.

The seed is printed. The same seed draws the same runs, but the timing of the machine differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import httpx

from tests.support.gang_hosts import OtherHost, other_host
from tests.support.gang_networks import HERE, NetworkLink, cables, explain_missing_networks
from tests.support.gang_pool import GangPool, Host, gang_pool, list_leftovers
from tests.support.gang_referee import FINAL, judge
from tests.support.help import HelpFormatter
from tests.support.host_environment import HostEnvironment, Run, Server, wait_for
from tests.support.postgres import Postgres, explain_missing_postgres, postgres
from tests.support.production import migrate, read_settings
from tests.support.ray_cluster import RAY_ENV, RayCluster

#: Time limit per run, in seconds. A flow process needs about 3 s of a CPU core.
_SECONDS_A_RUN = 15.0
#: Seconds that are added once to the sum of the time limits of the runs. All runs must end within
#: this total.
_ONE_MORE_S = 120.0
#: Time limit in seconds. After all runs have ended, their processes and files must be gone within
#: this time.
_LEFT_WITHIN_S = 30.0
#: Time within which Ray must place an admitted run. Ray notices freed GPUs in less than a second.
_RAY_ROOM_WITHIN_S = 3.0
_KILLS = 3
_RESTARTS = 2
#: Final states of a run that was cancelled before its flow started.
_CANCELLED = frozenset({"CANCELLED"})
#: Allowed final states of a run that is cancelled after its flow has started. The flow may complete
#: just before the cancellation.
_IF_IN_TIME = frozenset({"CANCELLED", "COMPLETED"})
#: Program of a Ray job that reserves GPUs on the cluster for a while. The program records the nodes
#: of these GPUs, and the time that Ray needed for the reservation.
_RAY_PART = """
import json, os, sys, time
began = time.time()
file, lasts_s, nodes, gpus = sys.argv[1:]

def note(what, at, **fields):
    line = {"run": os.environ["MUSTER_RUN_ID"], "attempt": int(os.environ["MUSTER_ATTEMPT"]),
            "pid": os.getpid(), "what": what, "at": at, **fields}
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, (json.dumps(line) + chr(10)).encode())
    os.close(descriptor)

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
ray.init(log_to_driver=False)
requested_at = time.time()
group = placement_group([{"GPU": int(gpus)}] * int(nodes), strategy="STRICT_SPREAD")
ray.get(group.ready())
note("start", time.time())
node_ids = placement_group_table(group)["bundles_to_node_id"].values()
node_names = ",".join(f"127.0.0.1/{node[:8]}:{gpus}" for node in node_ids)
note("placed", time.time(), nodes=node_names, waited_s=time.time() - requested_at)
time.sleep(float(lasts_s))
note("end", time.time())
remove_placement_group(group)
"""


#: Mapping from host name to number of GPUs.
_NODES = {"host-a": 8, "host-b": 8, "host-c": 8}


@dataclass(kw_only=True)
class StormVariant:
    """One running variant of the test; the module's docstring lists the variants."""

    #: Work pool with its Prefect server.
    pool: GangPool
    #: Simulated hosts with their workers. Empty if the runs use a Ray cluster.
    hosts: Sequence[WorkingHost] = ()
    #: Random generator for all random decisions of the test.
    random: Random
    #: Number of runs that the test submits.
    runs: int
    #: Mapping from the flow run id of a cancelled run to its allowed final states. All other runs
    #: must complete.
    may_end: dict[str, frozenset[str]] = field(default_factory=dict)
    #: Number of seconds that a run may start later than a run behind it in the queue. The number is
    #: large because, on a busy machine, a run may start long after its GPUs were granted.
    late_s: float = 20.0
    #: Descriptions of the injected faults.
    done: list[str] = field(default_factory=list)

    def specs(self, *, failing_share: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yield random run specs.

        Args:
            failing_share: Share of the runs whose first attempts fail for lack of GPUs, from 0 to
                1.
        """
        for number in range(self.runs):
            # `hosts` is empty if the runs use Ray. Only Ray can place one run on several nodes.
            nodes = 1 if self.hosts else self.random.choice((1, 1, 2))
            gpus = self.random.randint(1, 8)
            lasts_s = self.random.uniform(0.3, 2.5)
            is_failing = self.random.random() < failing_share
            fails = self.random.choice((1, 1, 2)) if is_failing else 0
            spec = self.pool.spec(nodes=nodes, gpus=gpus, lasts_s=lasts_s, fails=fails)
            yield {**spec, "name": f"g{number:03}"}

    @contextlib.contextmanager
    def submitting(self, specs: Iterator[dict[str, Any]]) -> Iterator[None]:
        """Submit half of the runs now, and the other half one by one while the context is open."""
        for _ in range(self.runs // 2):
            self.pool.submit(next(specs))
        is_over = threading.Event()

        def submit() -> None:
            for spec in specs:
                is_over.wait(self.random.uniform(0, 3.0))
                while not is_over.is_set():
                    # Try until the run is submitted. The server may be down, because this test
                    # restarts it.
                    with contextlib.suppress(httpx.HTTPError):
                        self.pool.submit(spec, key=spec["name"])
                        break
                    time.sleep(0.5)

        thread = threading.Thread(target=submit, name="submit")
        thread.start()
        try:
            yield
            thread.join()
        finally:
            is_over.set()
            thread.join()

    def ended(self) -> int:
        """Return the number of runs in a final state."""
        return sum(run["state_type"] in FINAL for run in self.pool.flow_runs().values())

    def until_ended(self, share: float) -> None:
        """Wait until the given share of all runs, from 0 to 1, has ended."""
        required = int(share * self.runs)
        wait_for(
            lambda: self.ended() >= required,
            f"{required} have ended",
            self.runs * _SECONDS_A_RUN,
        )

    def first_in(self, type: str) -> list[dict[str, Any]]:
        """Return the three oldest flow runs in a state of this type."""
        states = {"state": {"type": {"any_": [type]}}}
        flow_runs = self.pool.host_env.post(
            "/flow_runs/filter", flow_runs=states, sort="EXPECTED_START_TIME_ASC", limit=3
        )
        return list(flow_runs)


def nothing(storm: StormVariant) -> None:
    """Inject no fault."""


def kill_worker(storm: StormVariant) -> None:
    """Three times, kill a random worker and start it again."""
    # A run whose GPUs were granted on a host without a worker waits until the host has a worker
    # again. Meanwhile, runs behind this run in the queue may start on other hosts. `late_s` is
    # the longest delay of the waiting run that the check of the start order accepts.
    storm.late_s = 60.0
    moments = [_granted, _pending, None]
    for number in range(_KILLS):
        storm.until_ended((number + 1) / (_KILLS + 2))
        host = storm.random.choice(storm.hosts)
        kill_at(storm, host, moments[number % len(moments)])
        host.start_worker()


def kill_at(
    storm: StormVariant, host: WorkingHost, moment: Callable[[StormVariant], str] | None
) -> None:
    """Kill the worker of a host, either at a chosen moment or at a random time.

    Args:
        storm: The running test.
        host: Host whose worker is killed.
        moment: Function that is called again and again until the chosen moment. It returns an empty
            string before the moment, and then a description of the moment. None to kill the worker
            at a random time within 2 s.
    """
    description = "any moment"
    if moment is None:
        time.sleep(storm.random.uniform(0, 2))
    else:
        # Wait for the chosen moment, but at most 30 s.
        with contextlib.suppress(AssertionError):
            deadline = time.monotonic() + 30
            while not (description := moment(storm)):
                assert time.monotonic() < deadline
    host.kill_worker()
    storm.done.append(f"the worker of {host.name} killed: {description or 'not met'}")


def _granted(storm: StormVariant) -> str:
    """Return the name of a run whose GPUs are granted and that is not PENDING yet.

    Return an empty string if there is no such run.
    """
    runs = [run for run in storm.first_in("SCHEDULED") if run["labels"].get("muster.gang.grant")]
    return f"{runs[0]['name']} granted" if runs else ""


def _pending(storm: StormVariant) -> str:
    """Return the name of a run that is PENDING and has no process yet.

    Return an empty string if there is no such run.
    """
    runs = [run for run in storm.first_in("PENDING") if not run["infrastructure_pid"]]
    return f"{runs[0]['name']} pending" if runs else ""


def two_workers(storm: StormVariant) -> None:
    """Start a second worker on each host."""
    for host in storm.hosts:
        host.start_worker("second")


def restart_server(storm: StormVariant) -> None:
    """Twice, kill the Prefect server and start it again after up to 5 s."""
    for number in range(_RESTARTS):
        storm.until_ended((number + 1) / (_RESTARTS + 1))
        away_s = storm.random.uniform(0, 5)
        storm.pool.server.kill()
        time.sleep(away_s)
        storm.pool.server.start()
        storm.done.append(f"server killed for {away_s:.1f} s and its start")


def cancel_some(storm: StormVariant) -> None:
    """Cancel up to a quarter of the runs, in different states."""
    cancel_count = storm.runs // 4
    kinds = ("SCHEDULED", "PENDING", "RUNNING")
    while len(storm.may_end) < cancel_count and storm.ended() < storm.runs * 0.9:
        time.sleep(storm.random.uniform(0, storm.runs * 0.02))
        kind = kinds[len(storm.may_end) % len(kinds)]
        with contextlib.suppress(AssertionError):
            runs = wait_for(partial(storm.first_in, kind), kind, 10.0)
            cancel(storm, storm.random.choice(runs), kind)


def cancel(storm: StormVariant, run: dict[str, Any], kind: str) -> None:
    """Cancel a run that was not cancelled before, and store the run's allowed final states.

    Args:
        storm: The running test.
        run: Flow run, as the Prefect server describes it.
        kind: State type of the run, for the description of the cancellation in `storm.done`.
    """
    if run["id"] in storm.may_end:
        return
    new_state = storm.pool.cancel(Run(host_env=storm.pool.host_env, flow_run_id=run["id"]))
    storm.may_end[run["id"]] = _CANCELLED if new_state == "CANCELLED" else _IF_IN_TIME
    storm.done.append(f"{run['name']} cancelled while {kind}")


@dataclass(kw_only=True)
class WorkingHost:
    """Simulated host of a pool, with its own host name, process namespace and worker."""

    #: Work pool of the worker.
    pool: GangPool
    #: Namespaces that simulate the host.
    host: OtherHost
    #: MUSTER_HOME, Prefect API and environment variables of the host.
    host_env: HostEnvironment
    #: Process id of the worker as seen from outside the host's process namespace. 0 before the
    #: worker starts.
    pid: int = 0

    @property
    def name(self) -> str:
        """Host name."""
        return self.host.name

    def start_worker(self, further: str = "") -> None:
        """Start a worker on the host, and wait until the worker accepts runs.

        Args:
            further: Name of an additional worker. An empty string starts the host's main worker.
        """
        name = f"worker-{further or self.name}"
        start_count = self.host_env.log(name).count("started!")
        pid = self.host.start(
            *self.pool.worker_arguments(f"{further}@{self.name}" if further else self.name),
            env=self.host_env.env,
            log=self.host_env.home / f"{name}.log",
        )
        if not further:
            self.pid = pid
        wait_for(
            lambda: self.host_env.log(name).count("started!") > start_count,
            f"a worker on {self.name}",
        )

    def kill_worker(self) -> None:
        """Kill the host's main worker with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def _hosts(
    pool: GangPool,
    network_cables: Sequence[NetworkLink | None] = (),
    settings: Mapping[str, str] | None = None,
    *,
    is_shared: bool = False,
) -> Iterator[list[WorkingHost]]:
    """Simulate one host per node of the pool, and start a worker on each.

    Args:
        pool: Work pool with the nodes.
        network_cables: Pair of virtual network devices of each host, in the order of the nodes. A
            host with None, or without an entry, uses this machine's network.
        settings: Environment variables with Prefect settings for all processes of the hosts.
        is_shared: True if all hosts share one MUSTER_HOME, so that a run can be retried on another
            host. False if each host has its own MUSTER_HOME.
    """
    with contextlib.ExitStack() as stack:
        hosts = []
        for name, cable in zip_longest(pool.nodes, network_cables):
            home = pool.host_env.home.parent / ("shared" if is_shared else name)
            home.mkdir(exist_ok=True)
            host = stack.enter_context(other_host(name, pool.host_env.home.parent / name, cable))
            without_proxy = {"NO_PROXY": HERE, "no_proxy": HERE} if cable is not None else {}
            prefect_home = {"PREFECT_HOME": str(home / f"prefect-{name}")}
            variables = {**(settings or {}), **without_proxy, **prefect_home}
            host_env = Host(home=home, api=pool.host_env.api, variables=variables)
            hosts.append(WorkingHost(pool=pool, host=host, host_env=host_env))
            hosts[-1].start_worker()
        yield hosts


def lose_host(storm: StormVariant) -> None:
    """Kill a worker that has just received a run, and do not start it again."""
    # The run of the killed worker returns to the queue only after the worker has sent no heartbeats
    # for a while. Meanwhile, later runs may start. So the check of the start order must allow a
    # long delay.
    storm.late_s = 150.0
    storm.until_ended(1 / 3)
    name = wait_for(lambda: _starting_host(storm), "one is pending")
    next(host for host in storm.hosts if host.name == name).kill_worker()
    storm.done.append(f"the worker of {name} killed")


def _counts_by_host(storm: StormVariant) -> list[str]:
    """Return the number of runs of each host as text."""
    counts = Counter(_host_of(run) for run in storm.pool.flow_runs().values())
    return [f"{count} runs on {name or 'no host'}" for name, count in sorted(counts.items())]


def _starting_host(storm: StormVariant) -> str:
    """Return the host of a run that is PENDING and has no process yet.

    Return an empty string if there is no such run.
    """
    runs = [run for run in storm.first_in("PENDING") if not run["infrastructure_pid"]]
    return _host_of(runs[0]) if runs else ""


def _host_of(run: Mapping[str, Any]) -> str:
    """Return the host whose GPUs were granted to a flow run, or an empty string without a grant."""
    grant = json.loads(run["labels"].get("muster.gang.grant") or "{}")
    return str((grant.get("by") or {}).get("host", ""))


#: Mapping from the name of a test variant to the function that injects its faults.
_VARIANTS: dict[str, Callable[[StormVariant], None]] = {
    "plain": nothing,
    "worker-killed": kill_worker,
    "two-workers": two_workers,
    "server-restarted": restart_server,
    "cancels": cancel_some,
    "requeues": nothing,
    "host-lost": lose_host,
}
_POSTGRES, _RAY = "postgresql", "ray"


def run_variant(name: str, runs: int, seed: int, directory: Path) -> list[str]:
    """Run one variant, print its result, and return a message for each violated requirement."""
    began = time.monotonic()
    with gang_pool(directory, nodes=_NODES) as pool, _hosts(pool) as hosts:
        storm = StormVariant(pool=pool, hosts=hosts, random=Random(f"{seed} {name}"), runs=runs)
        # Draw all specs before the faults begin. The faults use the same random generator, at times
        # that depend on the speed of the machine. So specs that are drawn later would not depend
        # only on the seed.
        specs = list(storm.specs(failing_share=0.3 if name == "requeues" else 0.0))
        with storm.submitting(iter(specs)):
            _VARIANTS[name](storm)
        faults = verdict_of(storm, storm.pool.nodes)
        storm.done += _counts_by_host(storm)
    print(f"{name}: {time.monotonic() - began:.0f} s; {', '.join(storm.done) or 'undisturbed'}")
    return faults


def verdict_of(
    storm: StormVariant, nodes: Mapping[str, int], *, by_states: bool = True
) -> list[str]:
    """Wait until all runs have ended, and check their histories.

    Args:
        storm: The running test.
        nodes: Mapping from node name to number of GPUs.
        by_states: True if the states of a run on the Prefect server show when the run held GPUs.
            False to use only the lines that the run's components have written.

    Returns:
        A message for each violated requirement.
    """
    faults = []
    try:
        storm.pool.wait_until_all_end(storm.runs * _SECONDS_A_RUN + _ONE_MORE_S)
    except AssertionError as error:
        faults.append(str(error))
    histories = storm.pool.histories(storm.may_end)
    judgement = judge(histories, nodes, late_s=storm.late_s, by_states=by_states)
    print(f"  {judgement}", flush=True)
    faults += judgement.faults
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not list_leftovers(storm.pool), "nothing is left", _LEFT_WITHIN_S)
    leftover_entries = [
        f"left on {host.name}: {name}" for host in storm.hosts for name in _registered(host)
    ]
    return faults + list_leftovers(storm.pool) + leftover_entries


def run_on_postgres(runs: int, seed: int, directory: Path) -> list[str]:
    """Run the test on PostgreSQL, print its result, and return the violated requirements.

    The hosts reach the Prefect server through separate networks. The server, the database and the
    workers are killed and started again.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgres())
        network_cables = stack.enter_context(cables(len(_NODES)))
        # Use the settings that the project ships for operators.
        settings = read_settings("server.env")
        settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database.url
        migrate(settings, directory / "server")
        server = Server(directory / "server", address=HERE, settings=settings)
        pool = stack.enter_context(gang_pool(directory, nodes=_NODES, server=server))
        print(f"  {database.query('show server_version')}", flush=True)
        hosts = stack.enter_context(
            _hosts(pool, network_cables, read_settings("muster.env"), is_shared=True)
        )
        storm = StormVariant(
            pool=pool, hosts=hosts, random=Random(f"{seed} {_POSTGRES}"), runs=runs
        )
        # Runs of a killed worker return to the queue only after the worker has sent no heartbeats
        # for a while. Meanwhile, later runs may start. So the check of the start order must allow a
        # long delay.
        storm.late_s = 60.0
        specs = list(storm.specs(failing_share=0.1))
        with storm.submitting(iter(specs)):
            _restart_each_part(storm, hosts, database)
        faults = verdict_of(storm, pool.nodes)
        faults += _lost_rows(database, runs)
        storm.done += _counts_by_host(storm)
    print(f"{_POSTGRES}: {time.monotonic() - began:.0f} s; {', '.join(storm.done)}")
    return faults


def _restart_each_part(
    storm: StormVariant, hosts: Sequence[WorkingHost], database: Postgres
) -> None:
    """Kill and restart each worker, the server and the database, one after the other."""

    def restart_worker(host: WorkingHost, away_s: float) -> str:
        host.kill_worker()
        time.sleep(away_s)
        host.start_worker()
        return f"the worker of {host.name}"

    def restart_prefect_server(away_s: float) -> str:
        storm.pool.server.kill()
        time.sleep(away_s)
        storm.pool.server.start()
        return "the server"

    def restart_database(away_s: float) -> str:
        database.stop(at_once=True)
        time.sleep(away_s)
        database.start()
        return "PostgreSQL"

    restarts: list[Callable[[float], str]] = [
        *(partial(restart_worker, host) for host in hosts),
        restart_prefect_server,
        restart_database,
    ]
    for number, restart in enumerate(restarts):
        storm.until_ended((number + 1) / (len(restarts) + 1))
        away_s = storm.random.uniform(0, 5)
        name = restart(away_s)
        storm.done.append(f"{name} killed for {away_s:.1f} s and its start")


def _registered(host: WorkingHost) -> list[str]:
    """Return the names of the live runs in the host's registry."""
    live = host.host_env.home / "live"
    return sorted(entry.name for entry in live.iterdir()) if live.exists() else []


def _lost_rows(database: Postgres, runs: int) -> list[str]:
    """Count the flow runs in the tables of the database.

    Return a message if flow runs are missing, and otherwise an empty list.
    """
    of_train = "from flow_run join flow on flow.id = flow_run.flow_id where flow.name = 'train'"
    states = database.query(f"select state_type, count(*) {of_train} group by 1 order by 1")
    print(f"  in PostgreSQL: {', '.join(states.splitlines())}", flush=True)
    count = int(database.query(f"select count(*) {of_train}"))
    return [] if count == runs else [f"{count} of {runs} flow runs are in the database"]


def run_on_ray(runs: int, seed: int, directory: Path) -> list[str]:
    """Run the test on a real Ray cluster, print its result, and return violated requirements.

    Each run is a Ray job that reserves its GPUs on the cluster.
    """
    began = time.monotonic()
    os.environ.update(RAY_ENV)
    with RayCluster.run() as cluster, gang_pool(directory, nodes={}) as pool:
        storm = StormVariant(pool=pool, random=Random(f"{seed} {_RAY}"), runs=runs)
        pool.start_worker()
        with storm.submitting(_ray_specs(storm, cluster, directory)):
            nothing(storm)
        # All nodes of this cluster share an address, so the queue appends the node id to the name
        # of each node.
        nodes = {f"127.0.0.1/{node.node_id[:8]}": node.gpus for node in cluster.nodes}
        faults = verdict_of(storm, nodes, by_states=False)
        waits = [line["waited_s"] for line in pool.read_lines() if "waited_s" in line]
        faults += [f"Ray had no room for {s:.1f} s" for s in waits if s > _RAY_ROOM_WITHIN_S]
    print(f"{_RAY}: {time.monotonic() - began:.0f} s")
    return faults


def _ray_specs(
    storm: StormVariant, cluster: RayCluster, directory: Path
) -> Iterator[dict[str, Any]]:
    """Yield random run specs for the test on Ray, and write the program of their Ray jobs."""
    code = directory / "code"
    code.mkdir()
    (code / "part.py").write_text(_RAY_PART)
    for spec in storm.specs():
        nodes, gpus = (str(spec["gang"][key]) for key in ("nodes", "gpus_per_node"))
        lasts_s = f"{storm.random.uniform(0.5, 4):.2f}"
        command = ["python", "part.py", str(storm.pool.lines), lasts_s, nodes, gpus]
        trainer = {"launcher": "ray_job", "command": command, "stop": {"grace_s": 2}}
        yield {
            **spec,
            "cwd": str(code),
            "ray": {"address": cluster.address, "entrypoint_resources": {"worker_node": 1}},
            "components": {"trainer": trainer},
        }


_NAMES = [*_VARIANTS, _POSTGRES, _RAY]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.gang_storm",
        description=__doc__,
        epilog=f"Variants: {', '.join(_NAMES)}. Exit: 0 no promise was broken; 1 one was; 2 the "
        "arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=100, help="a variant; on Ray, a tenth of them")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else a new one")
    parser.add_argument("--only", choices=_NAMES, metavar="VARIANT", default=None, help="else all")
    parser.add_argument("--keep", action="store_true", help="keep all files, even if all is well")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else SystemRandom().randrange(1 << 32)
    for foreign in ("PREFECT_API_URL", "RAY_ADDRESS"):
        os.environ.pop(foreign, None)
    names = [options.only] if options.only else _NAMES
    print(f"seed {seed}, {options.runs} runs each of {', '.join(names)}", flush=True)
    # With this handler, SIGTERM raises KeyboardInterrupt. The context managers then exit, and end
    # all processes of the test.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="muster-storm-"))
    is_faulty = False
    for name in names:
        variant_directory = directory / name
        variant_directory.mkdir()
        if name == _POSTGRES:
            if skip_reason := explain_missing_postgres() or explain_missing_networks():
                print(f"{name}: skipped: {skip_reason}", flush=True)
                continue
            faults = run_on_postgres(options.runs, seed, variant_directory)
        elif name == _RAY:
            faults = run_on_ray(max(4, options.runs // 10), seed, variant_directory)
        else:
            faults = run_variant(name, options.runs, seed, variant_directory)
        for fault in faults:
            print(f"  fault: {fault}")
        print(f"  {name}: {f'{len(faults)} FAULTS' if faults else 'all is well'}", flush=True)
        is_faulty = is_faulty or bool(faults)
    if is_faulty or options.keep:
        print(f"all of it is kept in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return int(is_faulty)


if __name__ == "__main__":
    sys.exit(main())
