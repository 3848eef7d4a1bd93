"""The Prefect server that a run talks to: the one that is set, or a temporary one of its own."""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path

import prefect
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogWorker, PrefectConsoleHandler
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.containment import probe
from tasks.processes.guarded import Command
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegister
from tasks.processes.services import Services
from tasks.record.causes import read_tail
from tasks.record.places import make_server_password, muster_home, read_own_file
from tasks.server.flow_runs import ServerAway, ServerRefuses, talking_to
from tasks.spec.errors import Fault, InvalidSpec, MusterError, RunEnded
from tasks.spec.probes import ReadyProbe
from tasks.spec.run import RunSpec

_log = logging.getLogger(__name__)

_NAME = "prefect-server"
_DATABASE = "prefect.db"
_START_WITHIN_S = 120.0
_FLUSH_WITHIN_S = 5.0


#: Whether the server of this context is a temporary one.
_is_temporary: ContextVar[bool] = ContextVar("is_temporary", default=False)


class NoServer(MusterError):
    """There is no Prefect server to talk to: start it, or leave PREFECT_API_URL unset."""


@contextmanager
def prefect_server(password: str | None = None) -> Iterator[str]:
    """The API address of a Prefect server that answers.

    That of `PREFECT_API_URL`, where it is set (in the environment or the Prefect profile). Else a
    temporary server, with a database of its own, that ends with the context or with this process,
    however it ends. One that dies before is started again.

    Args:
        password: `user:password` of a temporary server; empty: it lets everybody in; None: that of
            this MUSTER_HOME.

    Raises: NoServer.
    """
    url = PREFECT_API_URL.value()
    if url:
        _check(url)
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="muster-prefect-") as home:
        port_name = f"{_NAME}.port"
        ports = PortsReserved([port_name])
        url = f"http://127.0.0.1:{ports.numbers[port_name]}/api"
        # An empty database of this Prefect release: to make one takes its server some 5 s.
        template = muster_home() / "cache" / f"prefect-{prefect.__version__}.db"
        if template.exists():
            (Path(home) / _DATABASE).write_bytes(read_own_file(template))
        if password is None:
            password = make_server_password()
        plan = _plan(Path(home), ports.numbers[port_name], url, password)
        register = RunRegister.opened(plan.run_id, leftovers=(Path(home),))
        with (
            closing(register),
            # One that dies is started again: the flow tells it what it did not take in, and the
            # run goes on meanwhile.
            Services(plan, ports, lambda *event, **fields: None, register=register) as services,
        ):
            try:
                services.start(_NAME)
            except RunEnded:
                why = services.failure.message if services.failure else services.stopped_by
                said = f"{why}\n{read_tail(Path(home) / 'server.log', 2000)}".rstrip()
                raise NoServer(f"a temporary Prefect server did not start: {said}") from None
            if not template.exists():
                _save_template(Path(home) / _DATABASE, template)
            settings = {
                PREFECT_API_URL: url,
                PREFECT_API_AUTH_STRING: password or None,
                PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
            }
            with temporary_settings(settings):
                token = _is_temporary.set(True)
                try:
                    yield url
                finally:
                    _is_temporary.reset(token)
                    # What Prefect holds back: without a server it would try again for a minute.
                    APILogWorker.drain_all(timeout=_FLUSH_WITHIN_S)
                    EventsWorker.drain_all(timeout=_FLUSH_WITHIN_S)


def lasting_api_url() -> str | None:
    """The API address of this context's Prefect server; None for one that ends with this process,
    and for none at all."""
    return None if _is_temporary.get() else PREFECT_API_URL.value()


def secrets_here(spec: RunSpec) -> dict[str, str]:
    """`secrets_of` the server of this context; a temporary one has none. Raises: ServerAway."""
    if not spec.secret_blocks:
        return {}
    if (api_url := lasting_api_url()) is None:
        why = "the Prefect Secret block {!r} can't be read: no Prefect server is set"
        problems = {name: why.format(name) for name in spec.secret_blocks.values()}
        raise _unread(spec, problems, "set PREFECT_API_URL, or start a server (muster up)")
    with talking_to(api_url) as client:
        return secrets_of(client, spec)


def secrets_of(client: SyncPrefectClient, spec: RunSpec) -> dict[str, str]:
    """The values of the Prefect Secret blocks that a spec needs, by the names of the blocks.

    Raises: InvalidSpec, with a fault for each variable whose block is not there, or holds no text.
    """
    values, problems = dict[str, str](), dict[str, str]()
    for name in sorted({*spec.secret_blocks.values()}):
        try:
            found = client.read_block_document_by_name(name, "secret", include_secrets=True)
        except ObjectNotFound:
            problems[name] = f"there is no Prefect Secret block {name!r} on {client.api_url}"
            continue
        match found.data.get("value"):
            case str(value) if value and "\0" not in value:
                values[name] = value
            case _:
                problems[name] = f"the Prefect Secret block {name!r} holds no text"
    if problems:
        remedy = "make it in the UI (Blocks, Secret), or write another name"
        raise _unread(spec, problems, remedy)
    return values


def _unread(spec: RunSpec, problems: Mapping[str, str], remedy: str) -> InvalidSpec:
    faults = (
        Fault(path=path, problem=problems[name], remedy=remedy)
        for path, name in spec.secret_blocks.items()
        if name in problems
    )
    return InvalidSpec(tuple(faults), f"the spec of run {spec.name!r}")


def server_command(
    home: Path, port: int, address: str = "127.0.0.1", settings: Mapping[str, str] | None = None
) -> Command:
    """A Prefect server whose database lies in `home`; it reports to nobody, and of all pages of a
    browser only its own may ask it.

    Args:
        address: on which it listens.
        settings: of Prefect, beside these; another database for example.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    # The pages ask it by its address, by whichever name they were opened.
    origins = dict.fromkeys(f"http://{host}:{port}" for host in (address, "localhost"))
    return Command(
        # The server without Prefect's command line, which takes seconds to load.
        argv=(
            *(sys.executable, "-P", "-m", "tasks.server.sqlite_server", "--factory"),
            "prefect.server.api.server:create_app",
            *("--host", address, "--port", str(port)),
            *("--log-level", "warning", "--timeout-keep-alive", "30"),
        ),
        env={
            **inherited,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"http://{address}:{port}/api",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # By default the server writes into its virtual environment, which users may share.
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(_ui_folder()),
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "DO_NOT_TRACK": "1",
            **(settings or {}),
        },
        cwd=home,
        log=home / "server.log",
        grace_s=5.0,
    )


def _ui_folder() -> Path:
    """Return where the servers of this home keep the files of Prefect's UI, for one release."""
    return muster_home() / "cache" / f"prefect-ui-{prefect.__version__}"


def _plan(home: Path, port: int, url: str, password: str) -> AttemptPlan:
    settings = {"PREFECT_SERVER_API_AUTH_STRING": password} if password else {}
    server = ComponentPlan(
        name=_NAME,
        command=server_command(home, port, settings=settings),
        ready=ReadyProbe(http=f"{url}/health", within_s=_START_WITHIN_S),
        live=None,
        on_exit_zero="fail",
    )
    run_id = f"{_NAME}-{os.getpid()}-{os.urandom(2).hex()}"
    return AttemptPlan(run_id=run_id, number=1, cwd=home, components=(server,), containment=probe())


def _save_template(database: Path, template: Path) -> None:
    draft = template.with_name(f"{template.name}.{os.getpid()}")
    try:
        template.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(draft)) as copy:
            source.backup(copy)
        draft.replace(template)
    except (OSError, sqlite3.Error) as error:
        _log.warning("no template of Prefect's database kept in %s: %s", template, error)
        draft.unlink(missing_ok=True)


def _check(url: str) -> None:
    """By Prefect's own client, which knows the password, and a proxy or certificate on the way."""
    try:
        with talking_to(url) as client:
            client.hello().raise_for_status()
    except ServerRefuses as error:
        raise NoServer(str(error)) from None
    except ServerAway as error:
        remedy = "start it (`muster up`), or unset PREFECT_API_URL to run on a temporary one"
        raise NoServer(f"{error}: {remedy}") from None


def _is_critical(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


def await_no_events() -> None:
    """Have Prefect's own events wait for no server that is away.

    For a process whose server is a temporary one: Prefect would try for some seconds to send each
    event, and the end of this process would wait for that.
    """
    EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=2)


def quieten_prefect() -> None:
    """The terminal tells the story; Prefect's own lines go to its server only.

    What a server that is away does not take is lost without a word: the run's own files have it.
    """
    os.environ.setdefault("DO_NOT_TRACK", "1")
    logging.raiseExceptions = False
    # A filter stays when Prefect sets its logging up again; a level does not.
    logging.getLogger("prefect._internal.concurrency").addFilter(_is_critical)
    for name in list(logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.CRITICAL)
