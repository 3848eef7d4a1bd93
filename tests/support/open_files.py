"""Simulate a process that has reached its limit of open files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_table_of_files() -> Iterator[None]:
    """Prevent this process from opening another file while the context is open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        free = probe.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
