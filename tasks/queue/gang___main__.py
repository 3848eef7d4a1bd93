"""The queue of gangs: `python -m tasks.queue --help`."""

from __future__ import annotations

import os
import sys

# Prefect reads it when it is imported, and would report to its makers and say so.
os.environ.setdefault("DO_NOT_TRACK", "1")

from tasks.queue.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
