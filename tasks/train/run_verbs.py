"""The commands that show a recorded run or cancel it, and the overview of all runs.

The commands are `muster ls`, `show`, `explain`, `why`, `metrics`, `checkpoints` and `cancel`. The
command `muster logs` is in `logs_command.py`. `muster` without a command prints the overview.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from json import dumps, loads
from typing import Annotated, Literal

from cyclopts import Parameter

from tasks.record.states import RunState
from tasks.show.arguments import EXIT_DONE, AsJson, Pool, RunName
from tasks.show.facts_of_run import describe_unanswered
from tasks.show.failure import format_failure
from tasks.show.lines import end_block
from tasks.show.listing import ListedRun
from tasks.show.listing import list_runs as format_runs
from tasks.show.markdown_output import print_markdown
from tasks.show.next_start import describe_retry_of
from tasks.show.output import console_of, is_on_terminal, line_of
from tasks.show.page import COMPONENTS, SUMMARY, TIME
from tasks.spec.errors import BadArgument, MusterError
from tasks.spec.formatting import format_minutes
from tasks.spec.watch import advise_about_values
from tasks.train.finding_runs import find_run, find_run_with_files, list_runs, parse_since
from tasks.train.local_view import describe_locally
from tasks.train.run_checkpoints import (
    describe_missing_checkpoints,
    format_checkpoint_line,
    format_checkpoints,
    list_run_checkpoints,
)
from tasks.train.run_differences import compare_attempts
from tasks.train.run_metrics import read_metrics
from tasks.train.run_progress import RunProgress, read_progress
from tasks.train.run_records import (
    describe_lost_process,
    find_record,
    read_artifacts,
    require_record,
)
from tasks.train.run_story import measure_time_use, tell_story
from tasks.train.runs import ENDED_STATES, WAITING_STATES, EndedState, OpenState, Run
from tasks.train.server_url import read_server_url

#: Number of runs that `muster ls` shows by default.
_LISTED_RUNS = 20
_NO_RUN_YET = "There are no runs yet. To start one, run `muster train SPEC`."
#: Number of newest runs from which `overview` selects the runs that it prints.
_OVERVIEW_RUNS = 200


def ls(
    *,
    limit: int = _LISTED_RUNS,
    state: Annotated[
        tuple[Literal[OpenState, EndedState], ...], Parameter(show_default=False)
    ] = (),
    tag: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    name: str = "",
    since: str = "",
    json: AsJson = False,
) -> None:
    """List runs, newest first: the runs of the Prefect server, and other runs that are recorded on
    this machine.

    Exit: 0 listed, even if there are no runs.

    Args:
        limit: Largest number of runs to list.
        state: List only runs in this state. This option can be repeated.
        tag: List only runs with this tag. With several tags, list only runs that have all of them.
        name: List only runs whose spec has this name, or a name that matches this pattern, such as
            "ppo-*".
        since: List only runs that were created since this time: a UTC date such as 2026-01-31, or
            an age such as 30m, 12h or 7d.
        json: Print a list of objects as JSON.
    """
    created_after = parse_since(since, time.time()) if since else 0.0
    runs = [
        run
        for run in list_runs()
        if not state or run.state in state
        if not {*tag} - {*run.tags}
        if not name or fnmatchcase(run.name, name)
        if not since or (run.created_at or 0.0) >= created_after
    ][:limit]
    progress = read_progress(runs)
    if json:
        nothing_known = RunProgress()
        objects = [
            {**asdict(run), **asdict(progress.get(run.run_id, nothing_known))} for run in runs
        ]
        print(dumps(objects, indent=2))
        return
    if not runs:
        is_filtered = state or tag or name or since
        text = "No run matches the filter options of this command." if is_filtered else _NO_RUN_YET
        print(text, file=sys.stderr)
        return
    now = time.time()
    is_terminal = is_on_terminal()
    rows = [
        ListedRun(
            run_id=run.run_id,
            state=run.state,
            age=format_minutes(now - run.created_at) if run.created_at else "",
            host=run.host,
            step=progress[run.run_id].step_text if run.run_id in progress else "",
            metric=progress[run.run_id].metric_text if run.run_id in progress else "",
            message=_choose_message(run) if is_terminal else run.brief,
            omitted_problems=len(run.problems) - 1 if is_terminal else 0,
        )
        for run in runs
    ]
    if not is_terminal:
        # Print one line per run, for programs such as grep and cut. Do not shorten any cell.
        for row in rows:
            *cells, step, metric, message = row.cells
            # Earlier releases did not print `step` and `metric`. Print these columns last, so that
            # all other columns keep their numbers, which scripts may use.
            print("\t".join((*cells, message, step, metric)))
        return
    console = console_of(sys.stdout)
    for line in format_runs(rows, console.width):
        console.print(line, soft_wrap=True)


def _choose_message(run: Run) -> str:
    """Return the message of a run for the list on a terminal: one problem, with short paths."""
    first, *others = run.problems
    return run.place.shorten_paths(first if others else run.brief)


def show(
    run: RunName = "latest", other: str = "", /, *, diff: bool = False, json: AsJson = False
) -> None:
    """Show a run: components, attempts, and the present activity or the cause of the failure.

    Exit: 0 shown; 2 there is no such run.

    Args:
        other: The run to compare with, for --diff.
        diff: Show the differences between two runs: spec, code, packages and host. RUN--a02 names
            an attempt. RUN alone names the last attempt of the run. If a run has not started, only
            its spec and its submitted code are compared.
        json: Print run.json. With --diff: print the two values of each difference as JSON.
    """
    if diff != bool(other):
        raise BadArgument("to compare two runs write: muster show --diff RUN RUN")
    if diff:
        _print_differences(run, other, json=json)
        return
    found_run = find_run(run)
    if json:
        print(dumps(require_record(found_run).as_json(), indent=2))
        return
    if sentence := describe_lost_process(found_run):
        print(f"{sentence}\n")
    # Prefer the files of this machine, because they are newer than the artifacts on the server.
    texts = [*describe_locally(found_run)] or read_artifacts(found_run, SUMMARY, COMPONENTS)
    if texts:
        print_markdown(texts)
    elif found_run.place.record.exists():
        for line in end_block(found_run.state, found_run.message, found_run.place.record):
            print(line.plain)
    else:
        print(found_run)


def _print_differences(first_name: str, second_name: str, *, json: bool) -> None:
    """Print the differences between two attempts as JSON, or as lines for people."""
    comparison = compare_attempts(first_name, second_name)
    if json:
        if comparison.note:
            print(comparison.note, file=sys.stderr)
        print(dumps(comparison.differences, indent=2))
        return
    if comparison.note:
        print(comparison.note)
    compared = "specs and the submitted code" if comparison.note else "records of the two attempts"
    print("\n".join(comparison.describe()) or f"The {compared} do not differ.")


def metrics(run: RunName = "latest", /) -> None:
    """Print the metrics of a run's training: one line per step, each a JSON object.

    Metrics that are not finite are printed as null.

    Exit: 0 printed; 2 there is no such run, or this machine has no metrics of the run.
    """
    for row in read_metrics(find_run_with_files(run)):
        # JSON has no NaN and no infinity, but Python writes both. So replace them by null.
        finite_row = loads(dumps(row), parse_constant=lambda _: None)
        print(dumps(finite_row))


def explain(run: RunName = "latest", /, *, json: AsJson = False) -> None:
    """Print a summary of a run: its attempts, its first failure, its alarms and its metrics.

    The summary fits on a screen, or into a prompt for a language model.

    Exit: 0 printed; 2 there is no such run.

    Args:
        json: Print the run as JSON, as in `ls`, with the summary in the key `story`.
    """
    found_run = find_run(run)
    text = tell_story(found_run)
    print(dumps({**asdict(found_run), "story": text}, indent=2) if json else text)


def why(run: RunName = "latest", /, *, pool: Pool = "gang", json: AsJson = False) -> int:
    """Print why a run waits, why it is slow, or how it ended.

    Exit: 0 printed; 1 the server does not answer; 2 there is no such run.

    Args:
        json: Print as JSON: the run as in `ls`, its failure as in run.json, and its use of time.
    """
    found_run = find_run(run)
    time_use = measure_time_use(found_run)
    record = find_record(found_run)
    attempt = record.attempt if record is not None else None
    failure = attempt.failure if attempt is not None else None
    if json:
        content = {
            **asdict(found_run),
            "failure": failure.as_json() if failure else None,
            "slow": time_use.as_json() if time_use else None,
        }
        print(dumps(content, indent=2))
        return EXIT_DONE

    # After a kill of the flow process, the Prefect server shows the state Running for a while. So
    # print first that the process was killed.
    if sentence := describe_lost_process(found_run):
        print(sentence)
    exit_code = EXIT_DONE
    if failure is None or found_run.state in WAITING_STATES:
        has_begun = record is not None and found_run.state not in WAITING_STATES
        try:
            has_flow_run = bool(found_run.flow_run_id and read_server_url())
            # Do not ask the server about a cancelled run, because the output of `print(found_run)`
            # says who cancelled the run.
            if has_flow_run and found_run.state != RunState.CANCELLED.value:
                # Import this module only if needed, because it imports Prefect, which takes
                # seconds.
                from tasks.queue.command import why as explain_waiting

                exit_code = explain_waiting(found_run.flow_run_id, pool=pool)
            else:
                print(found_run)
        except MusterError:
            # The server does not answer, or does not have the run because the run used a temporary
            # server. If the run has started, print the state that is recorded in its files.
            if not has_begun:
                raise
            print(found_run)
    if attempt is not None and failure is not None:
        print(format_failure(found_run.place, attempt, failure))
    elif attempt is not None and found_run.state == RunState.CANCELLED.value:
        retry = f"`muster retry {found_run.run_id}`"
        print(f"{describe_retry_of(found_run.place, retry)}.")
    elif (
        attempt is not None
        and found_run.state == RunState.COMPLETED.value
        and (advice := advise_about_values(attempt.not_finite))
    ):
        print(advice)
    if attempt is not None and found_run.state not in WAITING_STATES:
        for sentence in describe_unanswered(attempt, time.time()):
            print(sentence)
    if time_use is not None:
        for sentence in time_use.sentences():
            print(sentence)
    else:
        # `time_use` is computed from files of the run. If these files are on another host, print
        # the Prefect artifact in which that host has stored the same information.
        print_markdown(read_artifacts(found_run, TIME))
    return exit_code


def cancel(run: RunName, /, *, now: bool = False, json: AsJson = False) -> None:
    """End a run. Components are stopped in reverse order, each with its grace period.

    Exit: 0 the run is being cancelled; 1 the run cannot be cancelled from here; 2 there is no such
    run, or the run has ended.

    Args:
        now: Skip the grace periods, even if the run is already being cancelled. Unsaved data is
            lost.
        json: Print the run as JSON, as in `ls`, with its state before the cancellation.
    """
    # Import this module only if needed, because it imports Prefect, which takes seconds.
    from tasks.train.run_cancellation import cancel_run

    found_run = find_run(run)
    cancel_run(found_run, is_now=now)
    if json:
        print(dumps(asdict(found_run), indent=2))
        return
    how = "cancelled without grace periods" if now else "cancelled"
    run_id = found_run.run_id
    print(f"{run_id} is being {how}. To see the result: muster show {run_id}")


def checkpoints(run: RunName = "latest", /, *, json: AsJson = False) -> None:
    """List the checkpoints of a run, the newest first. For each checkpoint, show its step, size and
    age, whether it is complete, the attempt that saved it, and the reason why it is kept.

    Exit: 0 listed, even if there is no checkpoint yet; 2 there is no such run, or this machine
    cannot list its checkpoints.

    Args:
        json: Print a list of objects as JSON.
    """
    found_run = find_run_with_files(run)
    rows = list_run_checkpoints(found_run)
    if json:
        print(dumps([asdict(row) for row in rows], indent=2))
        return
    if not rows:
        print(describe_missing_checkpoints(found_run), file=sys.stderr)
        return
    now = time.time()
    if not is_on_terminal():
        # Print one line per checkpoint, for programs such as grep and cut.
        for row in rows:
            print(format_checkpoint_line(row, now))
        return
    console = console_of(sys.stdout)
    for line in format_checkpoints(rows, now):
        console.print(line_of(line), soft_wrap=True)


def overview() -> None:
    """Print the running, the waiting and the last failed runs, and the most useful commands."""
    runs = list_runs(_OVERVIEW_RUNS)
    waiting = [run for run in runs if run.state in WAITING_STATES]
    running = [run for run in runs if run.state not in (*ENDED_STATES, *WAITING_STATES)]
    failed = [run for run in runs if run.state in ("failed", "crashed")][:3]
    _print_group("Runs:", running)
    _print_group("Waits:", waiting)
    _print_group("Failed last:", failed)
    print(
        "\nmuster train SPEC     run a spec here (muster init writes a spec)\n"
        "muster show RUN       show the state of a run, or why it failed\n"
        "muster logs RUN -f    follow the logs of its components\n"
        "muster --help         list all commands"
    )


def _print_group(title: str, runs: Sequence[Run]) -> None:
    """Print a title and one line per run."""
    print(title if runs else f"{title} none")
    for run in runs:
        print(f"  {run.run_id}  {run.state}  {run.brief}".rstrip())
