"""A memory limit that this machine or the launcher cannot set is a fault of the spec."""

from __future__ import annotations

import pytest

from tasks.processes import memory_cgroup
from tasks.processes.memory_cgroup import MemoryParent, find_memory_parent
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.run import RunSpec
from tasks.train.spec_check import check_spec


def make_spec(**keys: object) -> RunSpec:
    trainer = {"command": ["true"], "memory_gib": 1.5, **keys}
    return parse_spec(
        {"name": "a", "workload": "sft", "ray": {}, "components": {"trainer": trainer}}
        if keys
        else {"name": "a", "workload": "sft", "components": {"trainer": trainer}}
    )


def test_memory_limit_in_gib_is_converted_to_bytes() -> None:
    assert make_spec().processes["trainer"].memory_bytes == 1536 << 20


def test_machine_that_cannot_limit_memory_refuses_the_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_memory_parent.cache_clear()

    def refuse(parent: MemoryParent) -> None:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/a/muster-x")

    monkeypatch.setattr(memory_cgroup, "_try_out", refuse)
    monkeypatch.setattr(memory_cgroup, "_passes_controller_on", lambda directory: True)

    with pytest.raises(InvalidSpec) as refused:
        check_spec(make_spec())

    find_memory_parent.cache_clear()
    [fault] = refused.value.faults
    assert fault.path == "components.trainer.memory_gib"
    assert "cannot limit the memory of a component" in fault.problem
    assert "leave out memory_gib" in fault.remedy


def test_limit_of_a_ray_job_is_a_fault() -> None:
    with pytest.raises(InvalidSpec) as refused:
        make_spec(launcher="ray_job")

    assert [fault.path for fault in refused.value.faults] == ["components.trainer.memory_gib"]
    assert "this key needs launcher: process" in refused.value.faults[0].problem
