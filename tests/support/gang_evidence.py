"""The evidence for `gang_referee`: the server's history of a flow run, and what the components of
the run have written down themselves, of when they ran and on which nodes their run was by then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.support.gang_referee import History, Part, State

#: Holds its gang for some seconds: `FILE SECONDS RUN-DIRECTORY API FAILS`. The first so many
#: attempts find no GPUs. Everything is appended to FILE at once, so that no two lines mix.
PART = """
import json, os, signal, socket, sys, time
began = time.time()
file, lasts_s, directory, api, fails = sys.argv[1:]
attempt = int(os.environ["MUSTER_ATTEMPT"])

def note(what, at, **more):
    line = {"run": os.environ["MUSTER_RUN_ID"], "attempt": attempt, "pid": os.getpid(),
            "what": what, "at": at, **more}
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, (json.dumps(line) + chr(10)).encode())
    os.close(out)

def leave(code):
    note("end", time.time())
    os._exit(code)

def placed():
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
asked = False
while True:
    if not asked:
        try:
            note("placed", time.time(), nodes=placed())
            asked = True
        except (OSError, ValueError, KeyError):
            pass
    if time.time() - began >= float(lasts_s):
        break
    time.sleep(0.05 if asked else 0.2)
if attempt <= int(fails):
    print("Total available GPUs 0 is less than total desired GPUs 16", flush=True)
    leave(1)
leave(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run was submitted with."""

    name: str
    nodes: int
    gpus: int
    #: Of its queue: the lower comes first.
    rank: int
    number: int


def history_of(
    run: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    asked: Asked,
) -> History:
    """What became of a run.

    Args:
        run: the flow run, as its server has it.
        states: all of its states.
        lines: what the components of all runs have written.
    """
    return History(
        name=f"{asked.name} ({run['id'][:8]})",
        nodes=asked.nodes,
        gpus=asked.gpus,
        place=(asked.rank, asked.number),
        states=sorted(map(_state, states), key=lambda state: state.at),
        parts=_parts([line for line in lines if line["run"] == run["name"]]),
        placed=nodes_of(str(run["labels"].get("muster.gang.grant") or "")),
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


def nodes_of(label: str) -> dict[str, int] | None:
    """`gpus[node]` of a grant; None where it names none."""
    return json.loads(label or "{}").get("nodes") or None


def _parts(lines: Sequence[Mapping[str, Any]]) -> list[Part]:
    lives: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        lives.setdefault((line["attempt"], line["pid"]), {})[line["what"]] = line
    return [
        Part(
            attempt=attempt,
            pid=pid,
            began=life["start"]["at"],
            ended=life["end"]["at"] if "end" in life else None,
            nodes=nodes_of(life["placed"]["nodes"]) if "placed" in life else None,
            host=life["start"].get("host", ""),
            devices=_devices(life["start"].get("devices")),
        )
        for (attempt, pid), life in lives.items()
    ]


def _devices(seen: str | None) -> tuple[str, ...] | None:
    return None if seen is None else tuple(filter(None, seen.split(",")))
