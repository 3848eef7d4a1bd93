"""The queue of gangs: `python -m tasks.gang --help`."""

from __future__ import annotations

import sys

from tasks.queue.command import main

sys.exit(main())
