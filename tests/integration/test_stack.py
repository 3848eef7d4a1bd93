"""A stack as a user runs it: Muster from a wheel, in the user's project.

The tests call `muster up`, start and cancel runs, and call `muster down`. They share one stack,
with its own ports and MUSTER_HOME, and depend on their order in this file.
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
from tasks.processes.identity import user_name
from tasks.processes.ports import PortsReserved
from tasks.ray.control_store import convert_grpc_errors, open_channel, prepare_request
from tasks.ray.dashboard import Denied
from tasks.spec.loading import load_spec
from tests.support.host_environment import wait_for
from tests.support.prefect_api import send_request
from tests.support.supervised_components import processes_with
from tests.support.wheel import run_each

ROOT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).parent / "prefect")
QUICKSTART = str(ROOT / "deployments/runs/quickstart.yaml")
#: A user's training program. Its argument is the number of steps.
SCRIPT = """
import itertools, json, os, sys, time
steps = int(sys.argv[1])
print("python", sys.executable, "in", os.getcwd(), flush=True)
with open(os.environ["METRICS"], "a", buffering=1) as metrics:
    for step in range(1, steps + 1):
        print(json.dumps({"step": step, "reward": step / steps}), file=metrics)
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
#: A program that runs as another user. The program tries to use the Ray dashboard of a stack, to
#: list a folder of the stack, and to read a file of the stack.
#:
#: The program prints a JSON list with the HTTP status or the exception of each try.
INTRUDER = """
import encodings.idna, json, os, sys, urllib.error, urllib.request
def find_refusal(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return getattr(error, "code", type(error).__name__)
os.setgroups(())
os.setgid(65534)
os.setuid(65534)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
order = (sys.argv[1] + "/api/jobs/", b'{"entrypoint": "id"}', 30)
files = [find_refusal(os.listdir, sys.argv[2]), find_refusal(open, sys.argv[3])]
print(json.dumps([find_refusal(opener.open, *order), *files]))
"""
#: Time limit of a command. `muster up` takes long, because it starts three Ray nodes.
COMMAND_WITHIN_S = 250.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A MUSTER_HOME, and the stack that belongs to it."""

    directory: Path
    #: A user's project. Some of its files have the names of Muster's packages.
    project: Path
    #: Path of the program `muster`, which was installed from a wheel.
    program: Path
    #: Port of the Prefect server.
    port: int
    #: Output of the first `muster up`, or an empty string if the command has not run yet.
    up_output: str = ""

    @property
    def env(self) -> dict[str, str]:
        # Programs that the quickstart needs are in the virtual environment of the tests.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        overrides = {
            "MUSTER_HOME": str(self.directory),
            "PREFECT_API_URL": self.api_url,
            "PATH": path,
        }
        # The tests configure Ray for clusters without a token. Remove this configuration, because
        # the stack uses a token.
        environment = {key: os.environ[key] for key in os.environ if not key.startswith("RAY_AUTH")}
        return {**environment, **overrides}

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def password(self) -> str:
        return (self.directory / "password").read_text().strip()

    @property
    def stack(self) -> Stack:
        return Stack.model_validate_json((self.directory / "stack" / "stack.json").read_bytes())

    def command(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the project, and return its exit code and output."""
        return subprocess.run(
            arguments,
            cwd=self.project,
            env={**self.env, **environ},
            capture_output=True,
            text=True,
            timeout=COMMAND_WITHIN_S,
        )

    def muster(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `muster` with the arguments."""
        return self.command(str(self.program), *arguments)

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command `prefect` with the password of the stack's Prefect server."""
        return self.command(PREFECT, *arguments, PREFECT_API_AUTH_STRING=self.password)

    def up(self, *nodes: str) -> subprocess.CompletedProcess[str]:
        """Run `muster up` with the given options for Ray nodes."""
        # Port 0 chooses any free port; the default port 8265 may belong to another stack.
        return self.muster("up", "--ray-dashboard", "0", *nodes)

    def spec(self, steps: int) -> str:
        """Return the spec of the quickstart with another number of steps, as JSON."""
        values = (f"progress.total={steps}", f"success.step={steps}")
        return json.dumps(load_spec(Path(QUICKSTART), values).to_server_data())

    def api(self, method: str, path: str, content: Any = None) -> Any:
        """Send a request to the Prefect server, and return the JSON of its response."""
        return send_request(method, self.api_url + path, content, password=self.password)

    def trigger(self, steps: int) -> str:
        """Start a run of the quickstart as a user does, and return the id of the flow run."""
        spec = self.spec(steps)
        result = self.prefect("deployment", "run", "train/quickstart", "-p", f"spec={spec}")
        match = re.search(r"UUID: (\S+)", result.stdout)
        assert match is not None, result.stdout + result.stderr
        return match[1]

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        flow_run: dict[str, Any] = self.api("GET", f"/flow_runs/{flow_run_id}")
        return flow_run

    def wait_for(self, flow_run_id: str, message: str, *, state: str = "RUNNING") -> Any:
        """Wait until a flow run has a state whose message contains a text; return the flow run.

        The wait fails if the flow run ends with another state or message.

        Args:
            flow_run_id: Id of the flow run.
            message: Text that the message of the state must contain.
            state: Type of the state.
        """

        def find_flow_run() -> dict[str, Any] | None:
            flow_run = self.flow_run(flow_run_id)
            current_state = flow_run["state"]
            if current_state["type"] == state and message in (current_state["message"] or ""):
                return flow_run
            assert current_state["type"] not in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}, (
                current_state
            )
            return None

        return wait_for(find_flow_run, f"{flow_run_id} is {state}: {message}")

    def record(self, flow_run: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the record file `run.json` of a flow run."""
        path = self.directory / "runs" / flow_run["name"] / "run.json"
        record: dict[str, Any] = json.loads(path.read_text())
        return record


def find_processes(stack: Stack) -> set[int]:
    """Return the pids of all processes of the stack.

    These are all descendants of the stack's supervisor, and all processes whose environment
    contains the id of the stack. Some Ray processes overwrite their environment when they change
    their name, so only the search for descendants finds these processes.
    """
    descendants = psutil.Process(stack.supervisor.pid).children(recursive=True)
    return {process.pid for process in descendants} | set(processes_of(stack.stack_id))


def find_raylet(node: str, stack: Stack) -> psutil.Process:
    """Return the raylet of a node.

    The raylet is the daemon of Ray on a node. Ray counts a node without a raylet as dead.
    """
    [raylet] = (
        process
        for process in map(psutil.Process, find_processes(stack))
        if process.name() == "raylet" and process.environ().get("MUSTER_COMPONENT") == node
    )
    return raylet


def open_ray_client(stack: Stack) -> httpx.Client:
    """Return an HTTP client of the Ray dashboard that sends the token of the stack."""
    token = Path(stack.ray_auth["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=stack.ray_dashboard, headers=headers, trust_env=False)


def list_ray_nodes(stack: Stack) -> list[dict[str, Any]]:
    """Return all nodes, including dead nodes, that the Ray dashboard lists."""
    response = open_ray_client(stack).get("/api/v0/nodes").raise_for_status()
    nodes: list[dict[str, Any]] = response.json()["data"]["result"]["result"]
    return nodes


@pytest.fixture(scope="module")
def home(muster: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Yield a `Home`: a MUSTER_HOME whose stack is running and has two Ray nodes."""
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
        up_result = home.up("--gpus", "2x8")
        assert up_result.returncode == 0, up_result.stdout + up_result.stderr
        yield replace(home, up_output=up_result.stdout)
    finally:
        home.muster("down")


def test_status_lists_the_parts_of_the_stack_and_their_addresses(home: Home) -> None:
    result = home.muster("status")

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("  answers") == 7
    assert "ray-node-2      8 logical GPUs, 32 CPUs  answers" in result.stdout
    assert f"http://127.0.0.1:{home.port}" in result.stdout


@pytest.mark.parametrize("repeats_up", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_up_and_the_description_of_the_pool_name_the_pages_of_the_queue(
    home: Home, repeats_up: bool
) -> None:
    pool = home.api("GET", "/work_pools/gang")
    output = home.muster("up").stdout if repeats_up else home.up_output

    for page in (QUEUE_PAGE, NODES_PAGE):
        assert f"http://127.0.0.1:{home.port}{page}\n" in output
        assert page in pool["description"]


def test_ui_is_served_and_uses_the_server_of_the_stack(home: Home) -> None:
    url = f"http://127.0.0.1:{home.port}"

    page = httpx.get(url, trust_env=False, follow_redirects=True, headers={"accept": "text/html"})
    settings = send_request("GET", f"{url}/ui-settings")

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
def test_requests_without_the_password_are_refused(home: Home, method: str, path: str) -> None:
    answer = httpx.request(method, home.api_url + path, json={}, trust_env=False)

    assert answer.status_code == HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("path", ["/api/jobs/", "/api/v0/nodes", "/nodes?view=summary"])
def test_requests_to_ray_without_the_token_are_refused(home: Home, path: str) -> None:
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
def test_another_user_cannot_use_the_ray_cluster(home: Home) -> None:
    stack = home.stack
    arguments = (sys.executable, "-c", INTRUDER, stack.ray_dashboard, str(stack.ray_temp))

    result = home.command(*arguments, str(home.directory / "ray-token"))

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [401, "PermissionError", "PermissionError"]


@pytest.mark.thorough
def test_ray_commands_work_with_the_address_and_token_that_up_prints(home: Home) -> None:
    [export_arguments] = re.findall(r"export (RAY_ADDRESS=.+)", home.up_output)
    ray = str(Path(sys.executable).parent / "ray")
    variables = dict(word.split("=", 1) for word in shlex.split(export_arguments))

    with_token = home.command(ray, "job", "list", **variables)
    with_wrong_token = home.command(ray, "job", "list", **{**variables, "RAY_AUTH_TOKEN": "f" * 64})

    assert with_token.returncode == 0, with_token.stderr
    assert with_wrong_token.returncode != 0


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:{port}", "http://127.0.0.1:{port}"),
        ("http://localhost:{port}", "http://localhost:{port}"),
        # Origins other than the UI are not allowed: a foreign web page, and another program on this
        # machine.
        ("https://example.org", None),
        ("http://127.0.0.1:1", None),
    ],
)
def test_only_pages_of_the_ui_may_submit(home: Home, origin: str, allowed: str | None) -> None:
    """The test sends a preflight request.

    A browser sends a preflight request before a page may send JSON to another server.
    """
    headers = {
        "Origin": origin.format(port=home.port),
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }

    answer = httpx.options(f"{home.api_url}/flow_runs/", headers=headers, trust_env=False)

    allowed_origin = answer.headers.get("access-control-allow-origin")
    assert allowed_origin == (allowed and allowed.format(port=home.port))
    assert answer.is_success is (allowed is not None)


def test_only_the_user_of_the_stack_can_read_its_files(home: Home) -> None:
    paths = (home.directory, *home.directory.rglob("*"))
    # Ignore the files of Prefect's web pages. Prefect copies the original modes of these files, but
    # other users cannot enter the folder that contains the files.
    page_folders = home.directory.glob("cache/prefect-ui-*/*")
    pages = {path for folder in page_folders for path in folder.rglob("*")}

    assert [str(path) for path in paths if path.stat().st_mode & 0o077 and path not in pages] == []
    assert len(paths) > 10


def test_all_processes_of_the_stack_listen_on_loopback_only(home: Home) -> None:
    pids_of_stack = find_processes(home.stack)

    addresses = {
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.pid in pids_of_stack and connection.status == psutil.CONN_LISTEN
    }

    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


#: Mapping from a regular expression to a kind of listening process. The expression matches the
#: command line or the name of the process.
#:
#: The kinds are the rows of the table "What else listens" in docs/security.md.
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


def test_every_listening_process_of_a_stack_is_documented(home: Home) -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    documented = text.partition("## What else listens")[2].partition("\n## ")[0]
    pids_of_stack = find_processes(home.stack)

    listening = {
        " ".join(psutil.Process(connection.pid).cmdline())
        for connection in psutil.net_connections("inet")
        if connection.pid in pids_of_stack and connection.status == psutil.CONN_LISTEN
    }

    kinds = {
        command: next(
            (kind for pattern, kind in LISTENERS.items() if re.search(pattern, command)), ""
        )
        for command in listening
    }
    assert [command for command, kind in kinds.items() if not kind] == []
    assert [kind for kind in kinds.values() if kind not in documented] == []


def test_metrics_of_ray_are_readable_without_a_token(home: Home) -> None:
    pids_of_stack = find_processes(home.stack)
    ports = {
        connection.laddr.port
        for connection in psutil.net_connections("inet")
        if connection.pid in pids_of_stack and connection.status == psutil.CONN_LISTEN
    }

    readable_ports = {port for port in ports if has_readable_metrics(port)}

    # Besides the ports of the autoscaler and the dashboard, each of the three nodes may have one
    # port that answers with metrics.
    assert len(readable_ports - {44217, 44227}) <= 3
    assert readable_ports


def has_readable_metrics(port: int) -> bool:
    """Return True if anyone can read Ray's metrics at this port without a token."""
    with suppress(httpx.HTTPError):
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=5)
        return answer.status_code == 200 and "# TYPE ray_" in answer.text
    return False


def test_only_the_worker_nodes_have_gpus_and_cpus(home: Home) -> None:
    nodes = list_ray_nodes(home.stack)

    assert [node["state"] for node in nodes] == ["ALIVE"] * 3
    head = next(node["resources_total"] for node in nodes if node["is_head_node"])
    assert not {"GPU", "CPU", "worker_node"} & set(head)
    for node in (node["resources_total"] for node in nodes if not node["is_head_node"]):
        assert (node["GPU"], node["CPU"], node["worker_node"]) == (8, 32, 100)


def test_ray_job_runs_on_a_node_and_its_log_is_available(home: Home) -> None:
    script = "import ray; ray.init(); print('GPUs', ray.cluster_resources()['GPU'])"
    jobs = "/api/jobs/"
    ray = open_ray_client(home.stack)
    job_request = {
        "entrypoint": f'python -c "{script}"',
        "entrypoint_resources": {"worker_node": 1},
    }

    job = ray.post(jobs, json=job_request).raise_for_status().json()["submission_id"]

    def find_ended_job() -> Any:
        answer = ray.get(jobs + job).raise_for_status().json()
        return answer if answer["status"] in {"SUCCEEDED", "FAILED", "STOPPED"} else None

    ended_job = wait_for(find_ended_job, "the job has ended")
    assert ended_job["status"] == "SUCCEEDED", ended_job
    log = ray.get(f"{jobs}{job}/logs").raise_for_status().json()["logs"]
    assert "GPUs 16.0" in log


@pytest.mark.thorough
def test_dead_node_is_replaced_and_the_stack_continues(home: Home) -> None:
    stack = home.stack

    find_raylet("ray-node-1", stack).kill()

    def is_replaced() -> bool:
        states = sorted(node["state"] for node in list_ray_nodes(stack))
        return states == ["ALIVE", "ALIVE", "ALIVE", "DEAD"]

    wait_for(is_replaced, "the node is replaced")
    wait_for(lambda: home.muster("status").returncode == 0, "all parts of the stack answer")
    node = home.stack.part("ray-node-1")
    assert node is not None
    assert node.deaths == 1
    assert node.reason


@pytest.mark.thorough
def test_second_up_changes_neither_the_stack_nor_the_limit_of_the_pool(home: Home) -> None:
    stack_before = home.stack
    home.api("PATCH", "/work_pools/gang", {"concurrency_limit": 3})

    result = home.up()

    assert result.returncode == 0, result.stdout + result.stderr
    assert "already up" in result.stdout
    assert home.stack == stack_before
    assert home.api("GET", "/work_pools/gang")["concurrency_limit"] == 3


@pytest.mark.thorough
def test_run_through_the_queue_completes(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=5), "", state="COMPLETED")

    assert re.fullmatch(r"quickstart-grpo-\d{8}-\d{6}-[0-9a-f]{8}", flow_run["name"])
    record = home.record(flow_run)
    assert record["state"] == "completed"
    assert record["flow_run_id"] == flow_run["id"]
    wait_for(
        lambda: not processes_with("MUSTER_RUN_ID", flow_run["name"]),
        "no process of the run remains",
    )


def test_run_of_the_users_project_can_be_submitted_watched_and_shown(home: Home) -> None:
    python = home.project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    result = home.muster("submit", "own.yaml", "--watch")

    assert result.returncode == 0, result.stdout + result.stderr
    assert f"python {python}" in result.stderr
    arguments = [
        ("ls", "--json"),
        ("logs", "latest", "trainer"),
        ("show",),
        ("show", "latest", "--json"),
        ("why", "own-sft"),
        ("cancel", "latest"),
    ]
    results = run_each(home.program, arguments, cwd=home.project, env=home.env)
    outputs = {line: output for line, (_, output, _) in zip(arguments, results, strict=True)}
    [run, *others] = json.loads(outputs["ls", "--json"])
    assert run["run_id"].startswith("own-sft-")
    assert (run["state"], run["attempts"]) == ("completed", 1)
    assert [other_run["created_at"] for other_run in others] == sorted(
        (other_run["created_at"] for other_run in others), reverse=True
    )
    logs = outputs["logs", "latest", "trainer"].splitlines()
    code_directory = home.directory / "runs" / run["run_id"] / "code"
    assert logs == [f"python {python} in {code_directory}", *(f"step {n}" for n in range(1, 21))]
    assert outputs["show",].startswith("Completed")
    assert json.loads(outputs["show", "latest", "--json"])["run_id"] == run["run_id"]
    assert "Completed" in outputs["why", "own-sft"]
    assert results[-1][0] == 2


@pytest.mark.thorough
def test_training_survives_the_death_of_server_and_worker(home: Home) -> None:
    result = home.muster("submit", "own.yaml", "--set", "progress.total=100000")
    assert result.returncode == 0, result.stdout + result.stderr
    run_id = result.stdout.split()[0]
    run_directory = home.directory / "runs" / run_id
    metrics = run_directory / "attempt-01" / "metrics.jsonl"
    wait_for(metrics.exists, "the training takes steps")
    record_before = json.loads((run_directory / "run.json").read_text())
    trainer = record_before["attempts"][0]["components"]["trainer"]["pid"]

    for name in ("prefect-server", "worker"):
        part = home.stack.part(name)
        assert part is not None
        assert part.pid is not None
        os.kill(part.pid, signal.SIGKILL)

    def are_back() -> bool:
        parts = [home.stack.part(name) for name in ("prefect-server", "worker")]
        return all(part and part.deaths == 1 and part.state == "ready" for part in parts)

    wait_for(are_back, "the server and the worker are ready again")
    steps = len(metrics.read_text().splitlines())
    wait_for(
        lambda: len(metrics.read_text().splitlines()) > steps, "the training takes further steps"
    )
    assert psutil.pid_exists(trainer)
    home.wait_for(record_before["flow_run_id"], "")
    assert home.muster("status").stdout.count("died 1 time") == 2
    assert home.muster("cancel", run_id).returncode == 0
    home.wait_for(record_before["flow_run_id"], "", state="CANCELLED")
    wait_for(lambda: not processes_with("MUSTER_RUN_ID", run_id), "no process of the run remains")
    assert len(json.loads((run_directory / "run.json").read_text())["attempts"]) == 1


@pytest.mark.thorough
def test_deployment_of_the_users_spec_can_be_started_and_cancelled(home: Home) -> None:
    result = home.muster(
        "deploy", "own.yaml", "--set", "progress.total=100000", "--cron", "0 3 * * *"
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert home.prefect("deployment", "run", "train/own").returncode == 0
    flow_run = wait_for(
        lambda: next(
            (
                run
                for run in json.loads(home.muster("ls", "--json", "--state", "running").stdout)
                if run["run_id"].startswith("own-")
            ),
            None,
        ),
        "the run is running",
    )
    assert home.muster("cancel", flow_run["run_id"]).returncode == 0
    home.wait_for(flow_run["flow_run_id"], "", state="CANCELLED")
    wait_for(
        lambda: not processes_with("MUSTER_RUN_ID", flow_run["run_id"]),
        "no process of the run remains",
    )


def test_operator_commands_show_and_change_the_queue(home: Home) -> None:
    expected_outputs = {
        (): "Waits: none",
        ("queue",): "No run waits.",
        ("queue", "drain", "ray-node-2"): "ray-node-2 gets no new runs.",
        ("queue", "undrain", "ray-node-2"): "ray-node-2 may get new runs.",
        ("queue", "set", "limit.demo=8"): 'limits":{"demo":8}',
        ("queue", "unset", "limit.demo"): "Settings of the work pool gang: {",
        ("reconcile",): "nothing to do",
        ("prune",): "",
    }

    results = run_each(home.program, expected_outputs, cwd=home.project, env=home.env)

    for arguments, (code, output, errors) in zip(expected_outputs, results, strict=True):
        assert (code, expected_outputs[arguments] in output) == (0, True), (
            arguments,
            code,
            output,
            errors,
        )


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        # The parameter `spec` replaces the whole spec of the deployment. So the parameter must be a
        # complete spec.
        ('{"progress": {"total": 5}}', "'name' is a required property"),
        ('{"name": "x", "workload": "grpoo", "components": {}}', "'grpoo' is not one of"),
    ],
)
def test_invalid_spec_is_refused_before_it_is_queued(home: Home, spec: str, complaint: str) -> None:
    result = home.prefect("deployment", "run", "train/quickstart", "-p", f"spec={spec}")

    assert result.returncode == 1
    assert complaint in " ".join((result.stdout + result.stderr).split())


@pytest.mark.thorough
def test_schedule_starts_a_run_with_its_own_parameters(home: Home) -> None:
    spec = home.spec(steps=5)
    deployment = home.api("GET", "/deployments/name/train/quickstart")
    schedules = f"/deployments/{deployment['id']}/schedules"
    schedule = {
        # Prefect's scheduler wakes up every few seconds, and skips start times that have passed in
        # between. So the interval must be longer than these few seconds.
        "schedule": {"interval": 20},
        "active": True,
        "parameters": {"spec": json.loads(spec)},
    }
    [created_schedule] = home.api("POST", schedules, [schedule])

    def list_ended_runs() -> Any:
        run_filter = {
            "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}},
            "deployments": {"id": {"any_": [deployment["id"]]}},
        }
        runs = home.api("POST", "/flow_runs/filter", run_filter)
        return [run for run in runs if run["auto_scheduled"]]

    [flow_run] = wait_for(list_ended_runs, "the schedule has started a run")
    home.api("DELETE", f"{schedules}/{created_schedule['id']}")

    assert flow_run["state"]["message"] == "step 5 of 5"


@pytest.mark.thorough
def test_cancel_leaves_no_process_of_the_run(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=100_000), "running: api, trainer, environment")
    assert len(processes_with("MUSTER_RUN_ID", flow_run["name"])) >= 3

    home.prefect("flow-run", "cancel", flow_run["id"])

    home.wait_for(flow_run["id"], "", state="CANCELLED")
    wait_for(
        lambda: not processes_with("MUSTER_RUN_ID", flow_run["name"]),
        "no process of the run remains",
    )
    assert home.record(flow_run)["state"] == "cancelled"


@pytest.mark.thorough
def test_killed_supervisor_leaves_no_process_and_no_running_run(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=100_000), "running: api, trainer, environment")
    stack = home.stack

    os.kill(stack.supervisor.pid, signal.SIGKILL)
    result = home.muster("down")

    assert result.returncode == 0, result.stdout + result.stderr
    assert processes_of(stack.stack_id) == []
    assert processes_with("MUSTER_RUN_ID", flow_run["name"]) == []
    # `muster up` starts a new stack. The new stack finds that the run has no process, and gives the
    # run a final state on the server.
    assert home.up().returncode == 0
    assert home.flow_run(flow_run["id"])["state"]["type"] in {"CRASHED", "CANCELLED"}


def test_down_ends_a_running_run_and_leaves_no_process(home: Home) -> None:
    flow_run = home.wait_for(home.trigger(steps=100_000), "running: api, trainer, environment")
    stack = home.stack

    result = home.muster("down")

    assert result.returncode == 0, result.stdout + result.stderr
    assert processes_of(stack.stack_id) == []
    assert processes_with("MUSTER_RUN_ID", flow_run["name"]) == []
    record = home.record(flow_run)
    assert record["state"] == "cancelled"
    assert record["message"].startswith(f"cancelled, because {user_name()} stopped the stack with")
    assert not stack.ray_temp.exists()
    assert not (home.directory / "stack" / "stack.json").exists()
