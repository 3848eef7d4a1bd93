"""SIGKILL of the flow process: whatever its components are made of, all of it is gone.

The oracle knows nothing of Muster: a subreaper that started the flow process gets every orphan
below it, and is left without a child (ECHILD) only when nothing is left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

#: argv: seconds to wait for emptiness, a line of output to wait for, and the command. Prints one
#: line of JSON.
ORACLE = """
import ctypes, json, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
within_s, phrase, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
flow = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
seen = []
for line in flow.stdout:
    seen.append(line)
    if phrase in line:
        break
flow.kill()
deadline, empty = time.monotonic() + within_s, False
while time.monotonic() < deadline and not empty:
    try:
        if os.waitpid(-1, os.WNOHANG)[0] == 0:
            time.sleep(0.02)
    except ChildProcessError:
        empty = True
left = []
if not empty:
    ppid = lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(") ")[2].split()[1])
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if ppid(pid) == os.getpid():
                left.append(open(f"/proc/{pid}/cmdline").read().replace("\\0", " "))
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
print(json.dumps({"empty": empty, "left": left, "seen": "".join(seen)}))
"""

SHAPES = {
    "a daemon with a scrubbed environment": (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.environ.get('MUSTER_RUN_ID'):\n"
        "        os.execve(sys.executable, ['python', '-c', 'import time; time.sleep(600)'], {})"
    ),
    "processes that keep forking and leaving": (
        "if os.fork() == 0:\n"
        "    while True:\n"
        "        if os.fork(): os._exit(0)\n"
        "        os.setsid(); time.sleep(0.002)"
    ),
}


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """An unrelated process tree beside the run."""
    process = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True)
    yield process
    os.killpg(process.pid, 9)
    process.wait()


#: What each phase is known by.
PHRASES = {"starting": "trainer: started", "running": "environment: ready"}


# In other phases, and with other shapes: the fault table.
@pytest.mark.parametrize(("shape", "phase"), [*zip(SHAPES, ("running", "starting"), strict=True)])
def test_nothing_is_left_of(
    shape: str,
    phase: str,
    api: str,
    gang_of: Callable,
    tmp_path: Path,
    bystander: subprocess.Popen[bytes],
) -> None:
    code = (
        f"import os, signal, sys, time\n{SHAPES[shape]}\nprint('up', flush=True)\ntime.sleep(600)"
    )
    spec = gang_of(code)
    ready = {"log": "up"} if phase == "running" else {"log": "never to be seen"}
    spec["components"]["trainer"] |= {"ready": ready, "stop": {"grace_s": 0.5}}

    verdict = _kill_flow(spec, PHRASES[phase], tmp_path, {"PREFECT_API_URL": api})

    assert PHRASES[phase] in verdict["seen"]
    assert verdict["empty"], verdict["left"]
    assert bystander.poll() is None


@pytest.mark.thorough
def test_nothing_is_left_of_a_temporary_server(gang_of: Callable, tmp_path: Path) -> None:
    spec = gang_of("import time; time.sleep(600)")

    verdict = _kill_flow(spec, "environment: ready", tmp_path, {})

    assert "environment: ready" in verdict["seen"]
    assert verdict["empty"], verdict["left"]


def _kill_flow(spec: dict, phrase: str, tmp_path: Path, env: dict[str, str]) -> dict:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    command = [sys.executable, "-m", "flows.train", str(path)]
    done = subprocess.run(
        [sys.executable, "-c", ORACLE, "40", phrase, *command],
        cwd=ROOT,
        env={**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    return json.loads(done.stdout)
