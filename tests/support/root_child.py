"""Run a component whose child belongs to root, under a supervisor of the user `nobody`.

    setpriv ... python -m tests.support.root_child DIRECTORY HELPER [--kill-guardian]

Start this program with `AS_NOBODY`. It runs one component. The component starts HELPER, a program
with the set-user-ID bit that becomes root for good, as `sudo` does. The program prints two lines of
JSON. The first line has the pids of the child process that runs as root, and of the guardian, the
process that owns the component. The second line has the result of the teardown.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tasks.processes import tree
from tests.support.another_user import NOBODY
from tests.support.supervised_components import ComponentHarness, sh, wait_until

#: Command that runs another command as the user `nobody`, with the capability to read all files.
#: Without this capability, `nobody` may not be able to read the directory of the Python
#: interpreter.
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
#: C program that becomes root and waits. The program can become root only if the executable belongs
#: to root and has the set-user-ID bit.
_HELPER = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>
int main(void) {
    if (setresgid(0, 0, 0) != 0 || setresuid(0, 0, 0) != 0) {
        perror("root-child");
        return 1;
    }
    execl("/bin/sleep", "sleep", "613", (char *)0);
    return 1;
}
"""


def make_helper(directory: Path) -> Path:
    """Compile the program that becomes root, and set its set-user-ID bit. Needs root and `cc`."""
    source = directory / "root-child.c"
    source.write_text(_HELPER)
    helper = directory / "root-child"
    subprocess.run(["cc", "-o", str(helper), str(source)], check=True, timeout=60)
    helper.chmod(0o4755)
    return helper


def find_child_of_root(guardian: int) -> int:
    """Return the pid of the component's child process that runs as root; 0 if there is none yet."""
    for pid in tree.descendants(guardian):
        if tree.read_real_user(pid) == 0 and "613" in tree.read_command_line(pid):
            return pid
    return 0


def main(directory: Path, helper: str, kills_guardian: bool) -> None:
    """Start a component, end the component, and print the result as JSON.

    A child process of the component runs as root.

    Args:
        directory: Directory for the files of the component.
        helper: Path of the program that becomes root.
        kills_guardian: True to kill the component's guardian process before the component is
            ended.
    """
    harness = ComponentHarness(directory)
    command = sh(f"{helper} & exec sleep 600")
    supervisor = harness.start_all(harness.component("trainer", command))
    guardian = harness.guardian_of("trainer")
    wait_until(lambda: find_child_of_root(guardian), "the component has a child of root")
    child = find_child_of_root(guardian)
    print(json.dumps({"child": child, "guardian": guardian}), flush=True)
    if kills_guardian:
        os.kill(guardian, signal.SIGKILL)
    with supervisor:
        verdict = supervisor.teardown()
    [stuck] = harness.list_events("component.stuck") or [None]
    result = {
        "state": verdict.state.value,
        "message": verdict.message,
        "left": {name: list(texts) for name, texts in verdict.left.items()},
        "stuck_pids": list(stuck.pids) if stuck is not None else None,
    }
    print(json.dumps(result), flush=True)
    with suppress(EOFError):
        input()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--kill-guardian" in sys.argv)
