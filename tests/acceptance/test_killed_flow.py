"""All processes of a run end after SIGKILL of its flow process, also daemons of its components.

The observer does not use Muster. It is a subreaper that starts the flow process, so every orphan
below it becomes its child. Only if no process remains, waiting fails with ECHILD.
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

#: A program that starts a command, and kills the command as soon as the command prints a phrase.
#: The program then waits until all descendants of the command have ended.
#:
#: Arguments: the time limit in seconds, the phrase, and the command. The program prints its result
#: as one line of JSON.
OBSERVER = """
import ctypes, json, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
within_s = float(sys.argv[1])
phrase = sys.argv[2]
command = sys.argv[3:]
flow = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
output_lines = []
for line in flow.stdout:
    output_lines.append(line)
    if phrase in line:
        break
flow.kill()
deadline = time.monotonic() + within_s
empty = False
while time.monotonic() < deadline and not empty:
    try:
        if os.waitpid(-1, os.WNOHANG)[0] == 0:
            time.sleep(0.02)
    except ChildProcessError:
        empty = True
leftovers = []
if not empty:
    ppid = lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(") ")[2].split()[1])
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if ppid(pid) == os.getpid():
                leftovers.append(open(f"/proc/{pid}/cmdline").read().replace("\\0", " "))
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
print(json.dumps({"empty": empty, "left": leftovers, "seen": "".join(output_lines)}))
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
    """Yield a process tree that does not belong to the run and must survive."""
    process = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True)
    yield process
    os.killpg(process.pid, 9)
    process.wait()


#: Mapping from a phase to the text that a run prints at the beginning of the phase. When the run
#: prints this text, the test kills the flow process.
PHRASES = {"starting": "trainer: started", "running": "environment: ready"}


# This test kills the run in only one phase for each process tree in SHAPES. `make faults` tests the
# other combinations of phase and process tree.
@pytest.mark.parametrize(("shape", "phase"), [*zip(SHAPES, ("running", "starting"), strict=True)])
def test_no_process_remains_after_a_killed_flow(
    shape: str,
    phase: str,
    api: str,
    build_gang_spec: Callable,
    tmp_path: Path,
    bystander: subprocess.Popen[bytes],
) -> None:
    code = (
        f"import os, signal, sys, time\n{SHAPES[shape]}\nprint('up', flush=True)\ntime.sleep(600)"
    )
    spec = build_gang_spec(code)
    ready = {"log": "up"} if phase == "running" else {"log": "never to be seen"}
    spec["components"]["trainer"] |= {"ready": ready, "stop": {"grace_s": 0.5}}

    result = _kill_flow(spec, PHRASES[phase], tmp_path, {"PREFECT_API_URL": api})

    assert PHRASES[phase] in result["seen"]
    assert result["empty"], result["left"]
    assert bystander.poll() is None


@pytest.mark.thorough
def test_no_process_of_a_temporary_server_remains(
    build_gang_spec: Callable, tmp_path: Path
) -> None:
    spec = build_gang_spec("import time; time.sleep(600)")

    result = _kill_flow(spec, "environment: ready", tmp_path, {})

    assert "environment: ready" in result["seen"]
    assert result["empty"], result["left"]


def _kill_flow(spec: dict, phrase: str, tmp_path: Path, env: dict[str, str]) -> dict:
    """Run a spec under OBSERVER, which kills the flow process; return the result of OBSERVER.

    Args:
        spec: Content of the spec file.
        phrase: OBSERVER kills the flow process as soon as the flow process prints this phrase.
        tmp_path: Directory for the spec file and MUSTER_HOME.
        env: Further environment variables of the run.
    """
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    command = [sys.executable, "-m", "flows.train", str(path)]
    result = subprocess.run(
        [sys.executable, "-c", OBSERVER, "40", phrase, *command],
        cwd=ROOT,
        env={**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    return json.loads(result.stdout)
