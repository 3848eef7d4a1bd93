"""The table of failure kinds, and the code that reads it."""

from __future__ import annotations

import errno
import re
from dataclasses import FrozenInstanceError

import pytest

from tasks.record.causes import RULES
from tasks.spec.failure_kinds import (
    REQUEUED,
    CheckpointBlame,
    FailureKind,
    NodeBlame,
    find_kind_of_start_error,
)
from tasks.spec.run import RunSpec
from tests.documents import failures


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_explains_cause_reaction_action_and_remedy(kind: FailureKind) -> None:
    properties = kind.properties

    assert all((properties.cause, properties.reaction, properties.action, properties.remedy))


@pytest.mark.parametrize(
    "remedy",
    [kind.properties.remedy for kind in FailureKind] + [rule.hint for rule in RULES if rule.hint],
)
def test_remedy_does_not_rely_on_other_text_about_the_failure(remedy: str) -> None:
    # A hint must be understandable without other text. So no hint refers to the message of the
    # failure, to a log line or to other components.
    assert re.findall(r"message|\b(?:this|the log) line\b|other components", remedy) == []


def test_properties_of_a_kind_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FailureKind.STORAGE.properties.attempts = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("error_number", "kind"),
    [
        (0, FailureKind.USER_ERROR),
        (errno.ENOENT, FailureKind.USER_ERROR),
        (errno.ENAMETOOLONG, FailureKind.USER_ERROR),
        (errno.ENOSPC, FailureKind.STORAGE),
        (errno.EDQUOT, FailureKind.STORAGE),
        (errno.ENOMEM, FailureKind.UNKNOWN),
        (None, FailureKind.UNKNOWN),
    ],
)
def test_error_number_of_a_failed_start_decides_the_kind(
    error_number: int | None, kind: FailureKind
) -> None:
    assert find_kind_of_start_error(error_number) is kind


def test_requeued_kinds_have_the_retry_limits_of_the_run_spec() -> None:
    spec = RunSpec.model_validate(
        {"name": "a", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    policies = {kind: spec.find_retry_policy(kind) for kind in FailureKind}

    limits = {kind.value: policy.attempts for kind, policy in policies.items() if policy}

    assert limits == {"INSUFFICIENT_RESOURCES": None, "START_TIMEOUT": 6, "FLEET_LOST": 4}


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - REQUEUED))
def test_only_requeued_kinds_have_default_limits(kind: FailureKind) -> None:
    assert kind.properties.attempts is None
    assert kind.properties.delay_s is None


def test_documents_describe_every_property_of_a_kind() -> None:
    text = failures.sections()

    for kind in FailureKind:
        [section] = [part for part in text.split("### ") if part.startswith(f"{kind}\n")]
        assert kind.properties.cause.replace("\n\n", "\n\n    ") in section
        avoids_nodes = kind.properties.blames_node is not NodeBlame.NEVER
        assert (f"**Nodes after `{kind}`**" in section) is avoids_nodes
        hangs_or_dies = kind.properties.blames_checkpoint is not CheckpointBlame.NEVER
        assert (f"**Checkpoint after `{kind}`**" in section) is hangs_or_dies
