"""Tests of URLs in the key `checkpoints` of a run spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.record.checkpoint_paths import identify_folder
from tasks.spec.checkpoint_urls import find_url_fault, split_url
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec


@pytest.mark.parametrize(
    "written",
    [
        "s3://bucket/runs/7",
        "s3://bucket",
        "s3a://bucket/runs/",
        "gs://bucket/runs/ckpt-*",
        "gcs://bucket/${run.id}/checkpoints",
        "file:///data/checkpoints",
        "file://${run.dir}/checkpoints",
        "/data/a://b",
        "checkpoints",
        "s3/checkpoints",
    ],
)
def test_valid_folder_has_no_fault(written: str) -> None:
    assert find_url_fault(written) is None


@pytest.mark.parametrize(
    ("written", "problem", "remedy"),
    [
        ("http://host/folder", "protocol http://", "s3://, gs:// or file://"),
        ("S3://bucket/folder", "protocol S3://", "s3://"),
        ("memory://folder", "protocol memory://", "s3://"),
        ("hdfs://host/folder", "protocol hdfs://", "s3://"),
        ("s3:/bucket/folder", "has no ://", "s3://BUCKET/FOLDER"),
        ("gs:bucket/folder", "has no ://", "s3://BUCKET/FOLDER"),
        ("s3//bucket/folder", "has no ://", "s3://BUCKET/FOLDER"),
        ("s3://", "names no bucket", "s3://BUCKET/FOLDER"),
        ("s3:///folder", "names no bucket", "s3://BUCKET/FOLDER"),
        ("s3://key:secret@bucket/folder", "no credentials", "environment"),
        ("s3://buck*/folder", "must be a name without", "s3://BUCKET/FOLDER"),
        ("s3://bucket//folder", "empty folder name", "one slash"),
        ("s3://bucket/a/../b", "'..'", "one slash"),
        ("file://data/checkpoints", "no absolute path", "file:///FOLDER"),
    ],
)
def test_faulty_url_names_the_remedy(written: str, problem: str, remedy: str) -> None:
    fault = find_url_fault(written)

    assert fault is not None
    assert problem in fault.problem
    assert remedy in fault.remedy


def test_credentials_are_not_repeated_in_the_fault() -> None:
    fault = find_url_fault("s3://key:secret@bucket/folder")

    assert fault is not None
    assert "secret" not in f"{fault.problem}{fault.remedy}"


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ("http://host/folder", "components.trainer.checkpoints: Muster cannot read"),
        ("file://${run.dir}", "but Muster itself writes other files into"),
        ("file://${attempt.dir}/", "but Muster itself writes other files into"),
    ],
)
def test_spec_with_a_faulty_url_is_refused(checkpoints: str, expected: str) -> None:
    spec = {
        "name": "x",
        "workload": "sft",
        "components": {"trainer": {"command": ["python"], "checkpoints": checkpoints}},
    }

    with pytest.raises(InvalidSpec) as raised:
        parse_spec(spec)

    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/a/", ("s3", "bucket/a")),
        ("s3a://bucket/a", ("s3", "bucket/a")),
        ("gcs://bucket", ("gs", "bucket")),
        ("file:///data//", ("file", "/data")),
        ("file:///", ("file", "/")),
    ],
)
def test_url_is_split_into_protocol_and_path(url: str, parts: tuple[str, str]) -> None:
    assert split_url(url) == parts


def test_one_folder_has_one_identity(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    assert identify_folder("s3://bucket/a", tmp_path) == identify_folder(
        "s3a://bucket/a/", tmp_path
    )
    assert identify_folder(f"file://{tmp_path}/link", Path("/")) == identify_folder(".", tmp_path)
