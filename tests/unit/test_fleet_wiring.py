"""Tests of the fleet as a component of a run: its plan, faults, placeholders and events."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tasks.processes.component import AttemptPlan
from tasks.processes.containment import Containment, Level
from tasks.record.events import Event, EventLog
from tasks.record.places import AttemptPlace
from tasks.rollout.component import (
    TOKEN_ENV,
    FleetPlan,
    FleetTail,
    fleet_faults,
    fleet_names,
    fleet_ports,
    prepare_fleet,
)
from tasks.rollout.process import read_allowed_devices
from tasks.rollout.topology import is_loopback
from tasks.rollout.topology import plan_topology as topology
from tasks.show.run_view import ObservedRun
from tasks.spec.errors import Fault
from tasks.spec.loading import list_required_ports
from tasks.spec.run import RunSpec
from tasks.spec.secrets import looks_secret
from tasks.train.plan import PlanInputs


class EventRecorder:
    """Records the emitted events."""

    def __init__(self) -> None:
        #: `(name, component, at, fields)` of each event.
        self.events: list[tuple[str, str | None, float, dict[str, Any]]] = []

    def emit(
        self, name: str, component: str | None = None, *, at: float = 0.0, **fields: Any
    ) -> None:
        self.events.append((name, component, at, fields))


def line(event: str, **fields: Any) -> str:
    return json.dumps({"at": 12.5, "event": event, **fields}) + "\n"


def test_each_complete_event_line_is_forwarded_once(tmp_path: Path) -> None:
    file = tmp_path / "rollout.jsonl"
    recorder = EventRecorder()
    content = line("a") + line("b")
    tail = FleetTail(file, recorder.emit)

    tail.forward_new_events()
    for end in (5, len(line("a")), len(content) - 1, len(content)):
        file.write_text(content[:end])
        tail.forward_new_events()
    tail.forward_new_events()

    assert [name for name, *_ in recorder.events] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "output of a library\n",
        "[1]\n",
        '{"event": "a"}\n',  # The time is missing.
        '{"at": "noon", "event": "a"}\n',
    ],
)
def test_line_that_is_no_event_is_skipped_with_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rollout.jsonl"
    recorder = EventRecorder()
    file.write_text(text + line("good"))

    FleetTail(file, recorder.emit).forward_new_events()

    assert [name for name, *_ in recorder.events] == ["good"]
    assert "printed an invalid event" in caplog.text


def test_event_fields_cannot_replace_component_and_name(tmp_path: Path) -> None:
    file = tmp_path / "rollout.jsonl"
    recorder = EventRecorder()
    file.write_text(line("a", component="api", name="other", rank=0))

    FleetTail(file, recorder.emit).forward_new_events()

    assert recorder.events == [("a", "rollout", 12.5, {"rank": 0})]


def test_close_forwards_the_last_events(tmp_path: Path) -> None:
    file = tmp_path / "rollout.jsonl"
    recorder = EventRecorder()
    tail = FleetTail(file, recorder.emit)
    tail.start()

    file.write_text(line("last"))
    tail.close()
    tail.close()

    assert [name for name, *_ in recorder.events] == ["last"]


def test_forwarded_event_keeps_its_original_time(tmp_path: Path) -> None:
    events: list[Event] = []
    log = EventLog(tmp_path / "events.jsonl", (events.append,), clock=lambda: 99.0)

    log.emit("rollout.sync.ended", "rollout", at=12.5, version=3)
    log.emit("run.progress")

    assert [event.at for event in events] == [12.5, 99.0]
    first = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
    assert first == {
        "at": 12.5,
        "event": "rollout.sync.ended",
        "component": "rollout",
        "version": 3,
    }


@pytest.mark.parametrize(
    ("states", "note"),
    [
        # The status of the run has no text about the fleet if no engine has reported yet, or if all
        # engines serve requests.
        ({}, ""),
        ({0: "active", 1: "suspect", 2: "active"}, ""),
        # Engine 2 has not reported yet, so this engine does not count as serving.
        ({0: "active", 1: "active"}, "2 of 3 inference engines serve requests"),
        ({0: "active", 1: "stale", 2: "recovering"}, "1 of 3 inference engines serve requests"),
        ({0: "retired", 1: "inactive", 2: "starting"}, "0 of 3 inference engines serve requests"),
    ],
)
def test_run_status_says_how_many_engines_serve(states: dict[int, str], note: str) -> None:
    fleet = ObservedRun(
        RunSpec.model_validate(
            {
                "name": "x",
                "workload": "grpo",
                "components": {
                    "trainer": {"command": ["true"]},
                    "rollout": {
                        "backend": "command",
                        "command": ["serve", "${server.port}"],
                        "engines": 3,
                    },
                },
            }
        )
    )

    for group, after in states.items():
        fields = {"group": group, "before": "starting", "after": after}
        fleet.observe(Event(at=0.0, name="rollout.group.state", fields=fields))

    assert fleet.running == f"running: trainer, rollout{note and f'; {note}'}"


FLEET = {
    "backend": "command",
    "engines": 2,
    "command": ["serve", "--port", "${server.port}"],
    "stop": {"signal": "SIGINT", "grace_s": 3},
    "start_within_s": 100,
}


def spec_of(**fleet: object) -> RunSpec:
    components: dict[str, Any] = {
        "api": {"command": ["api"]},
        "rollout": {**FLEET, **fleet},
        "trainer": {"command": ["train", "${rollout.url}"], "env": {"A": "of the trainer"}},
    }
    return RunSpec.model_validate(
        {
            "name": "a",
            "workload": "grpo",
            "env": {"RUN": "of the run"},
            "ray": {"address": "http://127.0.0.1:8265"},
            "components": components,
        }
    )


def of_fleet(fleet: dict[str, Any], **changes: Any) -> RunSpec:
    """Return the spec of a run with a fleet.

    Args:
        fleet: The component `rollout`.
        **changes: Other components by their name, or other keys of the run.
    """
    data = spec_of().written()
    components = {**data["components"], "rollout": fleet}
    components |= {name: changes.pop(name) for name in [*changes] if name in components}
    return RunSpec.model_validate({**data, **changes, "components": components})


PORTS = {"rollout.port": 15000, "rollout.ports.server.0": 15001, "rollout.ports.server.1": 15002}


@pytest.fixture
def place(tmp_path: Path) -> AttemptPlace:
    return AttemptPlace(directory=tmp_path, number=2)


def make_plans(
    spec: RunSpec, place: AttemptPlace, level: Level = Level.L2
) -> tuple[AttemptPlan, FleetPlan]:
    """Return two plans of an attempt: for its supervisor, and for the process of its fleet."""
    containment = Containment(level=level)
    fleet = prepare_fleet(spec, "a-run", place, containment, PORTS, place.directory / "live")
    plan_inputs = PlanInputs(
        spec=spec, run_id="a-run", place=place, containment=containment, fleet=fleet
    )
    plan = plan_inputs.plan()
    [process] = [component for component in plan.components if component.name == "rollout"]
    return plan, FleetPlan.of(process.command.env)


@pytest.mark.parametrize(
    ("initial", "resumes", "serves"),
    [
        (None, False, True),
        # The trainer resumes from a checkpoint, but the servers of the fleet load the original
        # model. So the servers must not serve requests.
        (None, True, False),
        ("stale", False, False),
        ("loaded", True, True),
    ],
)
def test_resumed_run_does_not_serve_the_weights_that_servers_load(
    place: AttemptPlace, initial: str | None, resumes: bool, serves: bool
) -> None:
    spec = spec_of(weights={"initial": initial} if initial else {})
    containment = Containment(level=Level.L2)
    register_at = place.directory / "live"
    plan = prepare_fleet(spec, "a-run", place, containment, PORTS, register_at, resumes=resumes)

    assert plan is not None
    assert plan.serves_as_loaded is serves
    assert FleetPlan.of(plan.env) == plan


def test_ports_are_reserved_for_the_gateway_and_each_local_server() -> None:
    assert list_required_ports(spec_of()) == ("rollout.port",)
    assert fleet_ports(spec_of()) == ("rollout.ports.server.0", "rollout.ports.server.1")


def test_no_local_ports_are_reserved_for_servers_on_ray() -> None:
    assert fleet_ports(spec_of(placement="ray")) == ()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:15000"),
        ("localhost", "http://127.0.0.1:15000"),
        # The gateway listens on every address of the machine, including loopback.
        ("0.0.0.0", "http://127.0.0.1:15000"),
        ("::", "http://127.0.0.1:15000"),
        # The gateway listens on one address only, so clients must use this address.
        ("10.0.0.7", "http://10.0.0.7:15000"),
        ("::1", "http://[::1]:15000"),
    ],
)
def test_gateway_url_follows_from_the_listening_address(host: str, url: str) -> None:
    assert fleet_names(spec_of(host=host), PORTS)["rollout.url"] == url


def test_engine_placeholder_lists_the_entrypoints_of_local_engines() -> None:
    ports = {**PORTS, "rollout.ports.engine.0": 15003, "rollout.ports.engine.1": 15004}
    experts = {"backend": "lmdeploy", "model": "m", "expert_parallel": 2, "engines": 1}

    of_two_engines = fleet_names(spec_of(), ports)
    of_one_with_two_servers = fleet_names(of_fleet(experts), ports)

    assert of_two_engines["rollout.engines"] == "127.0.0.1:15001,127.0.0.1:15002"
    assert of_one_with_two_servers["rollout.engines"] == of_two_engines["rollout.engines"]


def test_addresses_of_engines_on_ray_are_unknown_before_they_run() -> None:
    assert "rollout.engines" not in fleet_names(spec_of(placement="ray"), PORTS)


JOB = {"launcher": "ray_job", "command": ["train", "${rollout.url}"]}


def test_ray_job_gets_a_reachable_address_of_the_gateway() -> None:
    spec = of_fleet({**FLEET, "host": "0.0.0.0"}, trainer=JOB)
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        if faults_of(spec):
            pytest.skip("this machine has no address but loopback")

        url = urlsplit(fleet_names(spec, {**PORTS, "rollout.port": port})["rollout.url"])

        assert url.hostname is not None and not is_loopback(url.hostname)
        socket.create_connection((url.hostname, port), timeout=10).close()


@pytest.mark.parametrize(
    ("rollout", "trainer", "changes", "path", "problem", "remedy"),
    [
        # A Ray job cannot reach the gateway, which listens on loopback only.
        (
            {},
            JOB,
            {},
            "components.trainer.command.1",
            "trainer runs on the Ray cluster, and cannot reach the gateway of the inference "
            "servers, which listens only on 127.0.0.1",
            'components.rollout.host: "0.0.0.0"',
        ),
        (
            {"host": "localhost"},
            {**JOB, "command": ["train"], "env": {"URL": "at ${rollout.url}/v1"}},
            {},
            "components.trainer.env.URL",
            "listens only on localhost",
            "or an address of this machine",
        ),
        # Every component gets the variables of the section `env`, also the trainer on Ray.
        (
            {},
            {**JOB, "command": ["train"]},
            {"env": {"URL": "${rollout.url}"}},
            "env.URL",
            "trainer runs on the Ray cluster",
            "",
        ),
        # Servers on the nodes of a Ray cluster cannot reach the gateway, which listens on loopback
        # only.
        (
            {"placement": "ray", "args": ["${rollout.url}"]},
            {"command": ["train"]},
            {},
            "components.rollout.args.0",
            "rollout runs on the Ray cluster",
            "",
        ),
        # The command of the trainer contains the addresses of the engines. But Muster does not know
        # these addresses when the trainer starts.
        (
            {"placement": "ray"},
            {"command": ["train", "${rollout.engines}"]},
            {},
            "components.trainer.command.1",
            "${rollout.engines}: Muster knows the addresses of engines on Ray only after the "
            "engines have started",
            "GET ${rollout.url}/muster/rollout",
        ),
        (
            {"host": "0.0.0.0"},
            {**JOB, "command": ["train", "${rollout.engines}"]},
            {},
            "components.trainer.command.1",
            "trainer runs on the Ray cluster, and cannot reach engines with `placement: local`, "
            "which listen only on this machine",
            "launcher: process",
        ),
    ],
)
def test_unreachable_address_is_a_fault_of_the_spec(
    rollout: dict[str, Any],
    trainer: dict[str, Any],
    changes: dict[str, Any],
    path: str,
    problem: str,
    remedy: str,
) -> None:
    [fault] = faults_of(of_fleet({**FLEET, **rollout}, trainer=trainer, **changes))

    assert fault.path == path
    assert problem in fault.problem
    assert remedy in fault.remedy


@pytest.mark.parametrize(
    ("rollout", "trainer"),
    [
        # The trainer runs on this machine, so the trainer can reach the gateway on loopback.
        ({}, {"command": ["train", "${rollout.url}", "${rollout.engines}"]}),
        ({"placement": "ray"}, {"command": ["train", "${rollout.url}"]}),
        # Muster sends the readiness probe of a Ray job from this machine, so the probe reaches the
        # gateway on 127.0.0.1.
        ({}, {**JOB, "command": ["train"], "ready": {"http": "${rollout.url}/muster/health"}}),
        # The gateway listens on an address that other machines can reach, so a Ray job may use the
        # gateway.
        ({"host": "10.0.0.7"}, JOB),
    ],
)
def test_reachable_address_is_no_fault(rollout: dict[str, Any], trainer: dict[str, Any]) -> None:
    assert faults_of(of_fleet({**FLEET, **rollout}, trainer=trainer)) == []


def test_machine_with_only_loopback_addresses_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_lookup(*_: object) -> Any:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", fail_lookup)

    [fault] = faults_of(of_fleet({**FLEET, "host": "0.0.0.0"}, trainer=JOB))

    assert fault.path == "components.trainer.command.1"
    assert "this machine has only loopback addresses" in fault.problem


def test_fleet_is_a_component_in_the_order_of_the_spec(place: AttemptPlace) -> None:
    plan, _ = make_plans(spec_of(), place)

    assert [component.name for component in plan.components] == ["api", "rollout", "trainer"]
    rollout = plan.components[1]
    assert rollout.command.argv[-2:] == ("-m", "tasks.rollout.process")
    assert rollout.command.log == place.log("rollout")
    assert rollout.on_exit_zero == "fail"
    # The process of the fleet waits for the guardian processes that end the servers. So the process
    # of the fleet needs a longer grace period than the servers.
    assert rollout.command.grace_s > 3


def test_fleet_is_probed_through_its_gateway(place: AttemptPlace) -> None:
    plan, _ = make_plans(spec_of(), place)

    ready, live = plan.components[1].ready, plan.components[1].live
    assert ready is not None and live is not None
    assert ready.http == live.http == "http://127.0.0.1:15000/muster/health"
    assert ready.json_ == {"ready": True}
    assert ready.limit_s is not None and ready.limit_s > 100


def test_fleet_plan_contains_ports_and_directories(place: AttemptPlace) -> None:
    _, fleet = make_plans(spec_of(cwd="deployments"), place)

    assert (fleet.run_id, fleet.attempt, fleet.port) == ("a-run", 2, 15000)
    assert fleet.ports == {"server.0": 15001, "server.1": 15002}
    assert fleet.cwd == Path("deployments")
    assert fleet.log_of(1) == place.directory / "rollout-r1.log"


def test_secret_variables_of_servers_are_in_no_file(place: AttemptPlace) -> None:
    spec = spec_of(env={"HF_TOKEN": "hf-secret"})

    plan, fleet = make_plans(spec, place)

    assert not [*place.directory.iterdir()]
    env = plan.components[1].command.env
    assert "HF_TOKEN" not in env, "it is a variable of the servers only"
    assert fleet.fleet.env == {"HF_TOKEN": "hf-secret"}
    assert env["RUN"] == "of the run"


def test_secret_arguments_of_servers_are_in_no_file(place: AttemptPlace) -> None:
    command = ["python", "serve.py", "--port", "${server.port}", "--api-key", "sk-12345"]

    plan, fleet = make_plans(spec_of(command=command, args=["--hf-token=hf-abc"]), place)

    assert not [*place.directory.iterdir()]
    assert fleet.fleet.command == (*command[:-1], "sk-12345")
    assert fleet.fleet.args == ("--hf-token=hf-abc",)
    assert fleet.mask("serve.py --api-key sk-12345 hf-abc") == "serve.py --api-key *** ***"
    assert not any("sk-12345" in word for word in plan.components[1].command.argv)


def test_named_secret_reaches_the_servers_and_no_file(place: AttemptPlace) -> None:
    reference = {"secret": "dsn"}
    spec = spec_of(env={"DSN": reference}).with_secrets({"dsn": "pg:${word}"})
    containment = Containment(level=Level.L2)
    register_at = place.directory / "live"
    secrets = frozenset({"pg:${word}"})

    plan = prepare_fleet(spec, "a-run", place, containment, PORTS, register_at, secrets=secrets)

    assert plan is not None and not [*place.directory.iterdir()]
    plan_of_process = FleetPlan.of(plan.env)
    assert [slot.env["DSN"] for slot in topology(plan_of_process.fleet).servers] == [
        "pg:${word}"
    ] * 2
    assert plan_of_process.mask("DSN=pg:${word}") == "DSN=***"


def test_servers_on_ray_get_the_variables_of_the_run(place: AttemptPlace) -> None:
    _, fleet = make_plans(spec_of(placement="ray", env={"A": "of the fleet"}), place)

    assert fleet.ray == "http://127.0.0.1:8265"
    assert fleet.fleet.env == {"RUN": "of the run", "A": "of the fleet"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_gateway_on_loopback_requires_no_token(place: AttemptPlace, host: str) -> None:
    plan, _ = make_plans(spec_of(host=host), place)

    assert all(TOKEN_ENV not in component.command.env for component in plan.components)


@pytest.mark.parametrize("fleet", [{"host": "0.0.0.0"}, {"require_token": True}])
def test_only_the_trainer_gets_the_order_token_of_an_exposed_gateway(
    place: AttemptPlace, fleet: dict[str, Any]
) -> None:
    plan, of_process = make_plans(spec_of(**fleet), place)

    token_of = {
        component.name: component.command.env.get(TOKEN_ENV) for component in plan.components
    }
    assert token_of["rollout"] == token_of["api"] == of_process.token
    assert token_of["trainer"] == of_process.order_token != of_process.token
    assert min(map(len, of_process.tokens)) >= 32
    assert of_process.tokens == {of_process.token, of_process.order_token}
    assert of_process.mask(" ".join(of_process.tokens)) == "*** ***"
    assert not [*place.directory.iterdir()]
    assert looks_secret(TOKEN_ENV)


def test_every_component_gets_the_order_token_without_a_trainer(place: AttemptPlace) -> None:
    plan = FleetPlan.model_construct(token="for requests", order_token="for orders")

    assert plan.env_of("ppo", others=("rollout", "ppo")) == {TOKEN_ENV: "for orders"}


@pytest.mark.parametrize(
    ("level", "placement", "is_registered"),
    [
        (Level.L2, "local", True),
        (Level.L3, "local", True),
        # Level.L4 puts all servers into a PID namespace. The kernel ends these servers together,
        # and their pids have no meaning outside the namespace. So the servers are not registered.
        (Level.L4, "local", False),
        # The servers run on other machines, so this machine does not register the servers.
        (Level.L2, "ray", False),
    ],
)
def test_servers_have_their_own_entries_in_the_register(
    place: AttemptPlace, level: Level, placement: str, is_registered: bool
) -> None:
    _, fleet = make_plans(spec_of(placement=placement), place, level)

    assert fleet.register_at == (place.directory / "live" if is_registered else None)


def faults_of(spec: RunSpec) -> list[Fault]:
    assert spec.fleet is not None
    return fleet_faults(spec, spec.fleet)


def test_engine_larger_than_a_node_is_a_fault_of_the_spec() -> None:
    data = spec_of(gpus_per_node=4).written() | {"gang": {"gpus_per_node": 2}}

    [fault] = faults_of(RunSpec.model_validate(data))

    assert fault.path == "components.rollout"
    assert "needs 4 GPUs" in fault.problem


@pytest.mark.parametrize(
    ("placement", "nodes", "problem", "remedy"),
    [
        (
            "local",
            1,
            "the 3 engines need 12 GPUs, but the run has only 8 (`gang`)",
            "fewer engines",
        ),
        (
            "ray",
            1,
            "the 3 engines need 12 GPUs, but the run has only 8 (`gang`)",
            "more GPUs in `gang`",
        ),
        # Only two engines fit on one node, so the third engine would need a second machine.
        (
            "local",
            2,
            "with `placement: local`, all engines run on this machine, but gang.gpus_per_node is "
            "enough for only 2 of 3 engines",
            "write `engines: 2`, or `placement: ray`",
        ),
    ],
)
def test_fleet_larger_than_its_gang_is_a_fault_of_the_spec(
    placement: str, nodes: int, problem: str, remedy: str
) -> None:
    data = spec_of(engines=3, gpus_per_node=4, placement=placement).written()
    gang = {"nodes": nodes, "gpus_per_node": 8}

    [fault] = faults_of(RunSpec.model_validate(data | {"gang": gang}))

    assert (fault.path, fault.problem) == ("components.rollout.engines", problem)
    assert remedy in fault.remedy


@pytest.mark.parametrize(
    ("placement", "engines", "nodes"), [("ray", 3, 2), ("ray", 4, 2), ("local", 2, 1)]
)
def test_fleet_that_fits_its_gang_has_no_faults(placement: str, engines: int, nodes: int) -> None:
    data = spec_of(engines=engines, gpus_per_node=4, placement=placement).written()
    gang = {"nodes": nodes, "gpus_per_node": 8}

    assert faults_of(RunSpec.model_validate(data | {"gang": gang})) == []


LMDEPLOY_TP16 = {"backend": "lmdeploy", "tensor_parallel": 16, "nodes_per_engine": 2}
SGLANG_TP16 = {"backend": "sglang", "tensor_parallel": 16, "nodes_per_engine": 2}
ONE_MACHINE = "an engine runs only on this machine, but here an engine needs 2"


@pytest.mark.parametrize(
    ("fleet", "placement", "problem", "remedy"),
    [
        # A single server of LMDeploy would span several nodes, so the fleet is rejected.
        (LMDEPLOY_TP16, "ray", "request the GPUs of the other nodes from Ray", "expert_parallel"),
        (LMDEPLOY_TP16, "local", ONE_MACHINE, "write `nodes_per_engine: 1`"),
        # An engine on several nodes cannot run on a single machine, so the fleet is rejected.
        (SGLANG_TP16, "local", ONE_MACHINE, "write `nodes_per_engine: 1`, or placement: ray"),
        (
            {**FLEET, "nodes_per_engine": 2},
            "local",
            ONE_MACHINE,
            "write `nodes_per_engine: 1`, or placement: ray",
        ),
    ],
)
def test_impossible_placement_of_engines_is_a_fault_of_the_spec(
    fleet: dict[str, Any], placement: str, problem: str, remedy: str
) -> None:
    model = {} if fleet["backend"] == "command" else {"model": "m"}

    [fault] = faults_of(of_fleet({**model, **fleet, "placement": placement}))

    assert fault.path == "components.rollout.nodes_per_engine"
    assert problem in fault.problem
    assert fault.remedy.startswith("write `nodes_per_engine: 1`") and remedy in fault.remedy


@pytest.mark.parametrize(
    "layout",
    [
        SGLANG_TP16,
        {"backend": "lmdeploy", "expert_parallel": 16, "nodes_per_engine": 2},
        {"backend": "vllm", "tensor_parallel": 16, "nodes_per_engine": 2},
    ],
)
def test_engine_may_span_nodes_on_ray(layout: dict[str, Any]) -> None:
    assert faults_of(of_fleet({"model": "m", **layout, "placement": "ray"})) == []


@pytest.mark.parametrize(
    ("kind", "of_process", "of_fleet", "devices"),
    [
        # No environment variable restricts the GPUs, so the fleet uses GPU 0, 1 and so on.
        ("nvidia", {}, {}, ()),
        # The environment variable contains the GPUs of the run. The fleet uses these GPUs in the
        # same order.
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "3, 5"}, {}, ("3", "5")),
        ("amd", {"HIP_VISIBLE_DEVICES": "3,5"}, {}, ("3", "5")),
        ("ascend", {"ASCEND_RT_VISIBLE_DEVICES": "3,5"}, {}, ("3", "5")),
        # ROCm reads CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is not set.
        ("amd", {"CUDA_VISIBLE_DEVICES": "3,5"}, {}, ("3", "5")),
        # HIP_VISIBLE_DEVICES is for AMD GPUs, and this machine has NVIDIA GPUs.
        ("nvidia", {"HIP_VISIBLE_DEVICES": "3,5"}, {}, ()),
        # The `env` of the fleet takes precedence over the environment of the process.
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "3,5"}, {"CUDA_VISIBLE_DEVICES": "1"}, ("1",)),
        ("amd", {"HIP_VISIBLE_DEVICES": "3,5"}, {"HIP_VISIBLE_DEVICES": "1"}, ("1",)),
    ],
)
def test_local_servers_use_only_the_gpus_of_the_run(
    kind: str, of_process: dict[str, str], of_fleet: dict[str, str], devices: tuple[str, ...]
) -> None:
    fleet = spec_of(env=of_fleet).fleet

    assert fleet is not None
    assert read_allowed_devices(fleet, of_process, kind) == devices
