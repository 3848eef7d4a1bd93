"""Tests of the command `muster`: verbs, unknown verbs, exit codes, choice of the Prefect server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from deployments.stack.state import Stack, StackPlace, wait_while_starting
from tasks import command
from tasks.command import NAMES, main
from tasks.processes.identity import ProcessId
from tasks.record.places import make_server_password
from tasks.show.arguments import run
from tasks.spec.errors import Fault, InvalidSpec, MusterError
from tests.support.command_checks import find_command_error
from tests.support.documents import ROOT

STACK_URL = "http://127.0.0.1:4321/api"


@pytest.fixture(autouse=True)
def unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the environment variables that `muster` sets, and restore them after the test."""
    names = (
        "PYTHONSAFEPATH",
        "PREFECT_API_URL",
        "PREFECT_API_AUTH_STRING",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN_PATH",
    )
    for name in names:
        # `muster` may set this variable. Call `setenv` first, so that `monkeypatch` always restores
        # the original value after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "spec.yaml"], "muster has no command 'trian': did you mean `train`?"),
        (["log"], "muster has no command 'log': did you mean `logs`?"),
        (["sideways"], "muster has no command 'sideways': choose from init, train, submit, "),
        # `drain` is a subcommand of `muster queue`, but not a command of `muster`
        (["drain", "gpu-1"], "muster has no command 'drain': "),
    ],
)
def test_unknown_verb_is_rejected_with_the_nearest_verb(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words)

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [["trian"], ["--help"], ["-h"], ["--version"]])
def test_unknown_command_imports_no_command_module(words: list[str]) -> None:
    program = (
        "import sys\n"
        "from tasks.command import main\n"
        f"code = main({words!r})\n"
        "heavy = {name.partition('.')[0] for name in sys.modules} & {'prefect', 'ray', 'httpx'}\n"
        "verbs = [name for name in sys.modules if name.startswith(('flows', 'tasks.train.'))]\n"
        "print(code, sorted(heavy), verbs, file=sys.stderr)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    code = 2 if words == ["trian"] else 0
    assert done.stderr.splitlines()[-1] == f"{code} [] []", done.stderr


@pytest.mark.parametrize(
    "place", [verb.function for verbs in command.VERBS.values() for verb in verbs]
)
def test_each_verb_has_a_function(place: str) -> None:
    module, name = place.split(":")

    assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize(
    "verb", [verb for verbs in command.VERBS.values() for verb in verbs], ids=lambda verb: verb.name
)
def test_help_of_each_verb_has_a_valid_example_and_a_guide(
    verb: command.Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([verb.name, "--help"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert f"Example: {verb.example}" in " ".join(line.strip() for line in lines)
    assert f"Guide: docs/{verb.guide}" in [line.strip() for line in lines]
    assert (ROOT / "docs" / verb.guide).exists()
    assert find_command_error(verb.example) == ""


def test_names_of_verbs_are_unique(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--version"])

    assert len({*NAMES}) == len(NAMES)
    assert (code, capsys.readouterr().out) == (0, version("muster") + "\n")


class Gone(MusterError):
    """A `MusterError` with the default exit code."""


class Wrong(MusterError):
    """A `MusterError` with exit code 2, which means that the arguments are wrong."""

    exit_code = 2


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (0, 0, ""),
        (3, 3, ""),
        (None, 0, ""),
        (Gone("it is gone"), 1, "it is gone\n"),
        (Wrong("no such name"), 2, "no such name\nNothing was done.\n"),
        (
            InvalidSpec((Fault(path="gang", problem="must be a mapping"),), "spec.yaml"),
            2,
            "Nothing was started.\n",
        ),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (SystemExit(4), 4, ""),
    ],
)
def test_error_of_a_verb_sets_the_exit_code_and_the_only_message(
    end: BaseException | int | None, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb() -> int | None:
        if isinstance(end, BaseException):
            raise end
        return end

    exit_code = run(App(name="verb", default_command=verb), [])

    out, err = capsys.readouterr()
    assert exit_code == code
    assert out == ""
    if isinstance(end, InvalidSpec):
        assert err.endswith(message)
    else:
        assert err == message
    assert "Traceback" not in err


def test_closed_output_is_not_a_failure() -> None:
    program = (
        "import sys\n"
        "from cyclopts import App\n"
        "from tasks.show.arguments import run\n"
        "def verb() -> int:\n"
        "    for number in range(100_000):\n"
        "        print(number)\n"
        "    return 0\n"
        "sys.exit(run(App(default_command=verb), []))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None

    first = process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()

    assert (first, process.wait(), errors) == ("0\n", 0, "")


@pytest.fixture
def stack(muster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that writes a stack's state file, with this process as the supervisor."""
    monkeypatch.setenv("PREFECT_HOME", str(muster_home / "prefect"))

    def write(*, is_running: bool = True, **about: Any) -> None:
        supervisor = ProcessId.of(os.getpid())
        if not is_running:
            supervisor = supervisor.model_copy(update={"start_ticks": 1})
        place = StackPlace.of_home()
        place.directory.mkdir()
        place.save(
            Stack(
                stack_id="0" * 32,
                state="up",
                started_at=0.0,
                supervisor=supervisor,
                port=4321,
                api_url=STACK_URL,
                ui_url="http://127.0.0.1:4321",
                **({"has_own_password": True} | about),
                ray_dashboard="http://127.0.0.1:8265",
                ray_address="127.0.0.1:6379",
                ray_temp=Path("/nowhere"),
                worker="here",
                worker_health="http://127.0.0.1:8080/health",
            )
        )

    return write


def write_profiles(home: Path, *, active: str, **urls: str) -> None:
    """Write Prefect's `profiles.toml`, with a profile for each URL and a profile without a URL."""
    lines = [f'active = "{active}"']
    lines += [f'[profiles.{name}]\nPREFECT_API_URL = "{url}"' for name, url in urls.items()]
    lines += ["[profiles.local]", 'PREFECT_LOGGING_LEVEL = "INFO"']
    (home / "prefect").mkdir()
    (home / "prefect" / "profiles.toml").write_text("\n".join(lines))


def find_server_url() -> str | None:
    """Return the URL of the Prefect server that `muster` uses, or None for the default server."""
    command.find_server()
    return os.environ.get("PREFECT_API_URL")


def test_server_of_the_running_stack_is_the_default(
    stack: Callable[..., None],
) -> None:
    stack()

    assert find_server_url() == STACK_URL


@pytest.mark.parametrize("url", [None, STACK_URL, "http://localhost:4321/api/"])
def test_password_of_the_stack_is_used_for_its_server(
    stack: Callable[..., None], monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    stack()
    password = make_server_password()
    if url is not None:
        monkeypatch.setenv("PREFECT_API_URL", url)

    command.find_server()

    assert os.environ["PREFECT_API_AUTH_STRING"] == password
    assert os.environ["PREFECT_API_URL"] == (url or STACK_URL)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:4322/api", "http://prefect.example:4321/api", "http://[", ""]
)
def test_other_servers_do_not_get_the_password(
    stack: Callable[..., None], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    stack()
    make_server_password()
    monkeypatch.setenv("PREFECT_API_URL", url)

    command.find_server()

    assert "PREFECT_API_AUTH_STRING" not in os.environ


@pytest.mark.parametrize("about", [{"is_running": False}, {"has_own_password": False}])
def test_stopped_stack_or_stack_with_a_user_s_password_gets_no_password(
    stack: Callable[..., None], about: dict[str, bool]
) -> None:
    """`muster` must not send the password of a stack in two cases.

    - The stack is stopped, so another user's program may listen at the address of the stack.
    - The user chose the password, so the user must also give the password to `muster`.
    """
    stack(**about)
    make_server_password()

    command.find_server()

    assert "PREFECT_API_AUTH_STRING" not in os.environ


@pytest.mark.parametrize(
    ("mode", "expected"), [(None, ("token", "/a/file")), ("disabled", ("disabled", None))]
)
def test_ray_token_of_the_stack_is_used_unless_the_user_chose_a_mode(
    stack: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    mode: str | None,
    expected: tuple[str, str | None],
) -> None:
    stack(ray_auth={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/a/file"})
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)

    command.find_server()

    assert (os.environ["RAY_AUTH_MODE"], os.environ.get("RAY_AUTH_TOKEN_PATH")) == expected


def test_password_in_the_environment_is_kept(
    stack: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack()
    make_server_password()
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "operator:of-their-own")

    command.find_server()

    assert os.environ["PREFECT_API_AUTH_STRING"] == "operator:of-their-own"


def test_without_a_stack_no_server_is_found(stack: Callable[..., None]) -> None:
    assert find_server_url() is None


def test_stopped_stack_has_no_server(stack: Callable[..., None]) -> None:
    stack(is_running=False)

    assert find_server_url() is None


@pytest.mark.parametrize("text", ["", "{", json.dumps({"port": 1})])
def test_unreadable_state_file_of_a_stack_is_ignored(muster_home: Path, text: str) -> None:
    (muster_home / "stack").mkdir()
    (muster_home / "stack" / "stack.json").write_text(text)

    assert find_server_url() is None


@pytest.mark.parametrize("url", ["http://prefect.example:4200/api", ""])
def test_server_in_the_environment_is_kept(
    stack: Callable[..., None], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    stack()
    monkeypatch.setenv("PREFECT_API_URL", url)

    assert find_server_url() == url


@pytest.mark.parametrize(
    ("active", "chosen_profile", "is_set"),
    [
        ("far", None, True),
        ("local", None, False),
        # the profile in PREFECT_PROFILE is used instead of the active profile
        ("local", "far", True),
        ("far", "local", False),
        # the active profile does not exist, so the stack's server is used
        ("gone", None, False),
    ],
)
def test_server_of_the_prefect_profile_is_preferred_to_the_stack(
    stack: Callable[..., None],
    muster_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    active: str,
    chosen_profile: str | None,
    is_set: bool,
) -> None:
    stack()
    write_profiles(muster_home, active=active, far="http://prefect.example:4200/api")
    if chosen_profile is not None:
        monkeypatch.setenv("PREFECT_PROFILE", chosen_profile)

    assert find_server_url() == (None if is_set else STACK_URL)


@pytest.mark.parametrize("text", ["not toml", "", "active = 3", "profiles = 3\nactive = 'a'"])
def test_unreadable_profiles_are_ignored(
    stack: Callable[..., None], muster_home: Path, text: str
) -> None:
    stack()
    (muster_home / "prefect").mkdir()
    (muster_home / "prefect" / "profiles.toml").write_text(text)

    assert find_server_url() == STACK_URL


def test_verbs_use_the_server_of_the_stack(stack: Callable[..., None]) -> None:
    stack()
    program = (
        "from tasks.command import main\n"
        "code = main(['down', '--help'])\n"
        "from prefect.settings import PREFECT_API_URL\n"
        "print('asks', PREFECT_API_URL.value())\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    # `muster` runs in a child process. The state file of the stack contains the pid of this test's
    # process, which is alive, so `muster` finds that the stack is running.
    assert done.stdout.splitlines()[-1] == f"asks {STACK_URL}", done.stderr


@pytest.mark.parametrize("url", [None, STACK_URL])
def test_verb_waits_while_muster_up_starts_the_stack(
    stack: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str | None,
) -> None:
    place = StackPlace.of_home()
    if url is not None:
        monkeypatch.setenv("PREFECT_API_URL", url)
    stack()
    start = place.announce_start(4321)
    start.__enter__()
    errors_while_waiting: list[str] = []

    def finish_start(_seconds: float) -> None:
        errors_while_waiting.append(capsys.readouterr().err)
        start.__exit__(None, None, None)

    monkeypatch.setattr("deployments.stack.state.time.sleep", finish_start)

    command.wait_for_stack()

    [error] = errors_while_waiting
    assert f"`muster up` (pid {os.getpid()}) is starting the Muster stack" in error
    assert os.environ["PREFECT_API_URL"] == STACK_URL


@pytest.mark.parametrize("reason", ["another server", "killed", "not starting"])
def test_verb_does_not_wait_without_a_starting_stack(
    stack: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: str,
) -> None:
    place = StackPlace.of_home()
    stack()
    with place.announce_start(4321):
        content = json.loads((place.directory / "starting.json").read_text())
        if reason == "another server":
            monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4321/api")
        elif reason == "killed":
            content["process"]["start_ticks"] = 1
            (place.directory / "starting.json").write_text(json.dumps(content))
        else:
            (place.directory / "starting.json").unlink()

        command.wait_for_stack()

    assert capsys.readouterr().err == ""


def test_wait_for_a_starting_stack_ends_at_its_time_limit(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = StackPlace.of_home()
    place.directory.mkdir()
    lines: list[str] = []

    with place.announce_start(4321):
        wait_while_starting(None, lines.append, limit_s=0.0)

    assert "is not up after 0 s" in lines[-1] and "muster status" in lines[-1]


@pytest.mark.parametrize(
    ("words", "same_as"),
    [(["help"], ["--help"]), (["help", "docs"], ["docs", "--help"]), (["help", "sweep"], None)],
)
def test_help_is_also_a_verb(
    words: list[str], same_as: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words)
    text = capsys.readouterr().out

    assert code == 0
    assert text.startswith("Usage: muster")
    main(same_as or ["cleanup", "--help"])
    assert capsys.readouterr().out == text


def test_help_of_an_unknown_verb_names_the_nearest_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["help", "trian"])

    assert code == 2
    assert "did you mean `train`?" in capsys.readouterr().err


def test_help_shows_no_default_that_is_an_empty_text(capsys: pytest.CaptureFixture[str]) -> None:
    codes = [main([name, "--help"]) for name in ("docs", "ls", "logs", "show")]

    text = capsys.readouterr().out
    assert codes == [0, 0, 0, 0]
    assert 'default: ""' not in text
    assert "default: latest" in text
