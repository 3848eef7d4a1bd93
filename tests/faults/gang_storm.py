"""A line of random gangs under everything that may go wrong: `python -m tests.faults.gang_storm`.

A hundred real runs a variant, on three hosts of 8 GPUs, each with a name and processes of its own
and a real worker, on a real Prefect server: undisturbed; with workers killed; with two workers a
host; with the server killed and started again; with random cancels; with runs that are sent back;
with a host that is lost; on PostgreSQL with hosts on networks of their own, every part of which is
killed and started again; and, fewer, on a real Ray cluster. The referee has the server's history
and the components' own word: where they ran, and which devices they saw.

The seed is printed, and repeats the draw; the machine's timing can't be repeated.
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
from tests.support.gang_networks import HERE, Cable, cables, why_no_networks
from tests.support.gang_pool import GangPool, Host, gang_pool, left_of
from tests.support.gang_referee import FINAL, judge
from tests.support.ground import Ground, Run, Server, until
from tests.support.help import HelpFormatter
from tests.support.postgres import Postgres, postgres, why_no_postgres
from tests.support.production import migrate, settings_of
from tests.support.ray_cluster import RAY_ENV, RayCluster

#: A flow process takes some 3 s of a core.
_SECONDS_A_RUN = 15.0
_ONE_MORE_S = 120.0
_LEFT_WITHIN_S = 30.0
#: A run that was admitted finds its GPUs free: Ray sees a release within a fraction of a second.
_RAY_ROOM_WITHIN_S = 3.0
_KILLS = 3
_RESTARTS = 2
_CANCELLED = frozenset({"CANCELLED"})
_IF_IN_TIME = frozenset({"CANCELLED", "COMPLETED"})
#: Holds its gang on a Ray cluster; says on which nodes Ray has placed it, and how long that took.
_RAY_PART = """
import json, os, sys, time
began = time.time()
file, lasts_s, nodes, gpus = sys.argv[1:]

def note(what, at, **more):
    line = {"run": os.environ["MUSTER_RUN_ID"], "attempt": int(os.environ["MUSTER_ATTEMPT"]),
            "pid": os.getpid(), "what": what, "at": at, **more}
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, (json.dumps(line) + chr(10)).encode())
    os.close(out)

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
ray.init(log_to_driver=False)
asked = time.time()
group = placement_group([{"GPU": int(gpus)}] * int(nodes), strategy="STRICT_SPREAD")
ray.get(group.ready())
note("start", time.time())
placed = placement_group_table(group)["bundles_to_node_id"].values()
shown = ",".join(f"127.0.0.1/{node[:8]}:{gpus}" for node in placed)
note("placed", time.time(), nodes=shown, waited_s=time.time() - asked)
time.sleep(float(lasts_s))
note("end", time.time())
remove_placement_group(group)
"""


#: `gpus[host]`.
_NODES = {"host-a": 8, "host-b": 8, "host-c": 8}


@dataclass(kw_only=True)
class Storm:
    """One variant under way."""

    pool: GangPool
    hosts: Sequence[WorkingHost] = ()
    random: Random
    runs: int
    #: How a run may end, by flow run id, where not as completed.
    may_end: dict[str, frozenset[str]] = field(default_factory=dict)
    #: How long a run may come after a younger one beside which it fits: the time from its grant to
    #: PENDING, on a machine whose every core is taken by the flow processes of the storm.
    late_s: float = 20.0
    #: What was done to it.
    done: list[str] = field(default_factory=list)

    def specs(self, *, failing_share: float = 0.0) -> Iterator[dict[str, Any]]:
        """
        Args:
            failing_share: of the runs whose first attempts find that their GPUs are not there.
        """
        for number in range(self.runs):
            # More than one node is Ray's business.
            nodes = 1 if self.hosts else self.random.choice((1, 1, 2))
            gpus = self.random.randint(1, 8)
            lasts_s = self.random.uniform(0.3, 2.5)
            is_failing = self.random.random() < failing_share
            fails = self.random.choice((1, 1, 2)) if is_failing else 0
            spec = self.pool.spec(nodes=nodes, gpus=gpus, lasts_s=lasts_s, fails=fails)
            yield {**spec, "name": f"g{number:03}"}

    @contextlib.contextmanager
    def submitting(self, specs: Iterator[dict[str, Any]]) -> Iterator[None]:
        """Half of the runs now, the others one by one."""
        for _ in range(self.runs // 2):
            self.pool.submit(next(specs))
        over = threading.Event()

        def submit() -> None:
            for spec in specs:
                over.wait(self.random.uniform(0, 3.0))
                while not over.is_set():
                    # A server that is just away is asked again.
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
            over.set()
            thread.join()

    def ended(self) -> int:
        """How many have."""
        return sum(run["state_type"] in FINAL for run in self.pool.flow_runs().values())

    def until_ended(self, share: float) -> None:
        """Waits until that share of all runs has ended."""
        wanted = int(share * self.runs)
        until(lambda: self.ended() >= wanted, f"{wanted} have ended", self.runs * _SECONDS_A_RUN)

    def first_in(self, type: str) -> list[dict[str, Any]]:
        """The oldest flow runs of a state."""
        states = {"state": {"type": {"any_": [type]}}}
        found = self.pool.ground.post(
            "/flow_runs/filter", flow_runs=states, sort="EXPECTED_START_TIME_ASC", limit=3
        )
        return list(found)


def nothing(storm: Storm) -> None:
    """Undisturbed."""


def kill_worker(storm: Storm) -> None:
    # What it had been given waits until its host has a worker again.
    storm.late_s = 60.0
    moments = [_granted, _pending, None]
    for number in range(_KILLS):
        storm.until_ended((number + 1) / (_KILLS + 2))
        host = storm.random.choice(storm.hosts)
        kill_at(storm, host, moments[number % len(moments)])
        host.start_worker()


def kill_at(storm: Storm, host: WorkingHost, moment: Callable[[Storm], str] | None) -> None:
    """SIGKILL in a tender moment, or in any."""
    met = "any moment"
    if moment is None:
        time.sleep(storm.random.uniform(0, 2))
    else:
        with contextlib.suppress(AssertionError):
            deadline = time.monotonic() + 30
            while not (met := moment(storm)):
                assert time.monotonic() < deadline
    host.kill_worker()
    storm.done.append(f"the worker of {host.name} killed: {met or 'not met'}")


def _granted(storm: Storm) -> str:
    """Between its grant and PENDING."""
    runs = [run for run in storm.first_in("SCHEDULED") if run["labels"].get("muster.gang.grant")]
    return f"{runs[0]['name']} granted" if runs else ""


def _pending(storm: Storm) -> str:
    """Between PENDING and its process."""
    runs = [run for run in storm.first_in("PENDING") if not run["infrastructure_pid"]]
    return f"{runs[0]['name']} pending" if runs else ""


def two_workers(storm: Storm) -> None:
    for host in storm.hosts:
        host.start_worker("second")


def restart_server(storm: Storm) -> None:
    for number in range(_RESTARTS):
        storm.until_ended((number + 1) / (_RESTARTS + 1))
        away_s = storm.random.uniform(0, 5)
        storm.pool.server.kill()
        time.sleep(away_s)
        storm.pool.server.start()
        storm.done.append(f"server killed for {away_s:.1f} s and its start")


def cancel_some(storm: Storm) -> None:
    wanted = storm.runs // 4
    kinds = ("SCHEDULED", "PENDING", "RUNNING")
    while len(storm.may_end) < wanted and storm.ended() < storm.runs * 0.9:
        time.sleep(storm.random.uniform(0, storm.runs * 0.02))
        kind = kinds[len(storm.may_end) % len(kinds)]
        with contextlib.suppress(AssertionError):
            runs = until(partial(storm.first_in, kind), kind, 10.0)
            cancel(storm, storm.random.choice(runs), kind)


def cancel(storm: Storm, run: dict[str, Any], kind: str) -> None:
    if run["id"] in storm.may_end:
        return
    after = storm.pool.cancel(Run(ground=storm.pool.ground, flow_run_id=run["id"]))
    storm.may_end[run["id"]] = _CANCELLED if after == "CANCELLED" else _IF_IN_TIME
    storm.done.append(f"{run['name']} cancelled while {kind}")


@dataclass(kw_only=True)
class WorkingHost:
    """One of several hosts of a pool, with a name and processes of its own."""

    pool: GangPool
    host: OtherHost
    ground: Ground
    #: Of its worker, as this machine counts.
    pid: int = 0

    @property
    def name(self) -> str:
        return self.host.name

    def start_worker(self, further: str = "") -> None:
        """Returns: once it takes runs.

        Args:
            further: the name of one beside the host's own.
        """
        name = f"worker-{further or self.name}"
        before = self.ground.log(name).count("started!")
        pid = self.host.start(
            *self.pool.worker_arguments(f"{further}@{self.name}" if further else self.name),
            env=self.ground.env,
            log=self.ground.home / f"{name}.log",
        )
        self.pid = self.pid if further else pid
        until(lambda: self.ground.log(name).count("started!") > before, f"a worker on {self.name}")

    def kill_worker(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def _hosts(
    pool: GangPool,
    laid: Sequence[Cable | None] = (),
    settings: Mapping[str, str] | None = None,
    *,
    is_shared: bool = False,
) -> Iterator[list[WorkingHost]]:
    """Hosts with a worker each.

    Args:
        laid: for each, the cable to the network of its own that it has; None: it has this
            machine's.
        settings: of all that talks to the server on them.
        is_shared: whether they see one MUSTER_HOME, so that a run may be tried again on the other;
            else each has its own.
    """
    with contextlib.ExitStack() as stack:
        hosts = []
        for name, cable in zip_longest(pool.nodes, laid):
            home = pool.ground.home.parent / ("shared" if is_shared else name)
            home.mkdir(exist_ok=True)
            host = stack.enter_context(other_host(name, pool.ground.home.parent / name, cable))
            direct = {"NO_PROXY": HERE, "no_proxy": HERE} if cable is not None else {}
            own = {"PREFECT_HOME": str(home / f"prefect-{name}")}
            variables = {**(settings or {}), **direct, **own}
            ground = Host(home=home, api=pool.ground.api, variables=variables)
            hosts.append(WorkingHost(pool=pool, host=host, ground=ground))
            hosts[-1].start_worker()
        yield hosts


def lose_host(storm: Storm) -> None:
    """The worker that has just been given a run is killed, and not started again."""
    # What it had begun is taken back only later, and its host counts until its silence is noticed.
    storm.late_s = 150.0
    storm.until_ended(1 / 3)
    name = until(lambda: _starting_host(storm), "one is pending")
    next(host for host in storm.hosts if host.name == name).kill_worker()
    storm.done.append(f"the worker of {name} killed")


def _counts_by_host(storm: Storm) -> list[str]:
    by = Counter(_host_of(run) for run in storm.pool.flow_runs().values())
    return [f"{count} runs on {name or 'no host'}" for name, count in sorted(by.items())]


def _starting_host(storm: Storm) -> str:
    """The host of a run that is pending, and has no process yet."""
    runs = [run for run in storm.first_in("PENDING") if not run["infrastructure_pid"]]
    return _host_of(runs[0]) if runs else ""


def _host_of(run: Mapping[str, Any]) -> str:
    grant = json.loads(run["labels"].get("muster.gang.grant") or "{}")
    return str((grant.get("by") or {}).get("host", ""))


#: What is done in each variant.
_VARIANTS: dict[str, Callable[[Storm], None]] = {
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
    """Runs one variant, and says what became of it; the faults."""
    began = time.monotonic()
    with gang_pool(directory, nodes=_NODES) as pool, _hosts(pool) as hosts:
        storm = Storm(pool=pool, hosts=hosts, random=Random(f"{seed} {name}"), runs=runs)
        # Drawn before anything is timed, so that the seed repeats it.
        specs = list(storm.specs(failing_share=0.3 if name == "requeues" else 0.0))
        with storm.submitting(iter(specs)):
            _VARIANTS[name](storm)
        faults = verdict_of(storm, storm.pool.nodes)
        storm.done += _counts_by_host(storm)
    print(f"{name}: {time.monotonic() - began:.0f} s; {', '.join(storm.done) or 'undisturbed'}")
    return faults


def verdict_of(storm: Storm, nodes: Mapping[str, int], *, by_states: bool = True) -> list[str]:
    """The faults, once all runs have ended."""
    faults = []
    try:
        storm.pool.until_all_end(storm.runs * _SECONDS_A_RUN + _ONE_MORE_S)
    except AssertionError as error:
        faults.append(str(error))
    histories = storm.pool.histories(storm.may_end)
    judgement = judge(histories, nodes, late_s=storm.late_s, by_states=by_states)
    print(f"  {judgement}", flush=True)
    faults += judgement.faults
    with contextlib.suppress(AssertionError):
        until(lambda: not left_of(storm.pool), "nothing is left", _LEFT_WITHIN_S)
    left = [f"left on {host.name}: {name}" for host in storm.hosts for name in _registered(host)]
    return faults + left_of(storm.pool) + left


def run_on_postgres(runs: int, seed: int, directory: Path) -> list[str]:
    """On PostgreSQL, with two hosts that reach the server through networks of their own, while
    each part is killed and started again."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgres())
        laid = stack.enter_context(cables(len(_NODES)))
        # As operators have them.
        settings = settings_of("server.env")
        settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database.url
        migrate(settings, directory / "server")
        server = Server(directory / "server", address=HERE, settings=settings)
        pool = stack.enter_context(gang_pool(directory, nodes=_NODES, server=server))
        print(f"  {database.query('show server_version')}", flush=True)
        hosts = stack.enter_context(_hosts(pool, laid, settings_of("muster.env"), is_shared=True))
        storm = Storm(pool=pool, hosts=hosts, random=Random(f"{seed} {_POSTGRES}"), runs=runs)
        # What a worker that was killed had begun is taken back only later.
        storm.late_s = 60.0
        specs = list(storm.specs(failing_share=0.1))
        with storm.submitting(iter(specs)):
            _restart_each_part(storm, hosts, database)
        faults = verdict_of(storm, pool.nodes)
        faults += _lost_rows(database, runs)
        storm.done += _counts_by_host(storm)
    print(f"{_POSTGRES}: {time.monotonic() - began:.0f} s; {', '.join(storm.done)}")
    return faults


def _restart_each_part(storm: Storm, hosts: Sequence[WorkingHost], database: Postgres) -> None:
    """Both workers, the server and the database, spread over the storm, while runs go on."""

    def worker(host: WorkingHost, away_s: float) -> str:
        host.kill_worker()
        time.sleep(away_s)
        host.start_worker()
        return f"the worker of {host.name}"

    def server(away_s: float) -> str:
        storm.pool.server.kill()
        time.sleep(away_s)
        storm.pool.server.start()
        return "the server"

    def crashed(away_s: float) -> str:
        database.stop(at_once=True)
        time.sleep(away_s)
        database.start()
        return "PostgreSQL"

    parts: list[Callable[[float], str]] = [
        *(partial(worker, host) for host in hosts),
        server,
        crashed,
    ]
    for number, part in enumerate(parts):
        storm.until_ended((number + 1) / (len(parts) + 1))
        away_s = storm.random.uniform(0, 5)
        name = part(away_s)
        storm.done.append(f"{name} killed for {away_s:.1f} s and its start")


def _registered(host: WorkingHost) -> list[str]:
    live = host.ground.home / "live"
    return sorted(entry.name for entry in live.iterdir()) if live.exists() else []


def _lost_rows(database: Postgres, runs: int) -> list[str]:
    """What the database itself says, past the server."""
    of_train = "from flow_run join flow on flow.id = flow_run.flow_id where flow.name = 'train'"
    states = database.query(f"select state_type, count(*) {of_train} group by 1 order by 1")
    print(f"  in PostgreSQL: {', '.join(states.splitlines())}", flush=True)
    count = int(database.query(f"select count(*) {of_train}"))
    return [] if count == runs else [f"{count} of {runs} flow runs are in the database"]


def run_on_ray(runs: int, seed: int, directory: Path) -> list[str]:
    """Fewer runs, each a Ray job that takes its GPUs of a real Ray cluster."""
    began = time.monotonic()
    os.environ.update(RAY_ENV)
    with RayCluster.started() as cluster, gang_pool(directory, nodes={}) as pool:
        storm = Storm(pool=pool, random=Random(f"{seed} {_RAY}"), runs=runs)
        pool.start_worker()
        with storm.submitting(_ray_specs(storm, cluster, directory)):
            nothing(storm)
        # As the queue calls two nodes of one address.
        nodes = {f"127.0.0.1/{node.node_id[:8]}": node.gpus for node in cluster.nodes}
        faults = verdict_of(storm, nodes, by_states=False)
        waits = [line["waited_s"] for line in pool.all_noted() if "waited_s" in line]
        faults += [f"Ray had no room for {s:.1f} s" for s in waits if s > _RAY_ROOM_WITHIN_S]
    print(f"{_RAY}: {time.monotonic() - began:.0f} s")
    return faults


def _ray_specs(storm: Storm, cluster: RayCluster, directory: Path) -> Iterator[dict[str, Any]]:
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
    # Whoever ends it from outside leaves nothing either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="muster-storm-"))
    is_faulty = False
    for name in names:
        here = directory / name
        here.mkdir()
        if name == _POSTGRES:
            if why := why_no_postgres() or why_no_networks():
                print(f"{name}: skipped: {why}", flush=True)
                continue
            faults = run_on_postgres(options.runs, seed, here)
        elif name == _RAY:
            faults = run_on_ray(max(4, options.runs // 10), seed, here)
        else:
            faults = run_variant(name, options.runs, seed, here)
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
