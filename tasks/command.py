"""The command `muster` and the table of its verbs.

The module of a verb is imported only when the verb is called. `muster --help` and the message about
an unknown verb are therefore fast.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, Group

from tasks.queue.warm import run_warm
from tasks.record.places import muster_home
from tasks.show.arguments import DEFAULT, EXIT_INVALID, run
from tasks.spec.formatting import suggest_name
from tasks.spec.ownership import UntrustedPath, refuse_foreign_settings

#: Verbs by group of the help: name, function and short help.
_VERBS = {
    "Runs": (
        ("init", "tasks.train.deploying:init", "write a run spec for the training in a directory"),
        ("train", "flows.train:command", "run a spec here, to its end"),
        ("submit", "tasks.train.deploying:submit", "queue a run of a spec"),
        ("deploy", "tasks.train.deploying:deploy", "have a spec started from the UI, or by a cron"),
        ("pipeline", "flows.pipeline:command", "run several specs in sequence"),
        ("ls", "tasks.train.run_verbs:ls", "list runs, newest first"),
        ("show", "tasks.train.run_verbs:show", "show a run: what it does, or what it died of"),
        ("why", "tasks.train.run_verbs:why", "say why a run waits, or what has become of it"),
        ("explain", "tasks.train.run_verbs:explain", "tell the whole story of a run"),
        ("metrics", "tasks.train.run_verbs:metrics", "print the figures of a run's training"),
        ("logs", "tasks.train.run_verbs:logs", "show what a run's components have written"),
        ("cancel", "tasks.train.run_verbs:cancel", "end a run"),
    ),
    "Queue and cluster": (
        ("queue", "tasks.queue.command:app", "who waits for which GPUs; drain nodes, set limits"),
        ("plan", "tasks.rollout.__main__:plan", "show the layout of a spec's inference servers"),
        ("sweep", "tasks.ray.nodes:sweep_run", "end what a run has left on a Ray cluster"),
        ("preflight", "flows.preflight:command", "look at every node of a Ray cluster"),
    ),
    "This machine": (
        ("up", "deployments.stack.command:up", "start the lasting stack of this machine"),
        ("status", "deployments.stack.command:status", "say what of the stack answers"),
        ("down", "deployments.stack.command:down", "stop the stack and its runs"),
        ("reconcile", "tasks.upkeep.reconcile:reconcile", "finish what killed runs have left here"),
        ("prune", "tasks.upkeep.prune:prune", "show what may go of ended runs, and remove it"),
    ),
}
#: Names of all verbs, in the order of the help.
NAMES = tuple(name for verbs in _VERBS.values() for name, *_ in verbs)
#: Hidden verb that `muster` without arguments runs.
_DEFAULT_VERB = "overview"


def _build_app(called: str = "") -> App:
    """Return the app with all verbs.

    Args:
        called: The first argument of the command. If it is a verb, the help of this verb is the
            docstring of its function, which is imported for that.
    """
    epilogue = (
        "`muster VERB --help` says more. Without a verb: what runs, waits and failed "
        "last. Completion for your shell: `muster --install-completion`."
    )
    app = App(
        name="muster",
        help="RL post-training on shared machines: runs, their queue, and what keeps them true.",
        help_epilogue="" if called in NAMES else epilogue,
        help_flags=("--help", "-h"),
        version=lambda: version("muster"),
        default_parameter=DEFAULT,
    )
    for index, (title, verbs) in enumerate(_VERBS.items()):
        group = Group(title, sort_key=index)
        for name, function, text in verbs:
            app.command(function, name=name, help=None if name == called else text, group=group)
    app.command("tasks.train.run_verbs:overview", name=_DEFAULT_VERB, show=False)
    app.register_install_completion_command(help="Set up completion for your shell.")
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `muster`.

    Args:
        arguments: Arguments of the command. Default: those of this process.

    Returns:
        The exit code of the verb; 2 if the verb is unknown or its arguments are invalid.
    """
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words and not words[0].startswith("-") and words[0] not in NAMES:
        suggestion = suggest_name(words[0], NAMES) or f"they are {', '.join(NAMES)}"
        print(f"muster has no verb {words[0]!r}: {suggestion}", file=sys.stderr)
        return EXIT_INVALID
    # Turn off the telemetry of Prefect. Prefect reads the variable when it is imported.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # Keep the working directory out of `sys.path` of child processes: a project may contain folders
    # with the names of Muster's packages.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        # Check the home first: its files name servers, passwords and processes.
        muster_home()
        # Check this before Prefect is imported, because the import reads the settings. The working
        # directory may have been removed.
        with suppress(FileNotFoundError):
            refuse_foreign_settings(Path.cwd())
    except UntrustedPath as error:
        print(f"{error}\nNothing was done.", file=sys.stderr)
        return EXIT_INVALID
    find_server()
    if words[:1] == ["train"] and (code := run_warm(words)) is not None:
        return code
    return do(words)


def do(words: Sequence[str]) -> int:
    """Run a verb with its arguments in this process, and return the exit code."""
    return run(_build_app(words[0] if words else ""), words or [_DEFAULT_VERB])


def find_server() -> None:
    """Set the Prefect settings that reach the local stack, if this MUSTER_HOME has a stack.

    The stack is used if no other PREFECT_API_URL is configured. The settings include the password
    of the stack's server.
    """
    with suppress(OSError):
        if (muster_home() / "stack" / "stack.json").exists():
            from deployments.stack.state import to_reach_stack

            os.environ.update(to_reach_stack(_configured_server()))


def _configured_server() -> str | None:
    """Return the server address of the environment or of Prefect's active profile, or None.

    The profile is read without Prefect: once imported, Prefect would keep these settings.
    """
    if "PREFECT_API_URL" in os.environ:
        return os.environ["PREFECT_API_URL"]
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    with suppress(OSError, ValueError, KeyError, TypeError):
        profiles = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
        active = os.environ.get("PREFECT_PROFILE") or profiles["active"]
        return str(profiles["profiles"][active]["PREFECT_API_URL"])
    return None


if __name__ == "__main__":
    raise SystemExit(main())
