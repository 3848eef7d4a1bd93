"""The number of client connections that a gateway keeps open."""

from __future__ import annotations

import pytest

from tasks.rollout.admission import Bounds, compute_bounds


@pytest.mark.parametrize(
    ("open_files", "in_use", "may_be_let_in", "servers", "in_all", "strangers", "each"),
    [
        (65536, 36, False, 0, 32622, 256, 64),
        (65536, 36, True, 0, 32622, 8192, 4096),
        (65536, 36, True, 1000, 28622, 8192, 4096),
        # the process may open only 1,024 files, and allows 372 connections. Clients that have not
        # yet sent an authorized request may use half of these connections
        (1024, 24, False, 0, 372, 186, 64),
        (1024, 24, True, 0, 372, 186, 93),
        # the process may open only 64 files, but one connection is still allowed
        (64, 60, False, 0, 1, 1, 1),
    ],
)
def test_connections_of_new_clients_leave_enough_open_files_for_the_fleet(
    open_files: int,
    in_use: int,
    may_be_let_in: bool,
    servers: int,
    in_all: int,
    strangers: int,
    each: int,
) -> None:
    bounds = compute_bounds(open_files, in_use=in_use, may_be_let_in=may_be_let_in, servers=servers)

    assert bounds == Bounds(in_all=in_all, strangers=strangers, strangers_each=each)
