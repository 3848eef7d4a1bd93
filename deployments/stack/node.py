"""A node of a stack's cluster, for as long as the stack lives: `python -m deployments.stack.node
ADDRESS OPTIONS...` runs `stack_ray_node` with them, and again each time it has died.

As a real machine comes back after a crash: its cluster sees one node die and another one come,
and the stack goes on. What the dead one left running is left to run, as there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

#: A node that has ended sooner than that was never of use.
_TOO_SOON_S = 15.0
_TRIES = 3


class Node:
    """`ray start --block`, again and again until it is stopped.

    SIGINT and SIGTERM reach Ray's process, too, which is in the same process group: here they only
    mean that it is not started again.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._is_stopped = False

    def stop(self, *_: object) -> None:
        self._is_stopped = True

    def run(self) -> int:
        """Returns: 0 when it was stopped, 1 when it does not stay up."""
        failures = 0
        while not self._is_stopped and failures < _TRIES:
            began = time.monotonic()
            code = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL).wait()
            failures = failures + 1 if time.monotonic() - began < _TOO_SOON_S else 0
            if not self._is_stopped:
                print(f"The node has ended with exit code {code}.", flush=True)
        return 0 if self._is_stopped else 1


def main() -> int:
    node = Node([sys.executable, "-m", "deployments.stack.ray_node", *sys.argv[1:]])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, node.stop)
    return node.run()


if __name__ == "__main__":
    sys.exit(main())
