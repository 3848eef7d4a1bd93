"""The command `muster lineage`: the inputs and outputs of a run, and the runs that they link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from json import dumps
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.sorting import ArtifactSort
from prefect.settings import PREFECT_API_URL

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.lineage import (
    Lineage,
    LineageIndex,
    LineageInput,
    LineageOutput,
    describe_lineage,
    list_inputs,
    list_spec_paths,
    read_lineage,
)
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.server.flow_runs import ServerAway, connect_to_server
from tasks.show.arguments import AsJson, RunName
from tasks.show.lineage import (
    LINEAGE,
    TreeNode,
    describe_input,
    describe_output,
    format_tree,
    parse_lineage,
)
from tasks.spec.errors import MusterError
from tasks.train.finding_runs import find_run, list_runs_with_specs
from tasks.train.run_checkpoints import read_run_spec
from tasks.train.run_records import find_record
from tasks.train.runs import ENDED_STATES, Run

#: Largest number of lineages that are read from the Prefect server.
_MAX_LINEAGES = 1000
#: Number of artifacts that are read with each request.
_PAGE = 100
#: Largest number of levels in the tree that `muster lineage` prints. The first level is the run
#: itself. The second level contains the runs that wrote the inputs of this run, and so on.
_MAX_DEPTH = 10
#: Largest number of runs that `muster lineage` lists as users of one output. Also the largest
#: number of outputs that it lists for each of these runs.
_MAX_USERS = 20


def lineage(run: RunName = "latest", /, *, json: AsJson = False) -> None:
    """Show the data and the checkpoints that a run used, with the runs that wrote these inputs.
    Also show the run's own checkpoints, and the evaluations, exports and further runs that used
    these checkpoints.

    Exit: 0 shown; 2 there is no such run.

    Args:
        json: Print the tree as JSON.
    """
    found_run = find_run(run)
    runs_with_specs = {one.run_id: (one, spec) for one, spec in list_runs_with_specs()}
    runs = {run_id: one for run_id, (one, _spec) in runs_with_specs.items()}
    runs[found_run.run_id] = found_run
    specs = {run_id: spec for run_id, (_one, spec) in runs_with_specs.items()}
    index = LineageIndex(_read_lineages(found_run, specs))
    if json:
        print(dumps(_as_json(found_run, runs, index), indent=2))
        return
    print("\n".join(format_tree(_build_tree(found_run, runs, index))))


def _read_lineages(run: Run, specs: dict[str, Mapping[str, Any]]) -> dict[str, Lineage]:
    """Return a mapping from run ids to all known lineages.

    A lineage lists the data that a run reads and writes. The lineage comes from the run's files on
    this machine, from the artifact on the Prefect server, or from the run spec on the server.

    Args:
        run: The run that the user asked for. The lineage of this run also lists the checkpoints
            that exist now.
        specs: Mapping from the id of each known run to its run spec, newest run first. A spec is
            empty if the server does not have the run.
    """
    lineages: dict[str, Lineage] = {}
    for run_id, spec in specs.items():
        if spec:
            lineages[run_id] = _describe_by_spec(run_id, spec)
    api_url = PREFECT_API_URL.value()
    if api_url:
        # Ignore a server that does not answer. `list_runs_with_specs` has already printed a
        # warning.
        with suppress(ServerAway), connect_to_server(api_url) as client:
            lineages |= {stored.run_id: stored for stored in _read_server_lineages(client)}
    for run_id in specs:
        stored = read_lineage(RunPlace.of(run_id))
        if stored is not None:
            known = lineages.get(run_id)
            lineages[run_id] = stored.including(known) if known is not None else stored
    present = _describe_by_files(run)
    if present is not None:
        known = lineages.get(run.run_id)
        lineages[run.run_id] = present.including(known) if known is not None else present
    oldest_first = [run_id for run_id in reversed(specs) if run_id in lineages]
    return {run_id: lineages[run_id] for run_id in (*oldest_first, *lineages)}


def _describe_by_spec(run_id: str, spec: Mapping[str, Any]) -> Lineage:
    """Return the part of a run's lineage that the spec on the Prefect server determines."""
    return Lineage(
        run_id=run_id,
        workload=str(spec.get("workload") or ""),
        paths=list_spec_paths(spec),
        inputs=list_inputs(spec, run_id),
    )


def _read_server_lineages(client: SyncPrefectClient) -> Iterator[Lineage]:
    """Yield the lineages in the artifacts of the Prefect server, oldest first."""
    artifact_filter = ArtifactFilter.model_validate({"key": {"any_": [LINEAGE]}})
    newest_first: list[Lineage] = []
    for offset in range(0, _MAX_LINEAGES, _PAGE):
        page = client.read_artifacts(
            artifact_filter=artifact_filter,
            sort=ArtifactSort.UPDATED_DESC,
            limit=_PAGE,
            offset=offset,
        )
        parsed = (parse_lineage(str(artifact.data)) for artifact in page)
        newest_first += [one for one in parsed if one is not None]
        if len(page) < _PAGE:
            break
    yield from reversed(newest_first)


def _describe_by_files(run: Run) -> Lineage | None:
    """Return the lineage of a run according to its files on this machine.

    Return None if this machine does not have the files, or cannot read them.
    """
    record: RunJson | None = find_record(run)
    if record is None or not record.attempts:
        return None
    place = run.place
    attempt_spec = read_attempt_spec(place, record.attempts[-1].number)
    with suppress(OSError, ValueError, MusterError):
        spec = read_run_spec(place, record.attempts)
        if spec is not None and attempt_spec:
            is_running = run.state not in ENDED_STATES
            return describe_lineage(spec, attempt_spec, place, record, is_running=is_running)
    return None


def _build_tree(run: Run, runs: Mapping[str, Run], index: LineageIndex) -> TreeNode:
    """Return the tree that `muster lineage` prints.

    Args:
        run: The run that the user asked for.
        runs: Mapping from run ids to all known runs.
        index: The lineages of all known runs.
    """
    root = TreeNode(text=f"{run.run_id} {run.state}")
    inputs = index.list_inputs(run.run_id)
    made_from = root.add("made from" if inputs else "made from: no input is known")
    _add_inputs(made_from, inputs, runs, index, [run.run_id])
    own = index.lineages.get(run.run_id, Lineage())
    for resume in own.resumes:
        step = f"step {resume.step:g}, " if resume.step is not None else ""
        root.add(f"attempt {resume.attempt} resumed from {step}{resume.uri}")
    outputs = _list_last_versions(own.outputs)
    made = root.add("made" if outputs else "made: no output is known")
    users = index.list_users(run.run_id)
    nodes = {output.uri: made.add(describe_output(output)) for output in outputs}
    for user_id, used in users.items():
        for data in used:
            output = index.find_output(data)
            node = nodes.get(output.uri) if output is not None else None
            if node is None:
                node = nodes[data.uri] = made.add(describe_input(data))
            if len(node.children) < _MAX_USERS:
                _add_user(node, user_id, runs, index)
    return root


def _add_inputs(
    node: TreeNode,
    inputs: Iterable[LineageInput],
    runs: Mapping[str, Run],
    index: LineageIndex,
    above: list[str],
) -> None:
    """Add a line for each input of a run, and below that line the run that wrote the input.

    Below the line of the writing run, the inputs of that run are added in the same way.

    Args:
        node: Line below which the lines are added.
        inputs: The inputs.
        runs: Mapping from run ids to all known runs.
        index: The lineages of all known runs.
        above: Ids of the runs above the new lines. The inputs of these runs are not added again. If
            files were overwritten, two runs may seem to be inputs of each other, and the recursion
            would never end.
    """
    for data in inputs:
        line = node.add(describe_input(data))
        if data.run is None:
            continue
        maker = line.add(f"made by {_describe_run(data.run, runs)}")
        if data.run not in above and len(above) < _MAX_DEPTH:
            _add_inputs(maker, index.list_inputs(data.run), runs, index, [*above, data.run])


def _add_user(node: TreeNode, run_id: str, runs: Mapping[str, Run], index: LineageIndex) -> None:
    """Add a line for a run that used the data in `node`, and lines for the run's own outputs."""
    line = node.add(f"used by {_describe_run(run_id, runs)}")
    outputs = _list_last_versions(index.lineages[run_id].outputs)
    for output in outputs[-_MAX_USERS:]:
        line.add(describe_output(output))


def _describe_run(run_id: str, runs: Mapping[str, Run]) -> str:
    known = runs.get(run_id)
    return f"{run_id} {known.state}" if known is not None else run_id


def _list_last_versions(outputs: Iterable[LineageOutput]) -> list[LineageOutput]:
    """Return the newest version of each output, oldest first.

    Args:
        outputs: Outputs of a run, oldest first. The same path occurs several times if a checkpoint
            was saved again.
    """
    by_uri: dict[str, LineageOutput] = {}
    for output in outputs:
        by_uri.pop(output.uri, None)
        by_uri[output.uri] = output
    return [*by_uri.values()]


def _as_json(run: Run, runs: Mapping[str, Run], index: LineageIndex) -> dict[str, Any]:
    """Return the content of the tree that `muster lineage` prints, as JSON data."""
    own = index.lineages.get(run.run_id, Lineage())
    return {
        "run_id": run.run_id,
        "state": run.state,
        "inputs": _list_inputs_as_json(index, [run.run_id]),
        "resumes": [resume.as_json() for resume in own.resumes],
        "outputs": [output.as_json() for output in _list_last_versions(own.outputs)],
        "used_by": [
            {
                "run_id": user_id,
                "state": runs[user_id].state if user_id in runs else None,
                "inputs": [data.as_json() for data in used],
                "outputs": [
                    output.as_json()
                    for output in _list_last_versions(index.lineages[user_id].outputs)
                ],
            }
            for user_id, used in index.list_users(run.run_id).items()
        ],
    }


def _list_inputs_as_json(index: LineageIndex, above: list[str]) -> list[dict[str, Any]]:
    """Return the inputs of a run as JSON data, together with the inputs of earlier runs.

    An earlier run is a run that wrote one of the inputs.

    Args:
        index: The lineages of all known runs.
        above: Ids of several runs. The first is the run that the user asked for. Each further run
            wrote an input of the run before it. The inputs of the last run are returned.
    """
    content = []
    for data in index.list_inputs(above[-1]):
        inputs: list[dict[str, Any]] = []
        if data.run is not None and data.run not in above and len(above) < _MAX_DEPTH:
            inputs = _list_inputs_as_json(index, [*above, data.run])
        content.append({**data.as_json(), "inputs": inputs})
    return content
