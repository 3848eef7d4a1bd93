"""One attempt at a run while its components run: their supervisor, and its background threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tasks.processes.component import AttemptPlan
from tasks.processes.containment import Containment, Level
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.guards import tag_of
from tasks.processes.registry import RunRegistration
from tasks.processes.supervisor import Supervisor
from tasks.record.events import Emit
from tasks.record.outcome import Verdict
from tasks.rollout.component import FleetTail
from tasks.rollout.fleet_loss import recognize_fleet_loss
from tasks.spec.run import RunSpec
from tasks.train.attempt_spec import AttemptSpec
from tasks.train.background_work import BackgroundWork
from tasks.train.interpreters import component_interpreter, find_command_interpreter
from tasks.train.plan import PlanInputs, find_containment

#: Rule in `record/cause_rules.toml` that matches the message about a missing Python package.
_MISSING_PACKAGE_RULE = "module-not-found"


def start_guardian_template(spec: RunSpec, run_id: str, number: int) -> GuardianTemplate | None:
    """Start the process from which the guardian processes of an attempt will be forked.

    A guardian is the small process that owns the process tree of one component. Starting the
    template process takes long, so it is started while the run still waits for its GPUs.

    Args:
        spec: The spec of the run.
        run_id: Id of the run.
        number: Number of the attempt.

    Returns:
        The process. None if the attempt has only one component, if guardians do not work on this
        machine, or if the process could not be started.
    """
    if len(spec.processes) < 2 or find_containment(spec).level is Level.L1:
        return None
    with suppress(OSError):
        return GuardianTemplate(tag_of(run_id, number))
    return None


class RunningAttempt:
    """Starts the supervisor of one attempt, and later ends the attempt's processes and threads."""

    def __init__(
        self,
        plan_inputs: PlanInputs,
        spec: AttemptSpec,
        *,
        emit: Emit,
        register: RunRegistration,
        note_ports: Callable[[Mapping[str, int]], None],
        template: GuardianTemplate | None = None,
    ) -> None:
        """
        Args:
            plan_inputs: Values from which the plan of the attempt is computed.
            spec: The run spec of the attempt, and the TCP ports that its programs use.
            emit: Function that publishes events of the attempt.
            register: Entry of the run in this machine's registry of active runs.
            note_ports: Function that writes the TCP ports of the attempt to the run's record.
            template: Process from which a guardian process is forked for each program. If None,
                guardian processes are started without a template.
        """
        self._plan_inputs = plan_inputs
        self._spec = spec
        self._note_ports = note_ports
        self._verdict: Verdict | None = None
        self.supervisor = Supervisor(
            plan_inputs.plan(), spec.ports, emit, register, template, self._replan
        )
        #: Threads that work while the components run.
        self.background = BackgroundWork()
        #: Thread that copies the events of the inference servers to the event log. None if the run
        #: has no inference servers.
        self._fleet_tail: FleetTail | None = None
        if plan_inputs.fleet is not None:
            self._fleet_tail = FleetTail(plan_inputs.place.fleet_events, emit)
            self._fleet_tail.start()

    @property
    def containment(self) -> Containment:
        """The kernel features with which this machine can end all processes of the attempt."""
        return self._plan_inputs.containment

    def end(self) -> Verdict:
        """Stop all components and threads of the attempt. A repeated call returns the same result.

        Returns:
            The result of the attempt and its cause, with secrets masked.
        """
        if self._verdict is None:
            with self.supervisor:
                verdict = self.supervisor.teardown()
            self.background.end()
            fleet = self._spec.resolved.fleet
            if fleet is not None:
                verdict = recognize_fleet_loss(verdict, self._plan_inputs.place, fleet.engines)
            verdict = name_interpreter(verdict, self._plan_inputs.spec)
            self._verdict = _mask_verdict(verdict, self._plan_inputs.mask)
            if self._fleet_tail is not None:
                self._fleet_tail.close()
        return self._verdict

    def _replan(self, component: str) -> AttemptPlan:
        """Return a new plan of the attempt, with new ports for a component whose port was taken.

        Raises:
            OSError: No port is free, or the running inference servers were started with the old
                port.
        """
        fleet = self._plan_inputs.fleet
        self._spec.move_ports(component, fleet_port=fleet.port if fleet is not None else None)
        self._note_ports(self._spec.ports.numbers)
        return replace(self._plan_inputs, spec=self._spec.with_block_values()).plan()


def name_interpreter(verdict: Verdict, spec: RunSpec) -> Verdict:
    """Add the Python interpreter to a result if the attempt failed due to a missing package.

    The path of the component's interpreter is added to the hint of the failure. Any other result is
    returned unchanged.

    Args:
        verdict: The result of the attempt.
        spec: The resolved spec of the attempt.
    """
    failure = verdict.failure
    if failure is None or failure.rule != _MISSING_PACKAGE_RULE:
        return verdict
    component = spec.processes.get(failure.component or "")
    if component is not None and component.launcher == "ray_job":
        return verdict
    env = {**spec.env, **(component.env if component is not None else {})}
    chosen = component_interpreter(env)
    interpreter = chosen
    if component is not None:
        cwd = Path.cwd() / (component.cwd or spec.cwd)
        interpreter = find_command_interpreter(failure.component or "", component.command, env, cwd)
    if interpreter == chosen:
        advice = (
            "Muster takes the interpreter from the project's .venv, or else from the environment "
            "that is activated in your shell"
        )
    else:
        advice = (
            "Install the package for this interpreter, or start another interpreter in the "
            f"command. The chosen interpreter of the project is {chosen}"
        )
    hint = f"{failure.hint} The run used the Python interpreter {interpreter}. {advice}"
    return replace(verdict, failure=failure.with_changes(hint=hint))


def _mask_verdict(verdict: Verdict, mask: Callable[[str], str]) -> Verdict:
    """Return the result of an attempt with all secrets in its texts masked."""
    failure = verdict.failure
    if failure is not None:
        failure = failure.with_changes(
            message=mask(failure.message),
            line=mask(failure.line),
            log_tail=mask(failure.log_tail),
        )
    return replace(verdict, message=mask(verdict.message), failure=failure)
