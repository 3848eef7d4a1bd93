"""Tests of checkpoints in stores: local folders, file://, memory:// and a real S3 server."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tasks.processes.hang_report import call_with_time_limit
from tasks.record import checkpoint_store
from tasks.record.checkpoint_folder import Completeness, Listing, list_checkpoints
from tasks.record.checkpoint_paths import check_access, parse_checkpoint_path, remove_path
from tasks.record.checkpoint_store import (
    StoreError,
    StoreLimits,
    StoreRefused,
    StoreUnreachable,
)
from tasks.record.checkpoints import (
    CheckpointGrowth,
    find_foreign_checkpoints,
    find_newest_step,
    find_superfluous_checkpoints,
    is_writing_checkpoint,
    plan_resume,
    remove_checkpoint,
)
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.record.states import RunState
from tasks.spec.errors import InvalidSpec
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import parse_spec
from tasks.spec.run import RunSpec
from tasks.train import session
from tasks.train.session import CheckpointsUnreadable, RunSession
from tasks.train.spec_check import check_spec
from tests.support import checkpoint_files as files
from tests.support.checkpoint_files import LAYOUTS, Write
from tests.support.s3_server import S3Server, running_s3_server

BUCKET = "checkpoints"


class Store:
    """A folder of checkpoints on a disk or in S3. A test uploads the files from a local folder."""

    def __init__(self, kind: str, scratch: Path, s3: S3Server | None) -> None:
        self.kind = kind
        self.scratch = scratch
        self._client = s3.client() if s3 is not None else None
        name = uuid.uuid4().hex
        self.url = {
            "local": str(scratch / "stored"),
            "file": f"file://{scratch}/stored",
            "memory": f"memory://{name}/run",
            "s3": f"s3://{BUCKET}/{name}/run",
        }[kind]

    def write(self, write: Write, *steps: int) -> None:
        """Write checkpoints of some steps to a local folder, and upload them to the store.

        Args:
            write: Function of `checkpoint_files` that writes one checkpoint.
            *steps: Steps of the checkpoints.
        """
        folder = self.scratch / "written"
        for step in steps:
            write(folder, step)
        # The last file marks the checkpoint as complete, so this file must reach the store last. So
        # store all files in the order in which the trainer wrote them.
        paths = [path for path in folder.rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
            self.put(path.relative_to(folder).as_posix(), path.read_bytes())
        shutil.rmtree(folder)

    def put(self, name: str, content: bytes) -> None:
        _, _, key = self.url.partition("://")
        if self.kind == "s3":
            prefix = key.removeprefix(f"{BUCKET}/")
            self._client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=content)
        elif self.kind == "memory":
            fsspec.filesystem("memory").pipe_file(f"/{key}/{name}", content)
        else:
            path = self.scratch / "stored" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def read(self, name: str) -> bytes:
        return (parse_checkpoint_path(self.url, Path("/")) / name).read_bytes()

    def names(self) -> set[str]:
        """Return the names of all files and folders in the store."""
        _, _, key = self.url.partition("://")
        if self.kind == "s3":
            prefix = key.removeprefix(f"{BUCKET}/") + "/"
            answer = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
            keys = [entry["Key"].removeprefix(prefix) for entry in answer.get("Contents", ())]
        elif self.kind == "memory":
            keys = [name.removeprefix(f"/{key}/") for name in fsspec.filesystem("memory").find(key)]
        else:
            keys = [path.name for path in (self.scratch / "stored").iterdir()]
        return {name.partition("/")[0] for name in keys}

    def list(self, suffix: str = "", *, is_running: bool = False) -> Listing:
        return list_checkpoints(f"{self.url}{suffix}", Path("/"), is_running=is_running)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        server.client().create_bucket(Bucket=BUCKET)
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A running S3 server, to which the S3 client of this process connects."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    yield s3_server
    s3_server.before_request = lambda method, path: None
    if not s3_server.is_running:
        s3_server.start()


@pytest.fixture(params=["local", "file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, muster_home: Path) -> Store:
    server = request.getfixturevalue("s3") if request.param == "s3" else None
    return Store(request.param, tmp_path, server)


@pytest.fixture
def s3_store(tmp_path: Path, muster_home: Path, s3: S3Server) -> Store:
    return Store("s3", tmp_path, s3)


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = StoreLimits(listing_s=3.0, request_s=3.0, total_s=60.0)
    monkeypatch.setattr(checkpoint_store, "LIMITS", limits)


def names_of(listing: Listing) -> list[str]:
    return [checkpoint.path.name for checkpoint in listing.complete]


# Tests that every kind of store must pass.


def test_newest_complete_checkpoint_is_found(store: Store) -> None:
    store.write(files.hugging_face, 9, 10, 100)

    listing = store.list(is_running=True)

    assert [checkpoint.step for checkpoint in listing.complete] == [9, 10, 100]
    assert str(listing.complete[-1].path) == f"{store.url}/checkpoint-100"


def test_missing_folder_has_no_checkpoints(store: Store) -> None:
    assert store.list() == Listing()


def test_pattern_selects_checkpoints(store: Store) -> None:
    store.write(files.plain_torch, 10, 20)
    store.put("other_30.pt", b"x")

    assert names_of(store.list("/step_*.pt")) == ["step_10.pt", "step_20.pt"]


def test_truncated_file_is_never_complete(store: Store) -> None:
    store.write(files.hugging_face, 10, 20)
    name = "checkpoint-20/model-00001-of-00002.safetensors"
    store.put(name, store.read(name)[:-1])

    listing = store.list()

    assert names_of(listing) == ["checkpoint-10"]
    assert "but its header requires" in listing.checkpoints[-1].reason


def test_empty_file_is_never_complete(store: Store) -> None:
    store.write(files.hugging_face, 10, 20)
    store.put("checkpoint-20/optimizer.pt", b"")

    assert names_of(store.list()) == ["checkpoint-10"]


def test_pointer_file_confirms_a_checkpoint(store: Store) -> None:
    store.write(files.verl_with_pointer, 10)
    store.put("global_step_20/actor/model_world_size_2_rank_0.pt", b"weights")
    store.put("latest_checkpointed_iteration.txt", b"10")

    assert names_of(store.list()) == ["global_step_10"]


def test_newest_checkpoint_of_unknown_layout_is_unknown_while_the_trainer_runs(
    store: Store,
) -> None:
    store.put("step_10/weights.dat", b"weights")
    store.put("step_20/weights.dat", b"weights")

    listing = store.list(is_running=True)

    assert [one.completeness for one in listing.checkpoints] == [
        Completeness.COMPLETE,
        Completeness.UNKNOWN,
    ]


def test_signature_changes_if_a_file_is_stored_again(store: Store) -> None:
    store.write(files.plain_torch, 10)
    before = store.list().complete[0].signature

    store.put("step_10.pt", store.read("step_10.pt") + b"\0")

    assert store.list().checkpoints[0].signature != before


def test_file_is_read_at_any_position(store: Store) -> None:
    content = bytes(range(256)) * 20_000
    store.put("step_10/data.bin", content)

    with (parse_checkpoint_path(store.url, Path("/")) / "step_10/data.bin").open("rb") as file:
        file.seek(-3, 2)
        tail = file.read()
        file.seek(1000)
        middle = file.read(2_000_000)
        file.seek(5)
        small_parts = [file.read(7) for _ in range(3)]

    assert tail == content[-3:]
    assert middle == content[1000:2_001_000]
    assert b"".join(small_parts) == content[5:26]


def test_removal_removes_only_the_checkpoint(store: Store) -> None:
    store.write(files.hugging_face, 10, 100)

    remove_path(store.list().complete[0].path)

    assert store.names() == {"checkpoint-100"}
    assert names_of(store.list()) == ["checkpoint-100"]


class Run:
    """A run with one failed attempt. The checkpoints of the run are in a store."""

    def __init__(self, url: str, *, run_id: str = "one", keep: int | None = None) -> None:
        self.place = RunPlace.of(run_id)
        trainer: dict[str, Any] = {
            "command": ["python", "${attempt.resume_from}"],
            "checkpoints": url,
        }
        if keep is not None:
            trainer["keep"] = keep
        data = {"name": "x", "workload": "sft", "components": {"trainer": trainer}}
        # A spec must not use memory://, which is only for tests. So set this URL after the
        # validation.
        valid = {**data, "components": {"trainer": {**trainer, "checkpoints": "/x"}}}
        spec = RunSpec.model_validate(valid)
        component = spec.components["trainer"].model_copy(update={"checkpoints": url})
        self.spec = spec.model_copy(update={"components": {"trainer": component}})
        self.attempts = [AttemptRecord.model_validate({"number": 1, "state": "failed"})]
        attempt = self.place.attempt(1)
        attempt.directory.mkdir(parents=True)
        attempt.spec.write_text(json.dumps(data))
        self.foreign = find_foreign_checkpoints(self.spec, self.spec, self.place, 1)

    def resume(self) -> str:
        plan = plan_resume(self.spec, self.place, self.attempts, self.foreign)
        return str(plan.path or "")

    def keep(self) -> None:
        for path in find_superfluous_checkpoints(
            self.spec, self.place, self.attempts, self.foreign
        ):
            remove_checkpoint(path)


def test_run_resumes_from_the_url_of_its_newest_checkpoint(store: Store) -> None:
    run = Run(store.url)
    store.write(files.hugging_face, 10, 20)

    assert run.resume() == f"{store.url}/checkpoint-20"


def test_checkpoints_from_before_the_run_are_neither_used_nor_removed(store: Store) -> None:
    store.write(files.plain_torch, 800, 900, 1000)
    run = Run(store.url, keep=2)
    assert run.resume() == ""
    store.write(files.plain_torch, 10, 20, 30, 40)

    run.keep()

    assert run.resume() == f"{store.url}/step_40.pt"
    kept = {800, 900, 1000, 30, 40}
    assert store.names() == {f"step_{step}.pt" for step in kept}


def test_keep_never_removes_incomplete_checkpoints(store: Store) -> None:
    run = Run(store.url, keep=1)
    store.write(files.hugging_face, 10, 20, 30, 40)
    store.put("checkpoint-10/optimizer.pt", b"")

    run.keep()

    assert store.names() == {"checkpoint-10", "checkpoint-30", "checkpoint-40"}


def test_run_of_another_host_finds_its_checkpoints(store: Store) -> None:
    run = Run(store.url)
    store.write(files.hugging_face, 10)
    # The run continues on another host. This host has the record of the run, but no files of the
    # run's attempts.
    run.place.attempt(1).spec.unlink()

    assert run.resume() == f"{store.url}/checkpoint-10"


def test_checkpoint_of_two_runs_in_one_folder_is_used_by_neither(store: Store) -> None:
    first = Run(store.url, run_id="first")
    second = Run(f"{store.url}/", run_id="second")
    store.write(files.hugging_face, 10)

    refusals = [
        plan_resume(run.spec, run.place, run.attempts, run.foreign).refused
        for run in (first, second)
    ]

    assert all(
        "writes its checkpoints to the same folder" in refusal[0].why for refusal in refusals
    )


def test_growth_of_an_unfinished_checkpoint_is_noticed(store: Store) -> None:
    store.write(files.hugging_face, 10)
    store.put("checkpoint-20/optimizer.pt", b"first part")
    growth = CheckpointGrowth(store.url, Path("/"))
    growth.seconds_since_growth()
    before = growth.seconds_since_growth()

    store.put("checkpoint-20/model.safetensors", b"second part")

    assert before is None
    assert growth.seconds_since_growth() is not None


@pytest.mark.parametrize(
    "kind",
    [
        "memory",
        pytest.param("file", marks=pytest.mark.thorough),
        pytest.param("s3", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_is_found_in_every_store(
    tmp_path: Path, kind: str, write: Write, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("s3") if kind == "s3" else None
    stored = Store(kind, tmp_path, server)
    stored.write(write, 9, 10, 100)

    assert [checkpoint.step for checkpoint in stored.list().complete][-1] == 100


# Tests with an object store that fails.


def test_stopped_server_is_no_empty_folder(s3_store: Store, s3: S3Server) -> None:
    s3_store.write(files.hugging_face, 10)
    run = Run(s3_store.url, keep=2)
    s3.stop()

    with pytest.raises(StoreUnreachable, match=f"cannot list {s3_store.url}"):
        s3_store.list()
    with pytest.raises(StoreUnreachable):
        run.resume()
    with pytest.raises(StoreUnreachable):
        find_newest_step(s3_store.url, Path("/"), {})
    with pytest.raises(StoreUnreachable):
        Run(s3_store.url, run_id="two")


@pytest.mark.usefixtures("short_deadlines")
def test_server_that_stops_while_files_are_read_makes_no_checkpoint_incomplete(
    s3_store: Store, s3: S3Server
) -> None:
    s3_store.write(files.hugging_face, 10, 20)
    reads: list[str] = []

    def stop_at_third_read(method: str, path: str) -> None:
        if method == "GET" and "/run/" in path:
            reads.append(path)
        if len(reads) >= 3:
            raise ConnectionAbortedError

    s3.before_request = stop_at_third_read

    with pytest.raises(StoreError):
        s3_store.list()

    s3.before_request = lambda method, path: None
    assert names_of(s3_store.list()) == ["checkpoint-10", "checkpoint-20"]


def test_slow_answers_are_awaited(s3_store: Store, s3: S3Server) -> None:
    s3_store.write(files.plain_torch, 10)
    s3.delay(0.3)

    assert names_of(s3_store.list()) == ["step_10.pt"]


@pytest.mark.usefixtures("short_deadlines")
def test_server_that_never_answers_has_a_deadline(s3_store: Store, s3: S3Server) -> None:
    s3_store.write(files.plain_torch, 10)
    s3.delay(300)

    with pytest.raises(StoreUnreachable, match="did not answer within 3 s"):
        s3_store.list()


@pytest.mark.usefixtures("short_deadlines")
def test_event_loop_runs_while_a_server_does_not_answer(s3_store: Store, s3: S3Server) -> None:
    s3_store.write(files.plain_torch, 10)
    s3.delay(300)

    async def count_turns() -> tuple[bool, int]:
        turns = 0
        asked = asyncio.create_task(
            call_with_time_limit(60, lambda: is_writing_checkpoint(s3_store.url, Path("/")), True)
        )
        while not asked.done():
            turns += 1
            await asyncio.sleep(0.05)
        return asked.result(), turns

    is_writing, turns = asyncio.run(count_turns())

    assert not is_writing
    assert turns > 3


@pytest.mark.usefixtures("short_deadlines")
def test_interrupted_removal_is_invisible_and_finished_later(s3_store: Store, s3: S3Server) -> None:
    s3_store.write(files.plain_torch, 10, 20, 30)
    s3_store.put("step_5/a.dat", b"a")
    s3_store.put("step_5/b.dat", b"b")
    path = parse_checkpoint_path(s3_store.url, Path("/")) / "step_5"
    removals: list[str] = []

    def fail_after_first_removal(method: str, path: str) -> None:
        if method in ("DELETE", "POST"):
            removals.append(path)
        if len(removals) > 1:
            raise ConnectionAbortedError

    s3.before_request = fail_after_first_removal
    with pytest.raises(StoreError):
        remove_path(path)
    s3.before_request = lambda method, path: None
    assert {"step_5", ".step_5.muster-old"} <= s3_store.names()

    listing = s3_store.list()
    remove_path(listing.complete[0].path)

    assert "step_5" not in [one.path.name for one in listing.checkpoints]
    assert s3_store.names() == {"step_20.pt", "step_30.pt"}


def test_checkpoint_that_is_stored_again_after_an_interrupted_removal_is_kept(
    s3_store: Store,
) -> None:
    s3_store.write(files.plain_torch, 10, 20, 30)
    removed = {f"{s3_store.url.removeprefix('s3://')}/step_20.pt": "1:2:3"}
    s3_store.put(".step_20.pt.muster-old", json.dumps(removed).encode())

    listing = s3_store.list()
    remove_path(listing.complete[0].path)

    assert names_of(listing) == ["step_10.pt", "step_20.pt", "step_30.pt"]
    assert s3_store.names() == {"step_20.pt", "step_30.pt"}


@pytest.mark.parametrize(
    ("url", "variables", "expected"),
    [
        ("s3://no-such-bucket/run", {}, "the bucket s3://no-such-bucket does not exist"),
        (
            f"s3://{BUCKET}/run",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "set AWS_ACCESS_KEY_ID",
        ),
        (f"s3://{BUCKET}/run", {"AWS_PROFILE": "missing"}, "the store refused access"),
        (f"s3://{BUCKET}/run", {"AWS_ENDPOINT_URL_S3": "nonsense"}, "Invalid endpoint"),
    ],
)
def test_refusal_names_the_remedy(
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    variables: dict[str, str],
    expected: str,
) -> None:
    for name, value in variables.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)

    with pytest.raises(StoreRefused) as raised:
        check_access(url)

    assert expected in str(raised.value)


def test_wrong_credentials_are_refused(s3: S3Server) -> None:
    s3.check_credentials(True)
    try:
        with pytest.raises(StoreRefused, match="the store refused access"):
            check_access(f"s3://{BUCKET}/run")
    finally:
        s3.check_credentials(False)


def test_missing_client_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # Let the import of gcsfs fail, even on a machine that has this package.
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)

    with pytest.raises(StoreRefused, match=r'pip install "muster\[gcs\]"'):
        check_access("gs://bucket/run")


def make_session(url: str) -> RunSession:
    trainer = {"command": ["true"], "checkpoints": url}
    spec = {"name": "x", "workload": "sft", "components": {"trainer": trainer}}
    return RunSession(parse_spec(spec), run_id="x-1", flow_run_id=uuid.uuid4())


def test_run_waits_for_a_store_that_does_not_answer(
    muster_home: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_session(f"s3://{BUCKET}/${{run.id}}")
    messages: list[str] = []

    def restart_server(message: str) -> None:
        messages.append(message)
        s3.start()

    monkeypatch.setattr(run, "record_waiting", restart_server)
    s3.stop()

    run.await_checkpoint_store()

    assert len(messages) == 1
    assert f"cannot list s3://{BUCKET}/x-1" in messages[0]


def test_run_fails_with_network_if_the_store_never_answers(
    muster_home: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_session(f"s3://{BUCKET}/run")
    monkeypatch.setattr(session, "_STORE_TIMEOUT_S", 0.0)
    s3.stop()

    with pytest.raises(CheckpointsUnreadable, match="no attempt starts") as raised:
        run.await_checkpoint_store()

    assert raised.value.kind is FailureKind.NETWORK
    assert run.record.state is RunState.PENDING_RESOURCES


def test_run_fails_with_storage_if_the_store_refuses_access(
    muster_home: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_session("s3://no-such-bucket/run")
    monkeypatch.setattr(session, "_REFUSAL_TIMEOUT_S", 0.0)

    with pytest.raises(CheckpointsUnreadable) as raised:
        run.await_checkpoint_store()

    assert raised.value.kind is FailureKind.STORAGE


def test_interrupt_ends_the_wait_for_a_store(muster_home: Path, s3: S3Server) -> None:
    run = make_session(f"s3://{BUCKET}/run")
    s3.stop()
    run.interrupt("interrupted by SIGTERM")

    with pytest.raises(CheckpointsUnreadable):
        run.await_checkpoint_store()

    assert run.interrupt_reason == "interrupted by SIGTERM"


def test_missing_bucket_is_a_fault_of_the_spec(muster_home: Path, s3: S3Server) -> None:
    trainer = {"command": ["true"], "checkpoints": "s3://no-such-bucket/${run.id}"}
    spec = parse_spec({"name": "x", "workload": "sft", "components": {"trainer": trainer}})

    with pytest.raises(InvalidSpec) as raised:
        check_spec(spec)

    assert "components.trainer.checkpoints: the bucket s3://no-such-bucket" in str(raised.value)
    assert "create the bucket" in str(raised.value)


def test_placeholders_do_not_prevent_the_check(s3: S3Server) -> None:
    check_access(f"s3://{BUCKET}/${{run.id}}/checkpoints")

    with pytest.raises(StoreRefused):
        check_access("s3://no-such-bucket/${run.id}/checkpoints")
