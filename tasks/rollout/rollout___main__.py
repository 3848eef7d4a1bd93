"""The rollout fleet: `python -m tasks.rollout --help`."""

from __future__ import annotations

import sys

from tasks.rollout.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
