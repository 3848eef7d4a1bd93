"""The stack as a user has it, with Muster from a wheel and a project of his own: `muster up`, runs,
a cancel, `muster down`.

One stack, on ports and in a MUSTER_HOME of its own, serves the tests in the order of this file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.stack.env import NODES_PAGE, QUEUE_PAGE
from deployments.stack.state import Stack, processes_of
from tasks.processes.ports import PortsReserved
from tasks.ray.control_store import convert_grpc_errors, open_channel, prepare_request
from tasks.ray.dashboard import Denied
from tasks.spec.loading import load_spec
from tests.support.ground import until
from tests.support.prefect_api import ask
from tests.support.stage import processes_with
from tests.support.wheel import each

ROOT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).parent / "prefect")
QUICKSTART = str(ROOT / "deployments/runs/quickstart.yaml")
#: A training of somebody's own, which takes steps until it is ended, or a few.
SCRIPT = """
import itertools, json, os, sys, time
steps = int(sys.argv[1])
print("python", sys.executable, "in", os.getcwd(), flush=True)
with open(os.environ["METRICS"], "a", buffering=1) as f:
    for step in range(1, steps + 1):
        print(json.dumps({"step": step, "reward": step / steps}), file=f)
        print("step", step, flush=True)
        time.sleep(0.02)
"""
SPEC = """
name: own
workload: sft
env: {METRICS: "${attempt.dir}/metrics.jsonl"}
components:
  trainer: {command: [python, train.py, "${progress.total}"]}
progress: {jsonl: "${attempt.dir}/metrics.jsonl", step: step, total: 20}
"""
#: Somebody else on this machine, given its dashboard, and places of files.
INTRUDER = """
import encodings.idna, json, os, sys, urllib.error, urllib.request
def refusal(does, *given):
    try:
        does(*given)
    except OSError as error:
        return getattr(error, "code", type(error).__name__)
os.setgroups(()); os.setgid(65534); os.setuid(65534)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
order = (sys.argv[1] + "/api/jobs/", b'{"entrypoint": "id"}', 30)
files = [refusal(os.listdir, sys.argv[2]), refusal(open, sys.argv[3])]
print(json.dumps([refusal(opener.open, *order), *files]))
"""
#: `up` starts Ray three times over.
COMMAND_WITHIN_S = 250.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A MUSTER_HOME and the stack of it."""

    directory: Path
    #: A project that has nothing to do with Muster's sources, but for names.
    project: Path
    #: The program, installed from a wheel.
    program: Path
    #: Of the Prefect server.
    port: int
    #: By `muster up`.
    said: str = ""

    @property
    def env(self) -> dict[str, str]:
        # Programs of the quickstart's dependencies are in the tests' own venv.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"MUSTER_HOME": str(self.directory), "PREFECT_API_URL": self.api_url, "PATH": path}
        # The tests' other clusters have no token.
        mine = {key: os.environ[key] for key in os.environ if not key.startswith("RAY_AUTH")}
        return {**mine, **own}

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def password(self) -> str:
        return (self.directory / "password").read_text().strip()

    @property
    def stack(self) -> Stack:
        return Stack.model_validate_json((self.directory / "stack" / "stack.json").read_bytes())

    def command(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.project,
            env={**self.env, **environ},
            capture_output=True,
            text=True,
            timeout=COMMAND_WITHIN_S,
        )

    def muster(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.command(str(self.program), *words)

    def prefect(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Prefect's own command, told what `muster up` says."""
        return self.command(PREFECT, *words, PREFECT_API_AUTH_STRING=self.password)

    def up(self, *nodes: str) -> subprocess.CompletedProcess[str]:
        # 8265 is left to a stack of the user's.
        return self.muster("up", "--ray-dashboard", "0", *nodes)

    def spec(self, steps: int) -> str:
        """That of the quickstart with another number of steps, as JSON."""
        values = (f"progress.total={steps}", f"success.step={steps}")
        return json.dumps(load_spec(Path(QUICKSTART), values).to_server_data())

    def api(self, method: str, path: str, content: Any = None) -> Any:
        """Ask the Prefect server."""
        return ask(method, self.api_url + path, content, password=self.password)

    def trigger(self, steps: int) -> str:
        """Start a run as a user does; the flow run's id."""
        spec = self.spec(steps)
        done = self.prefect("deployment", "run", "train/quickstart", "-p", f"spec={spec}")
        found = re.search(r"UUID: (\S+)", done.stdout)
        assert found is not None, done.stdout + done.stderr
        return found[1]

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        flow_run: dict[str, Any] = self.api("GET", f"/flow_runs/{flow_run_id}")
        return flow_run

    def wait_for(self, flow_run_id: str, message: str, *, state: str = "RUNNING") -> Any:
        """The flow run once its state says so; a run that has ended otherwise fails the test."""

        def found() -> dict[str, Any] | None:
            flow_run = self.flow_run(flow_run_id)
            now = flow_run["state"]
            if now["type"] == state and message in (now["message"] or ""):
                return flow_run
            assert now["type"] not in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}, now
            return None

        return until(found, f"{flow_run_id} is {state}: {message}")

    def record(self, flow_run: dict[str, Any]) -> dict[str, Any]:
        path = self.directory / "runs" / flow_run["name"] / "run.json"
        record: dict[str, Any] = json.loads(path.read_text())
        return record


def everything_of(stack: Stack) -> set[int]:
    """The processes below the stack's supervisor, and those whose environment names the stack: a
    process of Ray's that has renamed itself shows none."""
    below = psutil.Process(stack.supervisor.pid).children(recursive=True)
    return {process.pid for process in below} | set(processes_of(stack.stack_id))


def raylet_of(node: str, stack: Stack) -> psutil.Process:
    """The one whose death is the node's."""
    [found] = (
        process
        for process in map(psutil.Process, everything_of(stack))
        if process.name() == "raylet" and process.environ().get("MUSTER_COMPONENT") == node
    )
    return found


def ray_api(stack: Stack) -> httpx.Client:
    """Asks its dashboard, with its token."""
    token = Path(stack.ray_auth["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    sent = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=stack.ray_dashboard, headers=sent, trust_env=False)


def ray_nodes(stack: Stack) -> list[dict[str, Any]]:
    """All that Ray has known, as its dashboard lists them."""
    listed = ray_api(stack).get("/api/v0/nodes").raise_for_status()
    nodes: list[dict[str, Any]] = listed.json()["data"]["result"]["result"]
    return nodes


@pytest.fixture(scope="module")
def home(muster: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A stack that is up."""
    with closing(PortsReserved(["server"])) as ports:
        port = ports.numbers["server"]
    project = tmp_path_factory.mktemp("project")
    (project / "pyproject.toml").touch()
    (project / "train.py").write_text(SCRIPT)
    (project / "own.yaml").write_text(SPEC)
    for name in ("tasks.py", "flows.py", "deployments.py"):
        (project / name).write_text("raise SystemExit('this is not Muster')")
    directory = tmp_path_factory.mktemp("home")
    home = Home(directory=directory, project=project, program=muster, port=port)
    try:
        done = home.up("--gpus", "2x8")
        assert done.returncode == 0, done.stdout + done.stderr
        yield replace(home, said=done.stdout)
    finally:
        home.muster("down")


def test_up_says_what_runs_where(home: Home) -> None:
    done = home.muster("status")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  answers") == 6
    assert "ray-node-2      8 logical GPUs, 32 CPUs  answers" in done.stdout
    assert f"http://127.0.0.1:{home.port}" in done.stdout


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_up_and_the_pool_say_where_the_queue_and_the_nodes_are_seen(
    home: Home, again: bool
) -> None:
    pool = home.api("GET", "/work_pools/gang")
    said = home.muster("up").stdout if again else home.said

    for page in (QUEUE_PAGE, NODES_PAGE):
        assert f"http://127.0.0.1:{home.port}{page}\n" in said
        assert page in pool["description"]


def test_the_ui_is_served_and_talks_to_this_server(home: Home) -> None:
    url = f"http://127.0.0.1:{home.port}"

    page = httpx.get(url, trust_env=False, follow_redirects=True, headers={"accept": "text/html"})
    settings = ask("GET", f"{url}/ui-settings")

    assert page.is_success
    assert settings["api_url"] == home.api_url


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/flow_runs/filter"),
        ("GET", "/deployments/name/train/quickstart"),
        ("POST", "/flow_runs/"),
        ("PATCH", "/work_pools/gang"),
        ("GET", "/admin/settings"),
    ],
)
def test_nobody_without_the_password_is_let_in(home: Home, method: str, path: str) -> None:
    answer = httpx.request(method, home.api_url + path, json={}, trust_env=False)

    assert answer.status_code == HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("path", ["/api/jobs/", "/api/v0/nodes", "/nodes?view=summary"])
def test_nobody_without_the_token_is_let_in_by_ray(home: Home, path: str) -> None:
    stack = home.stack
    gcs = open_channel(stack.ray_address, has_token=False)

    answer = httpx.request("GET", f"{stack.ray_dashboard}{path}", trust_env=False)
    with (
        closing(gcs),
        pytest.raises(Denied, match="UNAUTHENTICATED"),
        convert_grpc_errors(stack.ray_address),
    ):
        prepare_request(gcs, "JobInfo", "GetAllJobInfo")(10.0).result()

    assert answer.status_code == HTTPStatus.UNAUTHORIZED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_has_no_part_in_the_cluster(home: Home) -> None:
    stack = home.stack
    words = (sys.executable, "-c", INTRUDER, stack.ray_dashboard, str(stack.ray_temp))

    done = home.command(*words, str(home.directory / "ray-token"))

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [401, "PermissionError", "PermissionError"]


@pytest.mark.thorough
def test_ray_s_own_commands_know_the_cluster_by_what_up_says(home: Home) -> None:
    [told] = re.findall(r"export (RAY_ADDRESS=.+)", home.said)
    ray = str(Path(sys.executable).parent / "ray")
    variables = dict(word.split("=", 1) for word in shlex.split(told))

    let_in = home.command(ray, "job", "list", **variables)
    kept_out = home.command(ray, "job", "list", **{**variables, "RAY_AUTH_TOKEN": "f" * 64})

    assert let_in.returncode == 0, let_in.stderr
    assert kept_out.returncode != 0


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:{port}", "http://127.0.0.1:{port}"),
        ("http://localhost:{port}", "http://localhost:{port}"),
        # a page that somebody has open beside the UI; another program of this machine
        ("https://example.org", None),
        ("http://127.0.0.1:1", None),
    ],
)
def test_of_all_pages_only_the_ui_may_submit(home: Home, origin: str, allowed: str | None) -> None:
    """A browser asks this before it sends JSON, or a password, from a page to another server."""
    headers = {
        "Origin": origin.format(port=home.port),
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }

    answer = httpx.options(f"{home.api_url}/flow_runs/", headers=headers, trust_env=False)

    found = answer.headers.get("access-control-allow-origin")
    assert found == (allowed and allowed.format(port=home.port))
    assert answer.is_success is (allowed is not None)


def test_the_files_of_a_stack_are_its_users_alone(home: Home) -> None:
    found = (home.directory, *home.directory.rglob("*"))
    # Prefect copies its public pages with their modes. The folder around them is closed.
    places = home.directory.glob("cache/prefect-ui-*/*")
    pages = {path for folder in places for path in folder.rglob("*")}

    assert [str(path) for path in found if path.stat().st_mode & 0o077 and path not in pages] == []
    assert len(found) > 10


def test_all_of_it_listens_on_loopback_only(home: Home) -> None:
    ours = everything_of(home.stack)

    addresses = {
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.pid in ours and connection.status == psutil.CONN_LISTEN
    }

    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


#: What each listening process of a stack is, by its command line or its name, as the table "What
#: else listens" of docs/security.md calls it.
LISTENERS = {
    r"tasks\.server\.sqlite_server": "the Prefect server of `muster up`",
    r"gcs_server": "control store",
    r"ray\.util\.client\.server": "client server",
    r"raylet": "nodes",
    r"ray::DashboardAgent|ray::RuntimeEnvAgent|dashboard.agent|runtime_env.agent": "agents",
    r"ray::NodeAgent": "agents of Ray's nodes",
    r"ray::": "workers",
    r"dashboard\.py": "Ray's dashboard",
    r"autoscaler.*monitor\.py": "44217 (autoscaler)",
    r"deployments\.prefect_worker|deployments\.upkeep": "Prefect's control channels",
}


def test_every_listener_of_a_stack_is_documented(home: Home) -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    documented = text.partition("## What else listens")[2].partition("\n## ")[0]
    ours = everything_of(home.stack)

    listening = {
        " ".join(psutil.Process(connection.pid).cmdline())
        for connection in psutil.net_connections("inet")
        if connection.pid in ours and connection.status == psutil.CONN_LISTEN
    }

    kinds = {
        command: next((kind for at, kind in LISTENERS.items() if re.search(at, command)), "")
        for command in listening
    }
    assert [command for command, kind in kinds.items() if not kind] == []
    assert [kind for kind in kinds.values() if kind not in documented] == []


def test_metrics_of_ray_are_readable_by_everybody(home: Home) -> None:
    ours = everything_of(home.stack)
    ports = {
        connection.laddr.port
        for connection in psutil.net_connections("inet")
        if connection.pid in ours and connection.status == psutil.CONN_LISTEN
    }

    opened = {port for port in ports if metrics_are_read(port)}

    # The autoscaler's and the dashboard's; each of the three nodes has one more.
    assert len(opened - {44217, 44227}) <= 3
    assert opened


def metrics_are_read(port: int) -> bool:
    with suppress(httpx.HTTPError):
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=5)
        return answer.status_code == 200 and "# TYPE ray_" in answer.text
    return False


def test_the_nodes_have_the_gpus_and_the_head_has_nothing(home: Home) -> None:
    nodes = ray_nodes(home.stack)

    assert [node["state"] for node in nodes] == ["ALIVE"] * 3
    head = next(node["resources_total"] for node in nodes if node["is_head_node"])
    assert not {"GPU", "CPU", "worker_node"} & set(head)
    for node in (node["resources_total"] for node in nodes if not node["is_head_node"]):
        assert (node["GPU"], node["CPU"], node["worker_node"]) == (8, 32, 100)


def test_a_ray_job_runs_on_a_node_and_its_log_can_be_had(home: Home) -> None:
    script = "import ray; ray.init(); print('GPUs', ray.cluster_resources()['GPU'])"
    jobs, ray = "/api/jobs/", ray_api(home.stack)
    order = {"entrypoint": f'python -c "{script}"', "entrypoint_resources": {"worker_node": 1}}

    job = ray.post(jobs, json=order).raise_for_status().json()["submission_id"]

    def ended() -> Any:
        answer = ray.get(jobs + job).raise_for_status().json()
        return answer if answer["status"] in {"SUCCEEDED", "FAILED", "STOPPED"} else None

    found = until(ended, "the job has ended")
    assert found["status"] == "SUCCEEDED", found
    log = ray.get(f"{jobs}{job}/logs").raise_for_status().json()["logs"]
    assert "GPUs 16.0" in log


@pytest.mark.thorough
def test_a_node_that_dies_is_replaced_and_the_stack_goes_on(home: Home) -> None:
    stack = home.stack

    raylet_of("ray-node-1", stack).kill()

    def replaced() -> bool:
        states = sorted(node["state"] for node in ray_nodes(stack))
        return states == ["ALIVE", "ALIVE", "ALIVE", "DEAD"]

    until(replaced, "the node is replaced")
    until(lambda: home.muster("status").returncode == 0, "the stack answers")
    node = home.stack.part("ray-node-1")
    assert node is not None
    assert node.deaths == 1
    assert node.reason


@pytest.mark.thorough
def test_a_second_up_applies_the_deployments_and_leaves_the_pool_s_limit(home: Home) -> None:
    before = home.stack
    home.api("PATCH", "/work_pools/gang", {"concurrency_limit": 3})

    done = home.up()

    assert done.returncode == 0, done.stdout + done.stderr
    assert "up already" in done.stdout
    assert home.stack == before
    assert home.api("GET", "/work_pools/gang")["concurrency_limit"] == 3


@pytest.mark.thorough
def test_a_run_through_the_queue_completes(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=5), "", state="COMPLETED")

    assert re.fullmatch(r"quickstart-grpo-\d{8}-\d{6}-[0-9a-f]{8}", flow_run["name"])
    record = home.record(flow_run)
    assert record["state"] == "completed"
    assert record["flow_run_id"] == flow_run["id"]
    until(lambda: not processes_with("MUSTER_RUN_ID", flow_run["name"]), "nothing is left")


def test_a_run_of_ones_own_is_submitted_followed_and_shown(home: Home) -> None:
    python = home.project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    done = home.muster("submit", "own.yaml", "--watch")

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"python {python}" in done.stderr
    words = [
        *(("ls", "--json"), ("logs", "latest", "trainer"), ("show",), ("show", "latest", "--json")),
        *(("why", "own-sft"), ("cancel", "latest")),
    ]
    found = each(home.program, words, cwd=home.project, env=home.env)
    said = {line: out for line, (_, out, _) in zip(words, found, strict=True)}
    [run, *others] = json.loads(said["ls", "--json"])
    assert run["run_id"].startswith("own-sft-")
    assert (run["state"], run["attempts"]) == ("completed", 1)
    assert [one["created_at"] for one in others] == sorted(
        (one["created_at"] for one in others), reverse=True
    )
    logs = said["logs", "latest", "trainer"].splitlines()
    place = home.directory / "runs" / run["run_id"] / "code"
    assert logs == [f"python {python} in {place}", *(f"step {n}" for n in range(1, 21))]
    assert said["show",].startswith("### Completed")
    assert json.loads(said["show", "latest", "--json"])["run_id"] == run["run_id"]
    assert "Completed" in said["why", "own-sft"]
    assert found[-1][0] == 2


def test_a_training_outlives_the_server_and_the_worker(home: Home) -> None:
    done = home.muster("submit", "own.yaml", "--set", "progress.total=100000")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = done.stdout.split()[0]
    place = home.directory / "runs" / run_id
    metrics = place / "attempt-01" / "metrics.jsonl"
    until(metrics.exists, "the training takes steps")
    before = json.loads((place / "run.json").read_text())
    trainer = before["attempts"][0]["components"]["trainer"]["pid"]

    for name in ("prefect-server", "worker"):
        part = home.stack.part(name)
        assert part is not None
        assert part.pid is not None
        os.kill(part.pid, signal.SIGKILL)

    def are_back() -> bool:
        parts = [home.stack.part(name) for name in ("prefect-server", "worker")]
        return all(part and part.deaths == 1 and part.state == "ready" for part in parts)

    until(are_back, "both are there again")
    steps = len(metrics.read_text().splitlines())
    until(lambda: len(metrics.read_text().splitlines()) > steps, "it takes further steps")
    assert psutil.pid_exists(trainer)
    home.wait_for(before["flow_run_id"], "")
    assert home.muster("status").stdout.count("died 1 time") == 2
    assert home.muster("cancel", run_id).returncode == 0
    home.wait_for(before["flow_run_id"], "", state="CANCELLED")
    until(lambda: not processes_with("MUSTER_RUN_ID", run_id), "nothing is left")
    assert len(json.loads((place / "run.json").read_text())["attempts"]) == 1


def test_a_deployment_of_ones_own_is_started_and_cancelled(home: Home) -> None:
    made = home.muster(
        "deploy", "own.yaml", "--set", "progress.total=100000", "--cron", "0 3 * * *"
    )

    assert made.returncode == 0, made.stdout + made.stderr
    assert home.prefect("deployment", "run", "train/own").returncode == 0
    flow_run = until(
        lambda: next(
            (
                one
                for one in json.loads(home.muster("ls", "--json", "--state", "running").stdout)
                if one["run_id"].startswith("own-")
            ),
            None,
        ),
        "it runs",
    )
    assert home.muster("cancel", flow_run["run_id"]).returncode == 0
    home.wait_for(flow_run["flow_run_id"], "", state="CANCELLED")
    until(lambda: not processes_with("MUSTER_RUN_ID", flow_run["run_id"]), "nothing is left")


def test_an_operator_asks_and_changes_the_queue(home: Home) -> None:
    said = {
        (): "Waits: none",
        ("queue",): "No run waits.",
        ("queue", "drain", "ray-node-2"): "ray-node-2 gets no new gang.",
        ("queue", "undrain", "ray-node-2"): "ray-node-2 may get new gangs.",
        ("queue", "set", "limit.demo=8"): 'limits":{"demo":8}',
        ("queue", "unset", "limit.demo"): "The work pool gang has {",
        ("reconcile",): "nothing to do",
        ("prune",): "",
    }

    found = each(home.program, said, cwd=home.project, env=home.env)

    for words, (code, out, err) in zip(said, found, strict=True):
        assert (code, said[words] in out) == (0, True), (words, code, out, err)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        # a part is no spec: what is given replaces the whole
        ('{"progress": {"total": 5}}', "'name' is a required property"),
        ('{"name": "x", "workload": "grpoo", "components": {}}', "'grpoo' is not one of"),
    ],
)
def test_a_bad_spec_is_refused_before_it_is_queued(home: Home, spec: str, complaint: str) -> None:
    done = home.prefect("deployment", "run", "train/quickstart", "-p", f"spec={spec}")

    assert done.returncode == 1
    assert complaint in " ".join((done.stdout + done.stderr).split())


@pytest.mark.thorough
def test_a_schedule_starts_a_run_with_the_values_it_names(home: Home) -> None:
    spec = home.spec(steps=5)
    deployment = home.api("GET", "/deployments/name/train/quickstart")
    schedules = f"/deployments/{deployment['id']}/schedules"
    schedule = {
        # The server looks for new schedules each few seconds, and at what lies ahead only.
        "schedule": {"interval": 20},
        "active": True,
        "parameters": {"spec": json.loads(spec)},
    }
    [made] = home.api("POST", schedules, [schedule])

    def started() -> Any:
        ended = {
            "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}},
            "deployments": {"id": {"any_": [deployment["id"]]}},
        }
        runs = home.api("POST", "/flow_runs/filter", ended)
        return [run for run in runs if run["auto_scheduled"]]

    [flow_run] = until(started, "the schedule has started a run")
    home.api("DELETE", f"{schedules}/{made['id']}")

    assert flow_run["state"]["message"] == "step 5 of 5"


@pytest.mark.thorough
def test_a_cancel_leaves_nothing_of_the_run(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=100_000), "running: api, trainer, environment")
    assert len(processes_with("MUSTER_RUN_ID", flow_run["name"])) >= 3

    home.prefect("flow-run", "cancel", flow_run["id"])

    home.wait_for(flow_run["id"], "", state="CANCELLED")
    until(lambda: not processes_with("MUSTER_RUN_ID", flow_run["name"]), "nothing is left")
    assert home.record(flow_run)["state"] == "cancelled"


@pytest.mark.thorough
def test_a_killed_supervisor_leaves_nothing_and_no_run_stays_running(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=100_000), "running: api, trainer, environment")
    stack = home.stack

    os.kill(stack.supervisor.pid, signal.SIGKILL)
    done = home.muster("down")

    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_of(stack.stack_id) == []
    assert processes_with("MUSTER_RUN_ID", flow_run["name"]) == []
    # The next stack finds the run without a process, and the place it held is free again.
    assert home.up().returncode == 0
    assert home.flow_run(flow_run["id"])["state"]["type"] in {"CRASHED", "CANCELLED"}


def test_down_ends_a_run_under_way_and_leaves_nothing(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=100_000), "running: api, trainer, environment")
    stack = home.stack

    done = home.muster("down")

    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_of(stack.stack_id) == []
    assert processes_with("MUSTER_RUN_ID", flow_run["name"]) == []
    assert home.record(flow_run)["state"] == "cancelled"
    assert not stack.ray_temp.exists()
    assert not (home.directory / "stack" / "stack.json").exists()
