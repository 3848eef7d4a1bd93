"""Tests of the run spec: valid values, defaults, and faults."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.spec.component import Component
from tasks.spec.errors import InvalidSpec
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe, find_unmet_conditions
from tasks.spec.run import Retry, RunSpec

LEAST: dict[str, Any] = {
    "name": "quickstart",
    "workload": "grpo",
    "components": {"trainer": {"command": ["python", "train.py"]}},
}
HTTP = "http://127.0.0.1:8000/info"
FLEET: dict[str, Any] = {"backend": "command", "command": ["serve", "${server.port}"]}


def spec_with(path: str, value: object) -> dict[str, Any]:
    """Return a minimal spec with one value set.

    Args:
        path: Path of the value. The first part may be `trainer`, short for `components.trainer`.
        value: The value.
    """
    data = deepcopy(LEAST)
    steps = path.split(".")
    node = data["components"] if steps[0] == "trainer" else data
    for step in steps[:-1]:
        node = node.setdefault(step, {})
    node[steps[-1]] = value
    return data


def full_path(path: str) -> str:
    return f"components.{path}" if path.startswith("trainer") else path


def faults_of(data: object) -> list[tuple[str, str, str]]:
    with pytest.raises(InvalidSpec) as raised:
        RunSpec.model_validate(data)
    return [(fault.path, fault.problem, fault.remedy) for fault in raised.value.faults]


def test_minimal_spec_is_valid() -> None:
    spec = RunSpec.model_validate(LEAST)

    assert spec.processes == {"trainer": Component(command=("python", "train.py"))}
    assert (spec.tags, spec.env, spec.cwd) == ((), {}, ".")
    assert (spec.gang, spec.ray, spec.progress, spec.success) == (None, None, None, None)
    assert (spec.on_lost_flow, spec.containment, spec.stall_after_s) == ("stop", "auto", None)
    stop = spec.processes["trainer"].stop
    assert (stop.signal, stop.grace_s, stop.saves_within_s, stop.warn) == ("SIGTERM", 10, 10, None)
    assert spec.processes["trainer"].launcher == "process"


def test_teardown_time_is_the_sum_of_grace_periods_and_saves() -> None:
    components = {
        "api": {"command": ["serve"], "stop": {"grace_s": 5}},
        "rollout": {**FLEET, "stop": {"grace_s": 7}},
        "trainer": {"command": ["train"], "checkpoints": "saved", "stop": {"grace_s": 60}},
    }
    spec = RunSpec.model_validate({**LEAST, "components": components})

    assert spec.teardown_s == 5 + 7 + 2 * 60


def test_teardown_time_includes_the_time_for_a_save() -> None:
    stop = {"grace_s": 5, "save_grace_s": 900}
    saving = spec_with("trainer.checkpoints", "saved")
    saving["components"]["trainer"]["stop"] = stop
    warned = spec_with("trainer.stop", {**stop, "warn": "SIGUSR1"})

    assert RunSpec.model_validate(saving).teardown_s == 905
    assert RunSpec.model_validate(warned).teardown_s == 905


@pytest.mark.parametrize("written", [10, "10", "SIGUSR1"])
def test_stop_signal_may_be_a_name_or_a_number(written: object) -> None:
    stop = {"signal": written, "warn": 12}

    spec = RunSpec.model_validate(spec_with("trainer.stop", stop))

    assert spec.processes["trainer"].stop.signal == "SIGUSR1"
    assert spec.processes["trainer"].stop.warn == "SIGUSR2"


@pytest.mark.parametrize("written", [0, 99, -9])
def test_number_of_no_signal_is_rejected(written: int) -> None:
    with pytest.raises(InvalidSpec, match=rf"name or number of a signal, found {written}"):
        RunSpec.model_validate(spec_with("trainer.stop", {"signal": written}))


def test_preparation_step_is_ready_when_it_has_exited_with_zero() -> None:
    data = spec_with("trainer.ready", {"exit": 0})

    spec = RunSpec.model_validate(data)

    assert spec.on_exit_zero("trainer") == "drain"
    assert spec.processes["trainer"].ready == ReadyProbe(exit=0)
    assert ReadyProbe(exit=0).limit_s is None
    assert ReadyProbe(exit=0, within_s=5).limit_s == 5


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("ready", {"exit": 1}, "ready.exit"),
        ("ready", {"exit": 0, "alive_s": 1}, "must have exactly 1 check"),
        ("live", {"exit": 0}, "live.exit"),
    ],
)
def test_key_exit_is_allowed_only_as_the_sole_readiness_question(
    key: str, value: object, fault: str
) -> None:
    with pytest.raises(InvalidSpec, match=fault):
        RunSpec.model_validate(spec_with(f"trainer.{key}", value))


@pytest.mark.parametrize("on_exit_zero", ["complete", "fail"])
def test_preparation_step_cannot_end_the_run_with_exit_code_zero(on_exit_zero: str) -> None:
    data = spec_with("trainer.ready", {"exit": 0})
    data["components"]["trainer"]["on_exit_zero"] = on_exit_zero

    with pytest.raises(
        InvalidSpec, match=r"on_exit_zero: must be drain, found .*the run continues"
    ):
        RunSpec.model_validate(data)


def test_probe_has_the_default_intervals() -> None:
    ready, live = ReadyProbe(http=HTTP), LiveProbe(http=HTTP)

    assert (ready.every_s, ready.limit_s) == (0.1, 120)
    assert (live.every_s, live.timeout_s, live.misses) == (10, 5, 3)


def test_components_keep_their_order() -> None:
    names = ["zoo", "trainer", "api", "environment", "alpha"]
    data = {**LEAST, "components": {name: {"command": ["true"]} for name in names}}

    spec = RunSpec.model_validate(data)

    assert list(spec.components) == list(spec.processes) == names
    assert list(spec.written()["components"]) == names


def test_spec_is_immutable() -> None:
    spec = RunSpec.model_validate(LEAST)

    with pytest.raises(ValidationError):
        spec.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("api", "fail"),  # the run cannot continue without its server
        ("trainer", "complete"),
        ("environment", "complete"),
        ("sandbox", "fail"),  # the default for every other name
    ],
)
def test_default_of_on_exit_zero_depends_on_the_component(name: str, meaning: str) -> None:
    spec = RunSpec.model_validate({**LEAST, "components": {name: {"command": ["true"]}}})

    assert spec.processes[name].on_exit_zero is None
    assert spec.on_exit_zero(name) == meaning


def test_exit_code_zero_of_a_fleet_is_a_failure() -> None:
    spec = RunSpec.model_validate({**LEAST, "components": {"rollout": FLEET}})

    assert spec.on_exit_zero("rollout") == "fail"


def test_on_exit_zero_of_the_spec_wins() -> None:
    spec = RunSpec.model_validate(spec_with("trainer.on_exit_zero", "drain"))

    assert spec.on_exit_zero("trainer") == "drain"


@pytest.mark.parametrize(
    ("retry", "kind", "policy"),
    [
        ({}, "INSUFFICIENT_RESOURCES", Retry()),  # default: requeued without limit
        ({}, "START_TIMEOUT", Retry(attempts=6)),
        ({"START_TIMEOUT": {"delay_s": 1}}, "START_TIMEOUT", Retry(attempts=6, delay_s=1)),
        # by default, a run that lost its inference servers is requeued three times, after a short
        # delay
        (
            {},
            "FLEET_LOST",
            Retry(attempts=4, delay_s=5),
        ),
        ({"NODE_LOST": {"attempts": 9}}, "FLEET_LOST", Retry(attempts=4, delay_s=5)),
        ({"FLEET_LOST": {"delay_s": 1}}, "FLEET_LOST", Retry(attempts=4, delay_s=1)),
        ({"FLEET_LOST": {"attempts": 1}}, "FLEET_LOST", Retry(attempts=1, delay_s=5)),
        ({}, "NODE_LOST", None),  # default: the run is not retried
        ({"NODE_LOST": {"attempts": 3}}, "NODE_LOST", Retry(attempts=3)),
        ({"START_TIMEOUT": {"attempts": 2}}, "START_TIMEOUT", Retry(attempts=2)),
    ],
)
def test_retry_policy_depends_on_the_spec_and_the_kind_of_failure(
    retry: dict[str, Any], kind: str, policy: Retry | None
) -> None:
    spec = RunSpec.model_validate({**LEAST, "retry": retry})

    found = spec.find_retry_policy(FailureKind(kind))

    assert (found and found.model_dump()) == (policy and policy.model_dump())


def test_retry_has_default_delays_and_no_limit() -> None:
    assert (Retry().attempts, Retry().delay_s, Retry().max_delay_s) == (None, 60, 600)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("text", "text"),
        (60, "60"),
        (-1, "-1"),
        (1e-4, "0.0001"),  # Python's notation of the number
        (0.5, "0.5"),
        ("", ""),
        ("-1", "-1"),
    ],
)
def test_numbers_are_accepted_as_text_in_commands_and_variables(
    written: object, meant: str
) -> None:
    data = spec_with("trainer.command", ["python", written])
    data["env"] = {"X": written}

    spec = RunSpec.model_validate(data)

    assert spec.processes["trainer"].command == ("python", meant)
    assert spec.env == {"X": meant}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "a"),  # the shortest name
        ("name", "a" * 32),  # the longest name
        ("name", "a-1-b"),
        ("workload", "sft"),
        ("tags", ["demo", "two words"]),
        ("gang", {"nodes": 1, "gpus_per_node": 8, "cpus_per_gpu": 3, "hours": 24}),
        ("gang", {"gpus_per_node": 1, "hours": 0.5}),
        ("ray", {"address": "http://127.0.0.1:8265"}),
        (
            "ray",
            {
                "address": "http://head:8265",
                "start_within_s": 60,
                "entrypoint_resources": {"worker_node": 1},
                "entrypoint_label_selector": {"pool": "train"},
            },
        ),
        ("containment", "namespace"),
        ("trainer.ports", ["metrics", "port"]),
        ("trainer.cwd", "/"),
        ("trainer.checkpoints", "${run.dir}/checkpoints"),
        ("trainer.checkpoints", "${attempt.dir}/ckpt/step-*"),
        ("trainer.stop", {"signal": "SIGINT", "grace_s": 0}),  # a grace period of 0 is allowed
        ("trainer.stop", {"warn": "SIGUSR1", "warn_s": 60, "save_grace_s": 0}),
        ("trainer.ready", {"tcp": 8000}),
        ("trainer.ready", {"tcp": "8000"}),
        ("trainer.ready", {"tcp": "[::1]:8000"}),
        ("trainer.ready", {"tcp": "${trainer.port}"}),
        ("trainer.ready", {"tcp": "127.0.0.1:${trainer.port}"}),
        ("trainer.ready", {"http": "https://host/x"}),
        ("trainer.ready", {"http": "${rollout.url}/health"}),
        ("trainer.ready", {"http": HTTP, "json": {"a.b.0": None, "c": {"not": -1}}}),
        ("trainer.ready", {"log": r"ready on port \d+$"}),
        ("trainer.ready", {"log": "port ${trainer.port}|[$]{2}"}),
        ("trainer.ready", {"file": "${attempt.dir}/ready"}),
        ("trainer.ready", {"notify": True}),
        ("trainer.ready", {"alive_s": 0.5}),
        # a liveness probe that checks only processes
        ("trainer.live", {"processes": "scheduler"}),
        # a liveness probe that checks processes and also sends an HTTP request
        (
            "trainer.live",
            {"http": HTTP, "processes": "scheduler"},
        ),
        ("progress", {"jsonl": "m.jsonl", "step": "train.step"}),
        ("progress", {"http": HTTP, "step": "current_step", "total": 60}),
        ("stall_after_s", 1800),
        ("retry", {"NODE_LOST": {"attempts": 1, "delay_s": 0.1, "max_delay_s": 0.1}}),
        ("env", None),  # a key without a value, as in `env:`, counts as left out
        ("trainer.env", None),
        ("trainer.ready", None),
        ("components", {"rollout": FLEET}),
        ("components.rollout", {**FLEET, "health": {"misses": 0}}),  # no periodic health checks
        (
            "components",
            {
                "rollout": {
                    "backend": "sglang",
                    "model": "Qwen/Qwen3-8B",
                    "engines": 2,
                    "nodes_per_engine": 1,
                    "gpus_per_node": 8,
                    "tensor_parallel": 8,
                    "expert_parallel": 1,
                    "data_parallel": 1,
                    "args": ["--mem-fraction-static", 0.8],
                    "health": {"interval_s": 30, "timeout_s": 15, "misses": 3, "first_after_s": 60},
                    "recovery": {
                        "budget": 5,
                        "backoff_s": 1,
                        "max_backoff_s": 60,
                        "parallel": 4,
                        "min_active": 1,
                    },
                    "placement": "local",
                }
            },
        ),
    ],
)
def test_valid_values_are_accepted(path: str, value: object) -> None:
    RunSpec.model_validate(spec_with(path, value))


@pytest.mark.parametrize(
    ("path", "value", "problem", "remedy"),
    [
        # invalid names of runs and workloads
        ("name", "", "must be text that matches the pattern ", ""),
        (
            "name",
            "Quick",
            "must be text that matches the pattern ^[a-z][a-z0-9-]{0,31}$",
            "write `quick`, for example",
        ),
        ("name", "1st", "must be text that matches the pattern ^[a-z]", ""),
        ("name", "a" * 33, "must be text that matches the pattern ^[a-z]", ""),
        # an underscore is not allowed, because the name becomes a part of the run id
        (
            "name",
            "a_b",
            "must be text that matches the pattern ^[a-z]",
            "write `a-b`, for example",
        ),
        # a name must not end with a newline. The pattern must not use `$`, which also matches
        # before a newline at the end
        (
            "name",
            "a\n",
            "must be text that matches the pattern ^[a-z]",
            "",
        ),
        ("name", 5, "must be text, found 5", ""),
        ("name", None, "must be text, found nothing", ""),
        (
            "workload",
            "gpro",
            "must be ppo, grpo, sft, dpo, rm, pretrain, other or step, found the text 'gpro'",
            "`grpo`",
        ),
        ("tags", "demo", "must be a list, found the text 'demo'", "write [ITEM, ...]"),
        ("cwd", "", "must not be empty", ""),
        ("on_lost_flow", "keep", "must be stop or adopt", ""),
        ("containment", "none", "must be auto or namespace", ""),
        # invalid values of `components`
        ("components", {}, "must not be empty", "write at least one"),
        ("components", [], "must be a mapping, found a list", ""),
        ("components", None, "must be a mapping, found nothing", ""),
        (
            "components",
            {"reward": None},
            "must be a mapping, found nothing",
            "write KEY: VALUE below it",
        ),
        ("trainer.launcher", "slurm", "must be process or ray_job", ""),
        # invalid commands of a component
        ("trainer.command", "a b", "must be a list", '[sh, -c, "a b"]'),
        ("trainer.command", [], "must not be empty", "[python, train.py]"),
        ("trainer.command", [""], "must be the name of a program, found an empty text", ""),
        ("trainer.command", None, "must be a list, found nothing", ""),
        ("trainer.command", {"a": 1}, "must be a list, found a mapping", ""),
        # invalid values of `checkpoints`
        ("trainer.checkpoints", ["a"], "must be text, found a list", ""),
        ("trainer.checkpoints", "", "must not be empty", ""),
        # invalid values of `stop`
        ("trainer.stop.signal", "TERM", "must be the name of a signal, found 'TERM'", "`SIGTERM`"),
        (
            "trainer.stop.signal",
            "SIGTREM",
            "must be the name of a signal",
            "did you mean `SIGTERM`?",
        ),
        ("trainer.stop.signal", "sigint", "must be the name of a signal", "did you mean `SIGINT`?"),
        (
            "trainer.stop.signal",
            99,
            "must be the name or number of a signal, found 99",
            "write for example SIGINT",
        ),
        ("trainer.stop.grace_s", -1, "must be at least 0, found -1", ""),
        ("trainer.stop.grace_s", math.nan, "must be a finite number, found nan", ""),
        ("trainer.stop.warn", "USR1", "must be the name of a signal", "did you mean `SIGUSR1`?"),
        ("trainer.stop.warn", "SIGKILL", "must be a signal that a program can handle", "SIGUSR1"),
        ("trainer.stop.warn_s", 60, "needs `warn`", "write `warn: SIGUSR1`"),
        (
            "trainer.stop.save_grace_s",
            60,
            "this key needs `checkpoints`",
            "write `checkpoints: FOLDER`",
        ),
        # invalid durations
        ("stall_after_s", 0, "must be more than 0, found 0", ""),
        ("stall_after_s", -1.5, "must be more than 0, found -1.5", ""),
        ("stall_after_s", math.inf, "must be a finite number, found inf", ""),
        ("stall_after_s", True, "must be a number, found true", ""),
        ("stall_after_s", "30", "must be a number, found the text '30'", "without quotes"),
        # PyYAML reads a number with an exponent and no decimal point, such as 1e-3, as text
        (
            "stall_after_s",
            "1e-3",
            "must be a number",
            "write 0.001",
        ),
        ("stall_after_s", "1m", "must be a number, found the text '1m'", ""),
        # invalid probes of a component
        (
            "trainer.ready",
            {},
            "must have a check",
            "write one of http, tcp, log, file, notify, alive_s",
        ),
        ("trainer.ready", {"within_s": 5}, "must have a check", ""),
        (
            "trainer.ready",
            {"tcp": 1, "log": "x"},
            "must have exactly 1 check, found tcp and log",
            "keep one",
        ),
        ("trainer.ready", HTTP, "must be a mapping, found the text", ""),
        ("trainer.ready.json", {"a": 1}, "needs `http`", ""),
        ("trainer.ready.http", "127.0.0.1:80", "must be an http address", "http://127.0.0.1:PORT"),
        ("trainer.ready.http", "http://", "must be an http address", ""),
        ("trainer.ready.http", "http://h:99999/", "must be an http address", ""),
        ("trainer.ready.http", "http://h /", "must be an http address", ""),
        ("trainer.ready.tcp", 0, "must be a port (1 to 65535)", ""),
        ("trainer.ready.tcp", 65536, "must be a port (1 to 65535)", ""),
        ("trainer.ready.tcp", "host", "must be a port (1 to 65535) or HOST:PORT", ""),
        ("trainer.ready.tcp", ":80", "must be a port", ""),
        ("trainer.ready.tcp", "http://h:80", "must be a port (1 to 65535) or HOST:PORT", ""),
        ("trainer.ready.tcp", True, "or HOST:PORT, found true", ""),
        ("trainer.ready.log", "a(b", "must be a regular expression: missing )", "backslash"),
        ("trainer.live.processes", "*", "must be a regular expression: nothing to repeat", ""),
        ("trainer.ready.notify", False, "must be true, found false", ""),
        ("trainer.ready.alive_s", 0, "must be more than 0", ""),
        ("trainer.live.misses", 0, "must be at least 1, found 0", ""),
        ("trainer.live.misses", 1.5, "must be a whole number, found 1.5", ""),
        # invalid values of `progress` and `success`
        (
            "progress",
            {"step": "s"},
            "has neither http nor jsonl",
            "write exactly one of http and jsonl",
        ),
        ("progress", {"http": HTTP, "jsonl": "f", "step": "s"}, "has both http and jsonl", ""),
        ("progress.step", "a..b", "must be text that matches the pattern ", ""),
        ("progress.total", 0, "must be at least 1", ""),
        (
            "success",
            {"step": 60},
            "this key needs `progress`, from which Muster reads the step",
            "progress:",
        ),
        ("success.step", 0, "must be at least 1", ""),
        # invalid values of `gang` and `ray`
        ("gang.gpus_per_node", 0, "must be at least 1", ""),
        ("gang.nodes", "2", "must be a whole number, found the text '2'", "without quotes"),
        ("gang.hours", math.nan, "must be a finite number", ""),
        ("ray.address", "auto", "must be an http address, found 'auto'", ""),
        ("ray.entrypoint_resources", ["a"], "must be a mapping, found a list", ""),
        # invalid values of `retry`
        ("retry.OOM", {"attempts": 1}, "must be INSUFFICIENT_RESOURCES, START_TIMEOUT", ""),
        ("retry.NODE_LOST", {"attempts": 0}, "must be at least 1", ""),
        (
            "retry.NODE_LOST",
            {},
            "missing: for this kind of failure, the spec must set the number of attempts",
            "attempts",
        ),
        # invalid values of the inference fleet `rollout`
        ("components.rollout", {"backend": "trt"}, "must be sglang, lmdeploy, vllm or command", ""),
        ("components.rollout", {"health": {"misses": -1}}, "must be at least 0", ""),
    ],
)
def test_invalid_values_are_reported_with_a_remedy(
    path: str, value: object, problem: str, remedy: str
) -> None:
    faults = faults_of(spec_with(path, value))

    matching = [
        fault
        for fault in faults
        if fault[0].startswith(full_path(path)) and problem in fault[1] and remedy in fault[2]
    ]
    assert len(matching) == 1, faults


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("trainer.command.1", ["python", True], "must be text, found true"),
        ("trainer.command.1", ["python", None], "must be text, found nothing"),
        ("trainer.command.1", ["python", ["a"]], "must be text, found a list"),
        ("trainer.command.1", ["python", "a\0b"], "without NUL characters"),
        ("trainer.command.1", ["python", "\ud800"], "must be valid UTF-8 text"),
        ("trainer.env.X", {"X": False}, "must be text, found false"),
        ("trainer.env.X", {"X": None}, "must be text, found nothing"),
        ("trainer.env.X", {"X": {}}, "must be text, found a mapping"),
        ("trainer.env.5", {5: "x"}, "the key must be text, found 5"),
        # YAML reads the unquoted key `on` as the value true
        (
            "trainer.env.True",
            {True: "x"},
            "the key must be text, found true",
        ),
        ("trainer.env.A=B", {"A=B": "x"}, "must be the name of a variable, without `=`"),
        ("trainer.env.", {"": "x"}, "must not be empty"),
        ("trainer.ports.0", ["Metrics"], "must be text that matches the pattern ^[a-z]"),
        (
            "trainer.ready.json.a",
            {"http": HTTP, "json": {"a": [1]}},
            "must be a simple value (a text, a finite",
        ),
        ("trainer.ready.json.a", {"http": HTTP, "json": {"a": {"is": 1}}}, "or `{not: VALUE}`"),
        ("trainer.ready.json.a", {"http": HTTP, "json": {"a": {}}}, "or `{not: VALUE}`"),
        (
            "trainer.ready.json.a",
            {"http": HTTP, "json": {"a": math.nan}},
            "must be a simple value (a text, a finite",
        ),
    ],
)
def test_fault_inside_a_value_has_its_full_path(path: str, value: object, problem: str) -> None:
    key = path.split(".")[1]

    [fault] = faults_of(spec_with(f"trainer.{key}", value))

    assert fault[0] == f"components.{path}"
    assert problem in fault[1]


@pytest.mark.parametrize("total", [60, None])
def test_success_step_may_be_the_last_step(total: int | None) -> None:
    data = deepcopy(LEAST)
    data["progress"] = {"jsonl": "m.jsonl", "step": "step", "total": total}
    data["success"] = {"step": 60}

    spec = RunSpec.model_validate(data)

    assert spec.success is not None


def test_success_step_beyond_the_last_step_is_refused() -> None:
    data = deepcopy(LEAST)
    data["progress"] = {"jsonl": "m.jsonl", "step": "step", "total": 59}
    data["success"] = {"step": 60}

    faults = faults_of(data)

    assert faults == [
        (
            "success.step",
            "must be at most progress.total, which is 59, found 60",
            "write `success.step: 59` or less, or raise progress.total",
        )
    ]


def test_only_one_component_may_have_checkpoints() -> None:
    data = deepcopy(LEAST)
    data["components"]["trainer"]["checkpoints"] = "a"
    data["components"]["reward"] = {"command": ["python"], "checkpoints": "b"}

    [fault] = faults_of(data)

    assert fault == (
        "components.reward.checkpoints",
        "only one component of a run may have `checkpoints`, because there is only one "
        "${attempt.resume_from}. But trainer has the key, too",
        "write checkpoints for trainer only",
    )


def test_unknown_key_gets_a_suggestion_and_the_known_keys() -> None:
    [fault] = faults_of(spec_with("trainer.redy", {}))

    assert fault == (
        "components.trainer.redy",
        "unknown key",
        "did you mean `ready`? known keys: launcher, command, env, cwd, gpus, memory_gib, ports, "
        "ready, live, on_exit_zero, stop, checkpoints, log_max_bytes, keep",
    )


@pytest.mark.parametrize(
    ("path", "value", "known"),
    [
        ("nme", "x", "name, workload, tags"),
        (
            "gang",
            {"gpus_per_node": 1, "x": 1},
            "nodes, gpus_per_node, cpus_per_gpu, hours, max_hours",
        ),
        ("trainer.ready", {"tcp": 1, "x": 1}, "http, json, tcp, log, file, notify, alive_s"),
        ("trainer.stop", {"x": 1}, "signal, grace_s"),
        ("components.rollout", {**FLEET, "health": {"x": 1}}, "interval_s, timeout_s, misses"),
        ("retry", {"NODE_LOST": {"attempts": 1, "x": 1}}, "attempts, delay_s, max_delay_s"),
    ],
)
def test_unknown_key_lists_the_known_keys(path: str, value: object, known: str) -> None:
    [fault] = faults_of(spec_with(path, value))

    assert fault[1] == "unknown key"
    assert f"known keys: {known}" in fault[2]


@pytest.mark.parametrize("missing", ["name", "workload", "components"])
def test_missing_key_gets_an_example(missing: str) -> None:
    data = {key: value for key, value in LEAST.items() if key != missing}

    [fault] = faults_of(data)

    assert fault[:2] == (missing, "missing")
    assert fault[2].startswith(f"write for example {missing}: ")


def test_missing_command_gets_an_example() -> None:
    assert faults_of({**LEAST, "components": {"api": {}}}) == [
        (
            "components.api.command",
            "missing",
            "write for example command: [python, train.py, --port, '${trainer.port}']",
        )
    ]


@pytest.mark.parametrize("name", ["Api", "1", "a" * 33, "a.b", "a b", "-a", "_a", ""])
def test_invalid_component_names_are_rejected(name: str) -> None:
    [fault] = faults_of({**LEAST, "components": {name: {"command": ["true"]}}})

    assert fault[0] == f"components.{name}"
    assert "must match the pattern ^[a-z]" in fault[1]


def test_rules_between_keys_are_checked_even_if_the_keys_are_invalid() -> None:
    data = spec_with("trainer.ready", {"http": 1, "tcp": [], "within_s": "soon"})
    data["success"] = {"step": "sixty"}
    data["retry"] = {"CUDA_OOM": {"delay_s": 0}}

    faults = {(path, problem) for path, problem, _ in faults_of(data)}

    assert {
        ("components.trainer.ready", "must have exactly 1 check, found http and tcp"),
        ("components.trainer.ready.http", "must be text, found 1"),
        ("components.trainer.ready.within_s", "must be a number, found the text 'soon'"),
        ("success", "this key needs `progress`, from which Muster reads the step"),
        ("success.step", "must be a whole number, found the text 'sixty'"),
        (
            "retry.CUDA_OOM.attempts",
            "missing: for this kind of failure, the spec must set the number of attempts",
        ),
        ("retry.CUDA_OOM.delay_s", "must be more than 0, found 0"),
    } <= faults


def test_constructor_validates_like_a_file() -> None:
    with pytest.raises(InvalidSpec):
        RunSpec(name="Bad", workload="grpo", components={})
    with pytest.raises(ValidationError):
        ReadyProbe(http=HTTP, tcp="80")


@pytest.mark.parametrize(
    ("written", "answer", "message"),
    [
        ({"size": {"not": -1}}, {"size": 32}, ""),
        ({"size": {"not": -1}}, {"size": -1}, "size is -1"),
        # the answer of the HTTP server does not contain the key, so the condition is not met
        (
            {"size": {"not": -1}},
            {},
            "the answer has no key size",
        ),
        ({"size": {"not": -1}}, None, "the answer has no key size"),
        ({"ok": True}, {"ok": True}, ""),
        ({"ok": True}, {"ok": 1}, "ok is 1, not true"),  # 1 == True in Python, not in JSON
        ({"n": 1}, {"n": 1.0}, ""),
        ({"n": None}, {"n": None}, ""),
        ({"n": None}, {"n": 0}, "n is 0, not nothing"),
        ({"a.b": "x"}, {"a": {"b": "x"}}, ""),
        ({"a.1.b": 2}, {"a": [{}, {"b": 2}]}, ""),
        ({"a.2": 2}, {"a": [1, 2]}, "the answer has no key a.2"),
        ({"a.b": 2}, {"a": "b"}, "the answer has no key a.b"),
    ],
)
def test_unmet_condition_names_the_actual_value(
    written: dict[str, Any], answer: object, message: str
) -> None:
    conditions = ReadyProbe(http=HTTP, json=written).json_

    assert conditions is not None
    assert "".join(find_unmet_conditions(conditions, answer)) == message


@pytest.mark.parametrize(
    ("tcp", "address"),
    [
        (8000, ("127.0.0.1", 8000)),
        ("8000", ("127.0.0.1", 8000)),
        ("host:80", ("host", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_tcp_probe_has_host_and_port(tcp: object, address: tuple[str, int]) -> None:
    assert ReadyProbe.model_validate({"tcp": tcp}).address == address


def test_form_offers_the_usual_components_and_accepts_others() -> None:
    components = RunSpec.model_json_schema()["properties"]["components"]

    assert list(components["properties"]) == ["api", "rollout", "trainer", "environment"]
    assert components["additionalProperties"] == {"$ref": "#/$defs/Component"}
    assert components["properties"]["rollout"] == {
        "anyOf": [
            {"$ref": "#/$defs/Rollout", "title": "Given"},
            {"type": "null", "title": "Left out"},
        ],
        "default": None,
        "title": "rollout",
        "description": "A fleet of inference servers.",
        "position": 1,
    }


def test_form_has_a_box_for_values_and_a_choice_for_sections() -> None:
    schema = RunSpec.model_json_schema()["properties"]

    assert (schema["stall_after_s"]["type"], "default" in schema["stall_after_s"]) == (
        "number",
        False,
    )
    assert [way["title"] for way in schema["gang"]["anyOf"]] == ["Given", "Left out"]


def test_form_shows_components_last() -> None:
    schema = RunSpec.model_json_schema()

    at = {key: one["position"] for key, one in schema["properties"].items()}
    assert max(at, key=at.__getitem__) == "components"
    parts = [part["properties"] for part in schema["$defs"].values() if "properties" in part]
    assert all("position" in one for part in parts for one in part.values())


def test_null_component_from_the_form_is_omitted() -> None:
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "workload": "grpo",
            "components": {"api": None, "trainer": {"command": ["true"]}, "rollout": None},
        }
    )

    assert list(spec.components) == ["trainer"]


def test_form_without_components_is_rejected() -> None:
    data = {"name": "x", "workload": "grpo", "components": {"trainer": None, "api": None}}

    [(path, problem, _)] = faults_of(data)

    assert (path, problem) == ("components", "must not be empty")
