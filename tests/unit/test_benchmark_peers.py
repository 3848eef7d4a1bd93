"""What Muster is measured against: others' programs, as they are set up for it."""

from __future__ import annotations

import configparser
import shlex
import sys
from pathlib import Path

import pytest

from tests.benchmarks import peers, sglang_watchdog
from tests.benchmarks.peers import Job, Peer
from tests.benchmarks.report import NotHere

ARGV = ("python", "-c", "print('100 %')", "a b")


def configured(name: str, place: Path, *, ends_together: bool) -> str:
    """The configuration that a supervisor is started with."""
    [peer] = [one for one in peers.PEERS if one.name == name]
    commands = {"api": ("sleep", "9"), "trainer": ARGV}
    job = Job(place=place, commands=commands, ends_together=ends_together, grace_s=2)

    arguments = peer.configure(job)

    [path] = [Path(one) for one in arguments if Path(one).is_file()]
    return path.read_text()


def test_supervisord_ends_all_with_the_first_death_only_where_it_shall(tmp_path: Path) -> None:
    alone = configured("supervisord", tmp_path, ends_together=False)

    together = configured("supervisord", tmp_path, ends_together=True)

    assert "[eventlistener:" not in alone
    assert "events=PROCESS_STATE_EXITED,PROCESS_STATE_FATAL" in together


@pytest.mark.parametrize(
    ("name", "section", "key"),
    [("supervisord", "program:trainer", "command"), ("circus", "watcher:trainer", "cmd")],
)
def test_a_command_reaches_its_component_as_it_is(
    name: str, section: str, key: str, tmp_path: Path
) -> None:
    config = configparser.RawConfigParser()

    config.read_string(configured(name, tmp_path, ends_together=True))

    # supervisord reads %% as %.
    command = config[section][key]
    assert tuple(shlex.split(command.replace("%%", "%"))) == ARGV


def test_honcho_starts_a_program_without_a_shell_around_it(tmp_path: Path) -> None:
    lines = configured("honcho", tmp_path, ends_together=True).splitlines()

    assert lines == ["api: exec sleep 9", f"trainer: exec {shlex.join(ARGV)}"]


def test_a_supervisor_that_is_not_installed_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stranger = Peer(name="strangerd", package="no-such-package", configure=lambda job: ())
    monkeypatch.setattr(peers, "PEERS", (stranger,))

    found, [missing] = peers.present()

    assert not found
    assert missing.way == "strangerd"
    assert missing.why == "no-such-package is not installed: `make bench` does it"


def test_the_watchdog_is_loaded_without_the_package_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    source = tmp_path / "watchdog.py"
    source.write_text(
        "from sglang.srt.anything import something\n"
        "class SubprocessWatchdog:\n"
        "    needs = something\n"
    )

    loaded = sglang_watchdog.loaded(source)

    assert loaded.__name__ == "SubprocessWatchdog"
    assert loaded.needs is None


def test_a_wheel_that_pip_does_not_get_is_no_fault_of_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(*arguments: object) -> None:
        raise sglang_watchdog.NoPackage("warning: old pip\nno network")

    monkeypatch.setattr(sglang_watchdog, "fetch", fetch)

    with pytest.raises(NotHere, match="pip did not get sglang's wheel: no network"):
        sglang_watchdog.source().__enter__()
