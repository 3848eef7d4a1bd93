"""Tests which processes outside a component's process tree may listen on the component's port."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

from tasks.processes.ports import listeners
from tasks.processes.process_component import ProcessComponent
from tests.support.attack_programs import OTHER_USER, only_as_root

RUN_ID = "a-run-of-somebody"
_LISTENS = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def is_foreign(*, user: int) -> bool:
    """Return True if Muster decides that a process does not belong to a component.

    The process listens on the component's port, and has the run's id in its environment. But the
    process is outside of the component's process tree.

    Args:
        user: User id of the process.
    """
    process = subprocess.Popen(
        (sys.executable, "-I", "-c", _LISTENS, str(user)),
        env={**os.environ, "MUSTER_RUN_ID": RUN_ID},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    command = SimpleNamespace(env={"MUSTER_RUN_ID": RUN_ID})
    component = SimpleNamespace(_may_listen=True, plan=SimpleNamespace(command=command))
    try:
        assert process.stdout is not None
        [listener] = listeners(int(process.stdout.readline()))
        assert listener.uid == user
        return ProcessComponent._is_foreign(component, listener)  # type: ignore[arg-type]
    finally:
        process.kill()
        process.communicate()


@only_as_root
def test_listener_of_another_user_with_a_copied_run_id_is_foreign() -> None:
    assert is_foreign(user=OTHER_USER)


def test_daemon_of_the_same_user_with_the_run_id_is_not_foreign() -> None:
    assert not is_foreign(user=os.getuid())
