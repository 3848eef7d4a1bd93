"""The path that stands for standard input where Muster expects the path of a spec.

The path is in a module of its own, because the import of `tasks.spec.loading` takes long. Commands
that read no spec, such as `muster logs`, import only this module.
"""

from __future__ import annotations

from pathlib import Path

#: Path of standard input. The command line accepts `-` instead, as in `muster train -`.
STANDARD_INPUT = Path("/dev/stdin")
#: Words for standard input on the command line.
STANDARD_INPUT_NAMES = frozenset(("-", str(STANDARD_INPUT), "/dev/fd/0", "/proc/self/fd/0"))
