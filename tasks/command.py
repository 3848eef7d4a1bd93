"""The command `muster`: its verbs, by the name of the function that does each.

A verb's module is imported once it is called: a typing error costs nothing, and `--help` little.
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

#: By group: verb, where its function is, what it does.
_VERBS = {
    "Runs": (
        ("init", "tasks.train.deploying:init", "write a run spec for the training in a directory"),
        ("train", "flows.train:command", "run a spec here, to its end"),
        ("submit", "tasks.train.deploying:submit", "queue a run of a spec"),
        ("deploy", "tasks.train.deploying:deploy", "have a spec started from the UI, or by a cron"),
        ("pipeline", "flows.pipeline:command", "run several specs in sequence"),
        ("ls", "tasks.train.runs:ls", "list runs, newest first"),
        ("show", "tasks.train.runs:show", "show a run: what it does, or what it died of"),
        ("why", "tasks.train.runs:why", "say why a run waits, or what has become of it"),
        ("explain", "tasks.train.runs:explain", "tell the whole story of a run"),
        ("metrics", "tasks.train.runs:metrics", "print the figures of a run's training"),
        ("logs", "tasks.train.runs:logs", "show what a run's components have written"),
        ("cancel", "tasks.train.runs:cancel", "end a run"),
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
#: By name, in the order of the list.
NAMES = tuple(name for verbs in _VERBS.values() for name, *_ in verbs)
#: What `muster` alone does.
_ALONE = "overview"


def _app(called: str = "") -> App:
    """
    Args:
        called: The first word. Where it is a verb, the help of that is its function's.
    """
    app = App(
        name="muster",
        help="RL post-training on shared machines: runs, their queue, and what keeps them true.",
        help_epilogue=""
        if called in NAMES
        else "`muster VERB --help` says more. Without a verb: what runs, waits and failed "
        "last. Completion for your shell: `muster --install-completion`.",
        help_flags=("--help", "-h"),
        version=lambda: version("muster"),
        default_parameter=DEFAULT,
    )
    for index, (title, verbs) in enumerate(_VERBS.items()):
        group = Group(title, sort_key=index)
        for name, function, text in verbs:
            app.command(function, name=name, help=None if name == called else text, group=group)
    app.command("tasks.train.runs:overview", name=_ALONE, show=False)
    app.register_install_completion_command(help="Set up completion for your shell.")
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: the exit code of the verb; 2 where there is no such verb, or it can't read what it
    was given."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words and not words[0].startswith("-") and words[0] not in NAMES:
        meant = suggest_name(words[0], NAMES) or f"they are {', '.join(NAMES)}"
        print(f"muster has no verb {words[0]!r}: {meant}", file=sys.stderr)
        return EXIT_INVALID
    # Prefect reads it when it is imported, and would report to its makers and say so.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # A project may have folders of our packages' names.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        # First of all: what lies in the home leads to servers, passwords and processes.
        muster_home()
        # Prefect reads them as it is imported. A working directory that was removed has none.
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
    """What a verb and its arguments ask for, in this process; see `main`."""
    return run(_app(words[0] if words else ""), words or [_ALONE])


def find_server() -> None:
    """Where no PREFECT_API_URL is set, the server is that of the stack that runs in this
    MUSTER_HOME. Its password is known here."""
    with suppress(OSError):
        if (muster_home() / "stack" / "stack.json").exists():
            from deployments.stack.state import to_reach_stack

            os.environ.update(to_reach_stack(_server_set()))


def _server_set() -> str | None:
    """In the environment or in Prefect's profile; Prefect itself would read both for good."""
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
