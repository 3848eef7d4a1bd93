"""Messages of the Prefect state Crashed, if the flow process of a run was killed or has failed."""

from __future__ import annotations

import re
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.runner._state_proposer import StateProposer

from tasks.processes.identity import host_name
from tasks.queue.ledger import parse_request
from tasks.record.final_record import describe_cleanup_after_loss
from tasks.record.outcome import signal_name
from tasks.spec.placeholders import mapping_or_empty

#: Matches the message that Prefect writes for a process with an exit code other than 0. A negative
#: exit code is the number of a signal. Source: prefect/runner/_flow_run_executor.py.
_EXIT = re.compile(r"Process exited with status code: (-?\d+)\.")
#: Entrypoint of the flow that runs a spec.
_TRAIN = "flows.train.train"
#: Entrypoint of the flow that runs a pipeline.
_PIPELINE = "flows.pipeline.pipeline"


class CrashReporter(StateProposer):
    """Proposes states to the Prefect server, with messages about killed flow processes.

    Prefect's message only says `Process exited with status code: -9`. The message of this class
    also says what Muster does next, and how the user continues the run. The message must be
    complete when Crashed is proposed, because the server does not replace the message of a flow run
    that is already Crashed.
    """

    def __init__(self, *, client: PrefectClient, entrypoint: str | None) -> None:
        """
        Args:
            client: Client of the Prefect server.
            entrypoint: Entrypoint of the flow, as in `flows.train.train`. None if the flow is not
                one of Muster's flows.
        """
        super().__init__(client=client)
        self._entrypoint = entrypoint

    async def propose_crashed(self, flow_run: FlowRun, message: str) -> State[Any] | None:
        """Propose the state Crashed, and return the new state, or None if the server refused it."""
        match = _EXIT.match(message)
        if match is not None:
            message = describe_crash(flow_run, int(match[1]), self._entrypoint)
        return await super().propose_crashed(flow_run, message)


def describe_crash(flow_run: FlowRun, exit_code: int, entrypoint: str | None) -> str:
    """Return the message for a flow run whose process has ended without a final state.

    Args:
        flow_run: The flow run.
        exit_code: Exit code of the process. A negative number is the number of a signal.
        entrypoint: Entrypoint of the flow, as in `flows.train.train`. None if the flow is not one
            of Muster's flows.
    """
    if exit_code < 0:
        ending = f"was killed by {signal_name(-exit_code)}"
    else:
        ending = f"ended with exit code {exit_code} before it set a final state of the run"
    sentences = [f"The flow process of this run {ending} on the host {host_name()}."]
    if entrypoint == _TRAIN:
        spec = mapping_or_empty(flow_run.parameters.get("spec"))
        run_id = parse_request(flow_run).name
        is_adopted = spec.get("on_lost_flow") == "adopt"
        sentences.append(describe_cleanup_after_loss(run_id, is_adopted=is_adopted))
    elif entrypoint == _PIPELINE:
        sentences.append(
            "The runs of the pipeline's stages continue. To resume the pipeline: muster pipeline "
            f"--resume {flow_run.id}"
        )
    return " ".join(sentences)
