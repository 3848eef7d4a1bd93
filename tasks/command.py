"""The command `muster` and the table of its subcommands, which are called *verbs*.

The module of a verb is imported only when the verb is called. `muster --help` and the message about
an unknown verb are therefore fast.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cyclopts import App, Group

from tasks.queue.forked_commands import run_in_fork
from tasks.record.places import muster_home
from tasks.show.arguments import DEFAULT, EXIT_DONE, EXIT_INTERRUPTED, EXIT_INVALID, run
from tasks.show.early_check import report_spec_faults
from tasks.spec.formatting import suggest_name
from tasks.spec.own_settings import InvalidVariable
from tasks.spec.ownership import UntrustedPath, refuse_foreign_settings
from tasks.spec.prefect_address import find_configured_server
from tasks.spec.service_links import describe_invalid_setting, drop_service_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb (subcommand of `muster`) with its texts for the help."""

    name: str
    #: Function of the verb as `module:function`, which is imported when the verb is called.
    function: str
    #: One line about the verb, for the list of all verbs in the help.
    summary: str
    #: A complete command as an example for the help.
    example: str
    #: Name of the document in the folder `docs` that explains how to use the verb.
    guide: str
    #: Functions that check the spec in the verb's arguments, as `module:function`. All checks run
    #: before the slow import of the verb's function, so that faults of the spec are reported early.
    #: The function with the fastest import comes first.
    checks: tuple[str, ...] = ()
    #: True if the verb must wait while `muster up` starts the stack, because the verb needs the
    #: Prefect server of the stack.
    waits_for_stack: bool = False
    #: True if the verb may run in a process that is forked from the fork server of a worker. A
    #: forked process need not import Prefect. But the process has no controlling terminal, so it
    #: cannot ask for input.
    may_be_forked: bool = False
    #: Former names of the verb, which still work, but are not in the help.
    former_names: tuple[str, ...] = ()

    @property
    def epilogue(self) -> str:
        """Last lines of the verb's help, with the example and the guide."""
        return f"Example: `{self.example}`\n\nGuide: docs/{self.guide}"


#: Mapping from the name of a group in the help to its verbs (subcommands of `muster`).
VERBS = {
    "Runs": (
        Verb(
            name="init",
            function="tasks.train.deploying:init",
            summary="write a run spec for the training in a folder",
            example="muster init",
            guide="your-training.md",
        ),
        Verb(
            name="train",
            function="flows.train:command",
            summary="run a spec on this machine, until the run ends",
            example="muster train muster.yaml --set progress.total=100",
            guide="your-training.md",
            checks=("tasks.spec.loading:load_spec", "tasks.train.spec_check:load_checked_spec"),
            waits_for_stack=True,
            may_be_forked=True,
        ),
        Verb(
            name="submit",
            function="tasks.train.deploying:submit",
            summary="put a run of a spec into the queue",
            example="muster submit muster.yaml --watch",
            guide="queue-runs.md",
            checks=("tasks.spec.loading:load_spec",),
            waits_for_stack=True,
            may_be_forked=True,
        ),
        Verb(
            name="check",
            function="tasks.train.checking:check",
            summary="check a spec, and show where its run would fit",
            example="muster check muster.yaml",
            guide="your-training.md",
            checks=("tasks.spec.pipeline:load_any_spec",),
            may_be_forked=True,
        ),
        Verb(
            name="retry",
            function="flows.train:retry",
            summary="start another attempt of a run that has ended",
            example="muster retry latest --from-step 20",
            guide="resume.md",
            waits_for_stack=True,
        ),
        Verb(
            name="deploy",
            function="tasks.train.deploying:deploy",
            summary="let the Prefect UI or a schedule start runs of a spec",
            example="muster deploy muster.yaml --cron '0 3 * * *'",
            guide="schedules.md",
            checks=("tasks.spec.loading:load_spec",),
            waits_for_stack=True,
        ),
        Verb(
            name="deployments",
            function="tasks.train.deployed:deployments",
            summary="list deployments with their schedules",
            example="muster deployments",
            guide="schedules.md",
            waits_for_stack=True,
            may_be_forked=True,
        ),
        Verb(
            name="undeploy",
            function="tasks.train.deployed:undeploy",
            summary="remove a deployment with its schedules",
            example="muster undeploy NAME",
            guide="schedules.md",
            waits_for_stack=True,
        ),
        Verb(
            name="pipeline",
            function="flows.pipeline:command",
            summary="run a pipeline of runs and steps",
            example="muster pipeline deployments/pipelines/quickstart-sft-then-grpo.yaml",
            guide="pipelines.md",
            checks=("tasks.spec.pipeline:load_pipeline",),
            waits_for_stack=True,
        ),
        Verb(
            name="ls",
            function="tasks.train.run_verbs:ls",
            summary="list runs, newest first",
            example="muster ls --state failed",
            guide="queue-runs.md",
            may_be_forked=True,
        ),
        Verb(
            name="show",
            function="tasks.train.run_verbs:show",
            summary="show the state of a run, or why it failed",
            example="muster show latest",
            guide="failed-runs.md",
            may_be_forked=True,
        ),
        Verb(
            name="why",
            function="tasks.train.run_verbs:why",
            summary="say why a run waits, is slow, or has failed",
            example="muster why latest",
            guide="failed-runs.md",
            may_be_forked=True,
        ),
        Verb(
            name="explain",
            function="tasks.train.run_verbs:explain",
            summary="print the whole history of a run",
            example="muster explain latest",
            guide="failed-runs.md",
            may_be_forked=True,
        ),
        Verb(
            name="metrics",
            function="tasks.train.run_verbs:metrics",
            summary="print the metrics of a run's training",
            example="muster metrics latest",
            guide="queue-runs.md",
            may_be_forked=True,
        ),
        Verb(
            name="logs",
            function="tasks.train.logs_command:logs",
            summary="print the logs of a run's components",
            example="muster logs latest trainer -f",
            guide="failed-runs.md",
        ),
        Verb(
            name="checkpoints",
            function="tasks.train.run_verbs:checkpoints",
            summary="list the checkpoints of a run",
            example="muster checkpoints latest",
            guide="resume.md",
            may_be_forked=True,
        ),
        Verb(
            name="lineage",
            function="tasks.train.lineage_command:lineage",
            summary="show the data and the outputs of a run",
            example="muster lineage latest",
            guide="lineage.md",
            may_be_forked=True,
        ),
        Verb(
            name="cancel",
            function="tasks.train.run_verbs:cancel",
            summary="stop a run",
            example="muster cancel latest",
            guide="queue-runs.md",
            may_be_forked=True,
        ),
    ),
    "Queue and cluster": (
        Verb(
            name="queue",
            function="tasks.queue.command:app",
            summary="show the queue; drain nodes, set limits",
            example="muster queue drain NODE",
            guide="queue.md",
            waits_for_stack=True,
            may_be_forked=True,
        ),
        Verb(
            name="plan",
            function="tasks.rollout.__main__:plan",
            summary="show the inference servers of a spec",
            example="muster plan muster.yaml",
            guide="serve-rollouts.md",
        ),
        Verb(
            name="secret",
            function="tasks.train.secret_command:app",
            summary="store a secret on the Prefect server",
            example="muster secret set hf-token",
            guide="security.md",
            waits_for_stack=True,
        ),
        Verb(
            name="cleanup",
            function="tasks.ray.nodes:sweep_run",
            summary="end leftover processes of a run on a Ray cluster",
            example="muster cleanup --address http://10.0.0.1:8265 --run-id RUN",
            guide="ray.md",
            former_names=("sweep",),
        ),
        Verb(
            name="preflight",
            function="flows.preflight:command",
            summary="check every node of a Ray cluster",
            example="muster preflight --address http://10.0.0.1:8265",
            guide="ray.md",
        ),
    ),
    "This machine": (
        Verb(
            name="up",
            function="deployments.stack.command:up",
            summary="start the server, the UI, the queue and a worker",
            example="muster up",
            guide="your-cluster.md",
        ),
        Verb(
            name="status",
            function="deployments.stack.command:status",
            summary="show which programs of `muster up` work",
            example="muster status",
            guide="supervision.md",
        ),
        Verb(
            name="down",
            function="deployments.stack.command:down",
            summary="stop the programs of `muster up`, and the runs",
            example="muster down",
            guide="first-run.md",
        ),
        Verb(
            name="docs",
            function="tasks.show.docs_command:docs",
            summary="list the documents of Muster, or print one of them",
            example="muster docs run-spec",
            guide="commands.md",
        ),
        Verb(
            name="reconcile",
            function="tasks.upkeep.reconcile:reconcile",
            summary="end leftover processes of runs that were killed on this host",
            example="muster reconcile",
            guide="supervision.md",
        ),
        Verb(
            name="prune",
            function="tasks.upkeep.prune:prune",
            summary="delete files of ended runs",
            example="muster prune --days 30",
            guide="operations.md",
        ),
    ),
}
#: Names of all verbs (subcommands of `muster`), in the order of the help.
NAMES = tuple(verb.name for verbs in VERBS.values() for verb in verbs)
#: Names of the verbs that may run in a process that is forked from the fork server of a worker.
_FORKED_VERBS = {verb.name for verbs in VERBS.values() for verb in verbs if verb.may_be_forked}
#: Mapping from the former name of a verb to its present name.
FORMER_NAMES = {
    former: verb.name for verbs in VERBS.values() for verb in verbs for former in verb.former_names
}
#: Verb that runs if `muster` is called without arguments. The help does not list this verb.
_DEFAULT_VERB = "overview"


def _build_app(called: str = "") -> App:
    """Return the Cyclopts app with all verbs, which are the subcommands of `muster`.

    Args:
        called: The first argument of `muster`. If this argument is a verb, the function of the verb
            is imported, because its docstring is the help of the verb.
    """
    epilogue = (
        "`muster VERB --help` explains a verb, with an example. `muster` without a verb shows "
        "the running and waiting runs, and the runs that failed last."
    )
    app = App(
        name="muster",
        help="Run RL post-training on shared GPU machines: queue runs, watch them, clean up.",
        help_epilogue="" if called in NAMES else epilogue,
        help_flags=("--help", "-h"),
        version=_read_version,
        default_parameter=DEFAULT,
    )
    for index, (title, verbs) in enumerate(VERBS.items()):
        group = Group(title, sort_key=index)
        for verb in verbs:
            if verb.name != called:
                app.command(verb.function, name=verb.name, help=verb.summary, group=group)
                continue
            # Import the function of this verb, because its docstring is the help that the user may
            # request.
            command = _import_function(verb.function)
            if isinstance(command, App):
                command.help_epilogue = verb.epilogue
                app.command(verb.function, name=verb.name, group=group)
            else:
                app.command(command, name=verb.name, group=group, help_epilogue=verb.epilogue)
    app.command("tasks.train.run_verbs:overview", name=_DEFAULT_VERB, show=False)
    if called not in NAMES:
        # Add this option only if the first argument of `muster` is no verb. The option makes
        # cyclopts import further modules, which would delay every verb.
        app.register_install_completion_command(
            help="Install command-line completion of `muster` for your shell."
        )
    return app


def _read_version() -> str:
    """Return the version of Muster that is installed."""
    # Import this module only here, because its import takes long and few commands need it.
    from importlib.metadata import version

    return version("muster")


def _import_function(place: str) -> Any:
    """Import a module, and return the function or app in it.

    Args:
        place: Module and name of the function or app, as `module:name`.
    """
    module, name = place.split(":")
    return getattr(import_module(module), name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `muster`.

    Args:
        arguments: Arguments of the command. If None, the arguments of this process are used.

    Returns:
        The exit code of the subcommand. 2 if the subcommand is unknown or its arguments are
        invalid.
    """
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words:
        words[0] = FORMER_NAMES.get(words[0], words[0])
    if words and not words[0].startswith("-") and words[0] not in NAMES:
        suggestion = suggest_name(words[0], NAMES) or f"choose from {', '.join(NAMES)}"
        print(f"muster has no command {words[0]!r}: {suggestion}", file=sys.stderr)
        return EXIT_INVALID
    # Turn off the telemetry of Prefect. Prefect reads this variable during its import, so set the
    # variable before that.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    drop_service_variables()
    # Keep the working directory out of `sys.path` of child processes, because a project may contain
    # folders with the names of Muster's packages.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        # First check that no other user can write to the Muster home directory. Muster trusts the
        # addresses of servers, the passwords and the process ids in its files.
        muster_home()
        # During its import, Prefect reads settings from the working directory. So first check that
        # no other user has written these settings. A deleted working directory contains no
        # settings.
        with suppress(FileNotFoundError):
            refuse_foreign_settings(Path.cwd())
    except (InvalidVariable, UntrustedPath) as error:
        print(f"{error}\nNothing was done.", file=sys.stderr)
        return EXIT_INVALID
    warn_about_missing_init()
    find_server()
    is_forked = not words or words[0] in _FORKED_VERBS
    if is_forked and (code := run_in_fork(words)) is not None:
        return code
    logging.getLogger("prefect.plugins").addFilter(_is_no_invalid_setting)
    try:
        return do(words)
    except ValueError as error:
        # Import this module only here, because its import takes long.
        from pydantic import ValidationError

        # Prefect raises a ValidationError for an invalid setting. The error does not name the
        # environment variable or the file, so print a better message.
        if not isinstance(error, ValidationError) or not error.title.endswith("Settings"):
            raise
        message = describe_invalid_setting(error.errors(include_url=False))
        print(f"{message}\nNothing was done.", file=sys.stderr)
        return EXIT_INVALID


def warn_about_missing_init() -> None:
    """Print a warning if this process is process 1 of a PID namespace, such as a container.

    The kernel makes process 1 the parent of each process whose own parent has ended. Muster does
    not reap these processes, so they stay as zombies and use up the limit of processes.
    """
    if os.getpid() == 1:
        print(
            "warning: muster is process 1 of this container, so nothing removes ended processes "
            "(zombies). Start the container with an init: `docker run --init`, `init: true` in a "
            "compose file, or `tini` as the entrypoint.",
            file=sys.stderr,
        )


def _is_no_invalid_setting(record: logging.LogRecord) -> bool:
    """Logging filter that returns False for Prefect's own report on an invalid setting.

    Prefect logs the error in several lines, and raises the same error later. The log entry is not
    needed, because `main` prints the raised error in one line.
    """
    # Import this module only here, because its import takes long.
    from pydantic import ValidationError

    return record.exc_info is None or not isinstance(record.exc_info[1], ValidationError)


def do(words: Sequence[str]) -> int:
    """Run a verb (subcommand of `muster`) in this process, and return the exit code.

    Args:
        words: The verb and its arguments.
    """
    called = words[0] if words else ""
    for verb in itertools.chain.from_iterable(VERBS.values()):
        if verb.name != called:
            continue
        for check in verb.checks:
            code = report_spec_faults(_import_function(check), words[1:])
            if code != EXIT_DONE:
                return code
        if verb.waits_for_stack and not {"--help", "-h"} & {*words}:
            try:
                wait_for_stack()
            except KeyboardInterrupt:
                print("Interrupted.", file=sys.stderr)
                return EXIT_INTERRUPTED
    return run(_build_app(called), words or [_DEFAULT_VERB])


def wait_for_stack() -> None:
    """Wait while `muster up` starts the stack of this MUSTER_HOME, then use its Prefect server."""
    with suppress(OSError):
        if (muster_home() / "stack" / "starting.json").exists():
            from deployments.stack.state import wait_while_starting

            wait_while_starting(
                find_configured_server(), lambda text: print(text, file=sys.stderr, flush=True)
            )
            find_server()


def find_server() -> None:
    """Set the Prefect settings for the server of the local stack, if this MUSTER_HOME has a stack.

    The settings include the password of the stack's server. If the user has configured the
    PREFECT_API_URL of another server, nothing is set.
    """
    with suppress(OSError):
        if (muster_home() / "stack" / "stack.json").exists():
            from deployments.stack.state import to_reach_stack

            os.environ.update(to_reach_stack(find_configured_server()))


if __name__ == "__main__":
    raise SystemExit(main())
