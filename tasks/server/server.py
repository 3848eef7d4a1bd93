"""The Prefect server of a run: the configured server, or a temporary server for this run only."""

from __future__ import annotations

import logging
import os
import sqlite3
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
    PREFECT_UI_URL,
    temporary_settings,
)
from prefect.utilities.urls import url_for

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.containment import probe
from tasks.processes.guarded import Command
from tasks.processes.own_modules import make_own_command
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegistration
from tasks.processes.services import Services
from tasks.record.causes import read_tail
from tasks.record.places import make_server_password, muster_home, read_own_file
from tasks.server.flow_runs import ProxyAway, ServerAway, ServerRefuses, connect_to_server
from tasks.spec.errors import Fault, InvalidSpec, MusterError, RunEnded
from tasks.spec.probes import ReadyProbe
from tasks.spec.run import RunSpec
from tasks.spec.ui_pages import make_page_url

_log = logging.getLogger(__name__)

#: Name of the component that runs a temporary server.
_NAME = "prefect-server"
#: File name of the server's SQLite database.
_DATABASE = "prefect.db"
#: Longest wait for the start of a temporary server, in seconds.
_START_TIMEOUT_S = 120.0
#: Longest wait, in seconds, until Prefect has sent its pending log lines and events. The wait takes
#: place before the server is stopped.
_FLUSH_TIMEOUT_S = 5.0

#: True if the Prefect server of this context is a temporary server.
_is_temporary: ContextVar[bool] = ContextVar("is_temporary", default=False)


class NoServer(MusterError):
    """No Prefect server is available. The user must start a server, or unset PREFECT_API_URL."""


def find_page_url(kind: str, object_id: object) -> str | None:
    """Return the URL of an object's page in the UI of the configured Prefect server.

    Args:
        kind: Kind of the object in Prefect, such as `flow-run` or `deployment`.
        object_id: Id of the object.

    Returns:
        The URL, or None if no address of the UI is configured.
    """
    ui_url = PREFECT_UI_URL.value()
    url = url_for(kind, obj_id=str(object_id))
    if not ui_url or url is None:
        return None
    has_password = bool(PREFECT_API_AUTH_STRING.value())
    return make_page_url(ui_url, url.removeprefix(ui_url), has_password=has_password)


@contextmanager
def prefect_server(password: str | None = None) -> Iterator[str]:
    """Yield the API address of a Prefect server that answers.

    If `PREFECT_API_URL` is set in the environment or in the Prefect profile, the server at that
    address is used. Otherwise, a temporary server with an empty database is started. The temporary
    server ends with the context or with this process, even if this process is killed.

    Args:
        password: `user:password` of a temporary server. Empty for a server without a password. None
            for the password of this MUSTER_HOME.

    Raises:
        NoServer: The configured server does not answer, or the temporary server did not start.
    """
    url = PREFECT_API_URL.value()
    if url:
        _require_answer(url)
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="muster-prefect-") as home:
        port_name = f"{_NAME}.port"
        ports = PortsReserved([port_name])
        url = f"http://127.0.0.1:{ports.numbers[port_name]}/api"
        # Start with a copy of an empty database of this Prefect release. Without the copy, the
        # server needs 5 s to create its tables.
        template = muster_home() / "cache" / f"prefect-{prefect.__version__}.db"
        if template.exists():
            (Path(home) / _DATABASE).write_bytes(read_own_file(template))
        if password is None:
            password = make_server_password()
        plan = _make_plan(Path(home), ports.numbers[port_name], url, password)
        register = RunRegistration.opened(plan.run_id, leftovers=(Path(home),))
        with (
            closing(register),
            # `Services` restarts a dead server. The run continues during the restart, and later
            # repeats all requests that the server did not accept.
            Services(plan, ports, lambda *event, **fields: None, register=register) as services,
        ):
            try:
                services.start(_NAME)
            except RunEnded:
                reason = services.failure.message if services.failure else services.stopped_by
                details = f"{reason}\n{read_tail(Path(home) / 'server.log', 2000)}".rstrip()
                raise NoServer(f"a temporary Prefect server did not start: {details}") from None
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
                    # Send Prefect's pending log lines and events while the server still runs.
                    # Otherwise, Prefect would try for a minute to reach the stopped server.
                    APILogWorker.drain_all(timeout=_FLUSH_TIMEOUT_S)
                    EventsWorker.drain_all(timeout=_FLUSH_TIMEOUT_S)


def find_lasting_api_url() -> str | None:
    """Return the API address of this context's Prefect server.

    Returns:
        The address. None without a configured server, or for a temporary server, which ends with
        this process.
    """
    return None if _is_temporary.get() else PREFECT_API_URL.value()


def read_configured_secrets(spec: RunSpec) -> dict[str, str]:
    """Return the values of the Prefect Secret blocks that a run spec names.

    The blocks are read from the Prefect server at PREFECT_API_URL.

    Returns:
        Mapping from the name of a block to its value.

    Raises:
        InvalidSpec: A block is missing or contains no text, or the server is temporary and
            therefore has no blocks.
        ServerAway: The server does not answer.
    """
    if not spec.secret_blocks:
        return {}
    api_url = find_lasting_api_url()
    if api_url is None:
        problem = "Muster can't read the Prefect Secret block {!r}: no Prefect server is set"
        problems = {name: problem.format(name) for name in spec.secret_blocks.values()}
        remedy = "set PREFECT_API_URL, or start a server (muster up)"
        raise _make_block_error(spec, problems, remedy)
    with connect_to_server(api_url) as client:
        return read_secrets(client, spec)


def read_secrets(client: SyncPrefectClient, spec: RunSpec) -> dict[str, str]:
    """Return the values of the Prefect Secret blocks that a run spec names.

    Args:
        client: Client of the Prefect server that stores the blocks.
        spec: The run spec.

    Returns:
        Mapping from the name of a block to its value.

    Raises:
        InvalidSpec: A block is missing or contains no text. The error lists each variable of the
            spec that uses such a block.
    """
    values: dict[str, str] = {}
    problems: dict[str, str] = {}
    for name in sorted({*spec.secret_blocks.values()}):
        try:
            block = client.read_block_document_by_name(name, "secret", include_secrets=True)
        except ObjectNotFound:
            problems[name] = f"there is no Prefect Secret block {name!r} on {client.api_url}"
            continue
        match block.data.get("value"):
            case str(value) if value and "\0" not in value:
                values[name] = value
            case _:
                problems[name] = (
                    f"the value of the Prefect Secret block {name!r} must be a text that is not "
                    "empty and has no zero byte"
                )
    if problems:
        remedy = "create the block with `muster secret set NAME`, or write another name"
        raise _make_block_error(spec, problems, remedy)
    return values


def _make_block_error(spec: RunSpec, problems: Mapping[str, str], remedy: str) -> InvalidSpec:
    """Return an error that lists each variable whose Secret block has a problem.

    Args:
        spec: The run spec.
        problems: Mapping from the name of a Secret block to the description of its problem.
        remedy: Advice for the user.
    """
    faults = (
        Fault(path=path, problem=problems[name], remedy=remedy)
        for path, name in spec.secret_blocks.items()
        if name in problems
    )
    return InvalidSpec(tuple(faults), f"the spec of run {spec.name!r}")


#: Module of the Prefect server that stores leases as files in PREFECT_HOME.
_LEASES_ON_DISK = "prefect.server.concurrency.lease_storage.filesystem"


def make_server_command(
    home: Path, port: int, address: str = "127.0.0.1", settings: Mapping[str, str] | None = None
) -> Command:
    """Return the command that starts a Prefect server.

    The server sends no usage statistics. In a browser, only the web pages of the server itself may
    use the server's API.

    Args:
        home: Folder for the database, the log and other files of the server.
        port: Port of the server.
        address: IP address on which the server listens.
        settings: Further environment variables with settings of Prefect, for example the URL of
            another database.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    }
    # A user may open the server's pages with the IP address or with the name `localhost`. So allow
    # requests from both origins.
    origins = dict.fromkeys(f"http://{host}:{port}" for host in (address, "localhost"))
    return Command(
        # Do not start the server with `prefect server start`, because the import of Prefect's
        # command line takes seconds.
        argv=(
            *make_own_command("tasks.server.sqlite_server"),
            "--factory",
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
            # By default, the server keeps leases in memory. Then a restart of the server would
            # cancel each starting run of a deployment with a concurrency limit.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": _LEASES_ON_DISK,
            # By default, the server writes the files of its UI into the virtual environment, which
            # several users may share.
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
    """Return the folder for the files of Prefect's UI. Each Prefect release has its own folder."""
    return muster_home() / "cache" / f"prefect-ui-{prefect.__version__}"


def _make_plan(home: Path, port: int, url: str, password: str) -> AttemptPlan:
    """Return the plan of a temporary Prefect server.

    Args:
        home: Folder for the server's files.
        port: Port of the server.
        url: API address of the server.
        password: `user:password`, or an empty string for a server without a password.
    """
    settings = {"PREFECT_SERVER_API_AUTH_STRING": password} if password else {}
    server = ComponentPlan(
        name=_NAME,
        command=make_server_command(home, port, settings=settings),
        ready=ReadyProbe(http=f"{url}/health", within_s=_START_TIMEOUT_S),
        live=None,
        on_exit_zero="fail",
    )
    run_id = f"{_NAME}-{os.getpid()}-{os.urandom(2).hex()}"
    return AttemptPlan(run_id=run_id, number=1, cwd=home, components=(server,), containment=probe())


def _save_template(database: Path, template: Path) -> None:
    """Save a new server's database as a template for later servers, which then start faster."""
    draft = template.with_name(f"{template.name}.{os.getpid()}")
    try:
        template.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(draft)) as copy:
            source.backup(copy)
        draft.replace(template)
    except (OSError, sqlite3.Error) as error:
        _log.warning(
            "Muster could not save a copy of the new Prefect database in %s, so later Prefect "
            "servers start more slowly: %s",
            template,
            error,
        )
        draft.unlink(missing_ok=True)


def _require_answer(url: str) -> None:
    """Check that a Prefect server answers requests.

    The request uses Prefect's client, which applies the configured password, proxy and certificate.

    Args:
        url: API address of the server.

    Raises:
        NoServer: The server or its proxy does not answer, or the server refuses the password.
    """
    try:
        with connect_to_server(url) as client:
            client.hello().raise_for_status()
    except (ProxyAway, ServerRefuses) as error:
        raise NoServer(str(error)) from None
    except ServerAway as error:
        remedy = (
            "start the server (`muster up`), or unset PREFECT_API_URL to use a temporary server"
        )
        raise NoServer(f"{error}: {remedy}") from None


def _is_critical(record: logging.LogRecord) -> bool:
    """Logging filter that accepts only log records of level CRITICAL."""
    return record.levelno >= logging.CRITICAL


def skip_event_retries() -> None:
    """Make Prefect give up at once if the server does not accept an event.

    Call this in a process with a temporary server. Otherwise, this process would exit late, because
    Prefect would repeatedly try to send pending events to the stopped server.
    """
    EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=2)


def hide_prefect_logs() -> None:
    """Keep Prefect's log lines out of the terminal. Prefect still sends them to its server.

    The function also hides Prefect's errors about log lines that the server rejects. The log files
    of the run contain the rejected lines, too.
    """
    os.environ.setdefault("DO_NOT_TRACK", "1")
    logging.raiseExceptions = False
    # Add a filter instead of setting a level. Prefect later configures its loggers again, which
    # resets levels but keeps filters.
    logging.getLogger("prefect._internal.concurrency").addFilter(_is_critical)
    for name in list(logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.CRITICAL)
