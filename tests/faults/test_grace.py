"""Tests that a component has its whole grace period to save, however its run is ended.

`make faults ARGS='tests/faults/test_grace.py --times 10'` ends ten runs at once in each way. The
files that the components wrote show whether they saved.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.processes.ports import PortsReserved
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.host_environment import ROOT, Run, wait_for, with_absolute_cwd
from tests.support.prefect_api import send_request
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.saving_component import has_saved, is_training, saving_spec, until_training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: Time limit, in seconds, on each wait. The limit is high, because a busy machine is slow.
WITHIN_S = 600.0
until_late = partial(wait_for, within_s=WITHIN_S)
MUSTER = str(Path(sys.executable).with_name("muster"))
CTRL_C = b"\x03"
GANG = {"nodes": 1, "gpus_per_node": 1}


@dataclass(kw_only=True)
class StoppedRun:
    """The runs that one test starts and stops."""

    #: Work pool with its Prefect server.
    pool: GangPool
    #: Directory of the specs and of the components' files.
    directory: Path
    #: Number of runs.
    times: int
    #: Process of the worker, or None before it was started.
    worker: subprocess.Popen[bytes] | None = None
    #: Files that the components write: one file for each run, in the order of the runs.
    files: list[Path] = field(default_factory=list)
    #: Processes of the commands that start runs without a worker.
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of all commands."""
        return self.pool.host_env.env

    def specs(self, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the spec of each run. Each run writes to its own file."""
        for number in range(self.times):
            self.files.append(self.directory / f"{number}.txt")
            yield saving_spec(self.files[-1], **fields)

    def submitted(self, **fields: Any) -> list[Run]:
        """Submit the runs to the worker, and return the runs when all of them are training."""
        self.worker = self.worker or self.pool.start_worker()
        runs = [self.pool.submit(spec) for spec in self.specs(**fields)]
        until_training(*self.files, within_s=WITHIN_S)
        for run in runs:
            until_late(lambda run=run: run.flow_run()["state"]["type"] == "RUNNING", "it runs")
        return runs

    def started(self, *words: str, terminals: bool = False) -> list[Any]:
        """Start each run with a command, and return when all runs are training.

        Args:
            words: Command line without the path of the spec file.
            terminals: True to run each command in its own pseudo terminal.

        Returns:
            The pseudo terminals if `terminals` is True, otherwise the processes of the commands.
        """
        pseudo_terminals = []
        for number, spec in enumerate(self.specs()):
            path = self.directory / f"{number}.yaml"
            content: Mapping[str, Any] = with_absolute_cwd(spec)
            if "flows.pipeline" in words:
                stage = {"name": "only", "deployment": "train/gang", "spec": dict(spec)}
                content = {"name": "line", "stages": [stage]}
            path.write_text(yaml.safe_dump(content, sort_keys=False))
            with (self.directory / f"{number}.out").open("wb") as output:
                stdio: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output}
                stdio["stderr"] = subprocess.STDOUT
                terminal = PseudoTerminal() if terminals else None
                process = subprocess.Popen(
                    [*words, str(path)],
                    cwd=ROOT,
                    env=self.env,
                    start_new_session=True,
                    **(terminal.as_stdio() if terminal else stdio),
                )
            if terminal is not None:
                terminal.close_device()
                pseudo_terminals.append(terminal)
            self._children.append(process)

        def are_training() -> bool:
            for number, process in enumerate(self._children):
                output = self.directory / f"{number}.out"
                assert process.poll() is None, output.read_text()
            return all(map(is_training, self.files))

        until_late(are_training, "all components train")
        return pseudo_terminals or self._children

    def set_state(self, run: Run, type: str, *, force: bool = False) -> None:
        """Set the state of the flow run on the Prefect server.

        `force` is True to skip the server's rules for changes of a state.
        """
        path = f"/flow_runs/{run.flow_run_id}/set_state"
        self.pool.host_env.post(path, state={"type": type, "name": type.title()}, force=force)

    def command(self, *words: str, may_come_late: bool = False) -> None:
        """Run a command of `muster`, and check that the command succeeds.

        Args:
            words: The command, for example "cancel", and its arguments.
            may_come_late: True if the command may also fail because the run has ended already.
        """
        completed = subprocess.run([MUSTER, *words], env=self.env, capture_output=True, text=True)
        output = completed.stdout + completed.stderr
        is_late = may_come_late and "has ended" in output
        assert completed.returncode == 0 or is_late, output

    def until_ended(self) -> None:
        """Wait until all commands have exited and each run has an end time in its record."""
        for process in self._children:
            process.wait(WITHIN_S)

        def have_ended() -> bool:
            records = (self.pool.host_env.home / "runs").glob("*/run.json")
            end_times = [yaml.safe_load(record.read_text())["ended_at"] for record in records]
            return len(end_times) == self.times and all(end_times)

        until_late(have_ended, "all runs have ended")


def by_cancel_of_muster(stopped_run: StoppedRun) -> None:
    for run in stopped_run.submitted():
        stopped_run.command("cancel", run.flow_run_id)


def by_cancel_in_the_ui(stopped_run: StoppedRun) -> None:
    for run in stopped_run.submitted():
        stopped_run.set_state(run, "CANCELLING")


def by_two_cancels(stopped_run: StoppedRun) -> None:
    for run in stopped_run.submitted():
        stopped_run.set_state(run, "CANCELLING")
        stopped_run.command("cancel", run.flow_run_id, may_come_late=True)


def by_state_cancelled(stopped_run: StoppedRun) -> None:
    for run in stopped_run.submitted():
        stopped_run.set_state(run, "CANCELLED", force=True)


def by_signal_to_flow_process(stopped_run: StoppedRun, signals: Sequence[signal.Signals]) -> None:
    for run in stopped_run.submitted():
        pid = run.flow_pid()
        for signum in signals:
            os.kill(pid, signum)


def by_cancel_and_its_signals(stopped_run: StoppedRun) -> None:
    """Cancel each run, and send SIGTERM to the run's processes during the cancellation.

    Both happen if a user stops the stack while a run is being cancelled.
    """
    for run in stopped_run.submitted():
        stopped_run.set_state(run, "CANCELLING")
        os.kill(run.flow_pid(), signal.SIGTERM)
        os.killpg(run.flow_pid(), signal.SIGTERM)


def by_signal_to_worker(stopped_run: StoppedRun, signum: signal.Signals) -> None:
    stopped_run.submitted()
    assert stopped_run.worker is not None
    stopped_run.worker.send_signal(signum)
    stopped_run.worker.wait(WITHIN_S)


def by_stop_of_unit(stopped_run: StoppedRun) -> None:
    """Run the commands that systemd runs when the service of a worker is stopped."""
    stopped_run.submitted()
    assert stopped_run.worker is not None
    command = [sys.executable, "-m", "deployments.stack.runs", str(stopped_run.worker.pid)]
    subprocess.run(command, cwd=ROOT, env=stopped_run.env, check=True, timeout=WITHIN_S)
    stopped_run.worker.send_signal(signal.SIGTERM)
    stopped_run.worker.send_signal(signal.SIGCONT)
    stopped_run.worker.wait(WITHIN_S)


def by_max_hours(stopped_run: StoppedRun) -> None:
    stopped_run.submitted(gang={**GANG, "max_hours": 30 / 3600})


def by_interrupt_of_pipeline(stopped_run: StoppedRun) -> None:
    stopped_run.worker = stopped_run.pool.start_worker()
    for process in stopped_run.started(sys.executable, "-m", "flows.pipeline"):
        process.send_signal(signal.SIGINT)


def by_cancel_of_pipeline(stopped_run: StoppedRun) -> None:
    stopped_run.worker = stopped_run.pool.start_worker()
    stopped_run.started(sys.executable, "-m", "flows.pipeline")
    flow_runs = stopped_run.pool.host_env.post(
        "/flow_runs/filter", flows={"name": {"any_": ["pipeline"]}}
    )
    for run in flow_runs:
        path = f"/flow_runs/{run['id']}/set_state"
        stopped_run.pool.host_env.post(path, state={"type": "CANCELLING", "name": "Cancelling"})


def by_ctrl_c(stopped_run: StoppedRun) -> None:
    for terminal in stopped_run.started(sys.executable, "-m", "flows.train", terminals=True):
        terminal.press(CTRL_C)


def by_ctrl_c_of_forked_run(stopped_run: StoppedRun) -> None:
    """Press Ctrl-C in the terminal of each run that the worker's fork server has forked."""
    stopped_run.worker = stopped_run.pool.start_worker()
    until_late((stopped_run.pool.host_env.home / "zygote").is_socket, "a fork server")
    for terminal in stopped_run.started(MUSTER, "train", terminals=True):
        terminal.press(CTRL_C)


def by_closed_terminal(stopped_run: StoppedRun) -> None:
    for terminal in stopped_run.started(sys.executable, "-m", "flows.train", terminals=True):
        terminal.close()


def by_signal_to_command(stopped_run: StoppedRun, signals: Sequence[signal.Signals]) -> None:
    for process in stopped_run.started(sys.executable, "-m", "flows.train"):
        for signum in signals:
            process.send_signal(signum)


def by_cancel_of_direct_run(stopped_run: StoppedRun) -> None:
    stopped_run.started(sys.executable, "-m", "flows.train")
    for run in stopped_run.pool.host_env.flow_runs():
        stopped_run.command("cancel", run["id"])


TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP
#: Mapping from a description to a function that ends all runs. Each function uses one of the ways
#: in which a person can end a run.
WAYS: dict[str, Callable[[StoppedRun], None]] = {
    "muster cancel": by_cancel_of_muster,
    "Cancel in the UI": by_cancel_in_the_ui,
    "Cancel in the UI, then muster cancel": by_two_cancels,
    "state Cancelled, forced": by_state_cancelled,
    "SIGTERM to the flow process": partial(by_signal_to_flow_process, signals=[TERM]),
    "SIGINT to the flow process": partial(by_signal_to_flow_process, signals=[INT]),
    "cancel, SIGTERM to process and group": by_cancel_and_its_signals,
    "SIGTERM to the worker": partial(by_signal_to_worker, signum=TERM),
    "SIGINT to the worker": partial(by_signal_to_worker, signum=INT),
    "systemctl stop of the worker": by_stop_of_unit,
    "max_hours": by_max_hours,
    "SIGINT to a pipeline": by_interrupt_of_pipeline,
    "cancel of a pipeline": by_cancel_of_pipeline,
    "Ctrl-C in the terminal": by_ctrl_c,
    "Ctrl-C, forked by the fork server": by_ctrl_c_of_forked_run,
    "the terminal closes": by_closed_terminal,
    "SIGTERM twice to the command": partial(by_signal_to_command, signals=[TERM, TERM]),
    "SIGHUP and SIGTERM to the command": partial(by_signal_to_command, signals=[HUP, TERM]),
    "muster cancel of a direct run": by_cancel_of_direct_run,
}


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--times"))


@pytest.mark.parametrize("way", WAYS)
def test_component_saves_its_state_however_its_run_is_ended(
    tmp_path: Path,
    way: str,
    times: int,
    record_property: Callable[[str, object], None],
) -> None:
    with gang_pool(tmp_path) as pool:
        stopped_run = StoppedRun(pool=pool, directory=tmp_path, times=times)
        WAYS[way](stopped_run)
        stopped_run.until_ended()

    saved = sum(map(has_saved, stopped_run.files))
    record_property("way", way)
    record_property("saved", f"{saved}/{times}")
    assert saved == times


def test_component_saves_its_state_when_the_stack_is_stopped(
    tmp_path: Path, times: int, record_property: Callable[[str, object], None]
) -> None:
    ports = PortsReserved(["server"])
    port = ports.numbers["server"]
    ports.close()
    home = tmp_path / "home"
    files = [tmp_path / f"{number}.txt" for number in range(times)]
    variables = {"MUSTER_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    command = partial(
        subprocess.run, env={**os.environ, **variables}, check=True, timeout=WITHIN_S, cwd=tmp_path
    )
    command([MUSTER, "up", "--ray-dashboard", "0"])
    try:
        password = (home / "password").read_text().strip()
        pool = f"{variables['PREFECT_API_URL']}/work_pools/gang"
        send_request("PATCH", pool, {"concurrency_limit": times}, password=password)
        for number, file in enumerate(files):
            path = tmp_path / f"{number}.yaml"
            path.write_text(yaml.safe_dump(saving_spec(file), sort_keys=False))
            command([MUSTER, "submit", str(path)])
        until_training(*files, within_s=WITHIN_S)
    finally:
        command([MUSTER, "down"])

    saved = sum(map(has_saved, files))
    record_property("way", "muster down")
    record_property("saved", f"{saved}/{times}")
    assert saved == times


def test_cancel_under_a_worker_waits_for_a_grace_period_that_exceeds_prefects_limit(
    tmp_path: Path,
) -> None:
    with gang_pool(tmp_path) as pool:
        stopped_run = StoppedRun(pool=pool, directory=tmp_path, times=1)
        [run] = stopped_run.submitted(save_s=40, grace_s=60)

        stopped_run.set_state(run, "CANCELLING")
        stopped_run.until_ended()
        state = run.record()["state"]

    assert has_saved(stopped_run.files[0])
    assert state == "cancelled"


def test_cancel_now_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    with gang_pool(tmp_path) as pool:
        stopped_run = StoppedRun(pool=pool, directory=tmp_path, times=1)
        [run] = stopped_run.submitted(save_s=600, grace_s=900)
        stopped_run.set_state(run, "CANCELLING")
        until_late(lambda: "part 1" in stopped_run.files[0].read_text(), "it saves")

        stopped_run.command("cancel", "--now", run.flow_run_id)
        stopped_run.until_ended()
        state = run.record()["state"]

    assert not has_saved(stopped_run.files[0])
    assert state == "cancelled"


def test_second_ctrl_c_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    with gang_pool(tmp_path) as pool:
        stopped_run = StoppedRun(pool=pool, directory=tmp_path, times=1)
        path = tmp_path / "spec.yaml"
        stopped_run.files = [tmp_path / "0.txt"]
        path.write_text(yaml.safe_dump(saving_spec(stopped_run.files[0], save_s=600, grace_s=900)))
        terminal = PseudoTerminal()
        process = subprocess.Popen(
            [MUSTER, "train", str(path)],
            cwd=tmp_path,
            env=stopped_run.env,
            start_new_session=True,
            **terminal.as_stdio(),
        )
        terminal.close_device()
        until_training(*stopped_run.files)

        terminal.press(CTRL_C)
        until_late(lambda: "part 1" in stopped_run.files[0].read_text(), "it saves")
        terminal.press(CTRL_C)
        code = process.wait(WITHIN_S)
        terminal.wait_until_read()

    assert code == 130, terminal.text()
    assert not has_saved(stopped_run.files[0])
