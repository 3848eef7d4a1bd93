"""Collect the evidence with which `gang_referee` judges the runs of a gang queue.

The evidence has two sources. The Prefect server has the history of states of each flow run. The
components of the runs write lines to a file: when they started and ended, and the nodes of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.support.gang_referee import ComponentProcess, History, State

#: Code of a component that holds the GPUs of its run for SECONDS seconds. Its arguments are `FILE
#: SECONDS RUN-DIRECTORY API FAILS`. The first FAILS attempts of the run fail with an error message
#: about missing GPUs. The component writes a line to FILE when it starts, and another line when it
#: ends. Each line is written with one call of write(2), so that the lines of several processes
#: never mix.
COMPONENT_PROGRAM = """
import json, os, signal, socket, sys, time
began = time.time()
file, lasts_s, directory, api, fails = sys.argv[1:]
attempt = int(os.environ["MUSTER_ATTEMPT"])

def note(what, at, **fields):
    line = {"run": os.environ["MUSTER_RUN_ID"], "attempt": attempt, "pid": os.getpid(),
            "what": what, "at": at, **fields}
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, (json.dumps(line) + chr(10)).encode())
    os.close(descriptor)

def leave(code):
    note("end", time.time())
    os._exit(code)

def read_grant():
    with open(os.path.join(directory, "run.json")) as record:
        flow_run = json.load(record)["flow_run_id"]
    host, _, port = api.removeprefix("http://").removesuffix("/api").partition(":")
    with socket.create_connection((host, int(port)), 5) as server:
        server.settimeout(5)
        server.sendall(f"GET /api/flow_runs/{flow_run} HTTP/1.0\\r\\n\\r\\n".encode())
        answer = b"".join(iter(lambda: server.recv(65536), b""))
    return json.loads(answer.partition(b"\\r\\n\\r\\n")[2])["labels"].get("muster.gang.grant", "")

signal.signal(signal.SIGTERM, lambda *_: leave(0))
note("start", began, host=os.environ.get("MUSTER_HOST") or socket.gethostname(),
     devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
print("up", flush=True)
has_grant = False
while True:
    if not has_grant:
        try:
            note("placed", time.time(), nodes=read_grant())
            has_grant = True
        except (OSError, ValueError, KeyError):
            pass
    if time.time() - began >= float(lasts_s):
        break
    time.sleep(0.05 if has_grant else 0.2)
if attempt <= int(fails):
    print("Total available GPUs 0 is less than total desired GPUs 16", flush=True)
    leave(1)
leave(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedDemand:
    """The GPUs that a run requests, and the place of the run in the order of submission."""

    name: str
    #: Number of nodes that the run requests.
    nodes: int
    #: Number of GPUs that the run requests on each node.
    gpus: int
    #: Priority of the run's work queue. Queues with a lower number are served first.
    rank: int
    #: Number of runs that were submitted before this run.
    number: int


def make_history(
    run: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    asked: SubmittedDemand,
) -> History:
    """Return the history of a run, in the form that the module `gang_referee` checks.

    Args:
        run: The flow run, as the Prefect server returns it.
        states: All states of the flow run, as the Prefect server returns them.
        lines: Lines that the components of all runs have written.
        asked: The GPUs that the run requests.
    """
    return History(
        name=f"{asked.name} ({run['id'][:8]})",
        nodes=asked.nodes,
        gpus=asked.gpus,
        place=(asked.rank, asked.number),
        states=sorted(map(_state, states), key=lambda state: state.at),
        parts=_parts([line for line in lines if line["run"] == run["name"]]),
        placed=parse_granted_nodes(str(run["labels"].get("muster.gang.grant") or "")),
    )


def _state(state: Mapping[str, Any]) -> State:
    due = (state.get("state_details") or {}).get("scheduled_time")
    return State(
        at=_seconds(state["timestamp"]),
        type=state["type"],
        name=state["name"] or "",
        due=_seconds(due) if due else 0.0,
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def parse_granted_nodes(label: str) -> dict[str, int] | None:
    """Parse the label of a grant, and return a mapping from node to number of GPUs.

    Return None if the label names no nodes.
    """
    return json.loads(label or "{}").get("nodes") or None


def _parts(lines: Sequence[Mapping[str, Any]]) -> list[ComponentProcess]:
    """Return the component processes of a run.

    Args:
        lines: Lines that the component processes of the run have written to a common file.
    """
    lines_of_process: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        lines_of_process.setdefault((line["attempt"], line["pid"]), {})[line["what"]] = line
    return [
        ComponentProcess(
            attempt=attempt,
            pid=pid,
            began=written["start"]["at"],
            ended=written["end"]["at"] if "end" in written else None,
            nodes=parse_granted_nodes(written["placed"]["nodes"]) if "placed" in written else None,
            host=written["start"].get("host", ""),
            devices=_devices(written["start"].get("devices")),
        )
        for (attempt, pid), written in lines_of_process.items()
    ]


def _devices(visible_devices: str | None) -> tuple[str, ...] | None:
    """Return the devices in a value of CUDA_VISIBLE_DEVICES, or None if the variable is not set."""
    if visible_devices is None:
        return None
    return tuple(filter(None, visible_devices.split(",")))
