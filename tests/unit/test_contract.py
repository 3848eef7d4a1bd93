"""Tests that names which users and other programs rely on do not change by accident."""

from __future__ import annotations

import json

from tests.support.contract import SAVED, broken_promises, current_contract


def test_fixed_names_and_values_are_unchanged() -> None:
    saved = json.loads(SAVED.read_text(encoding="utf-8"))
    current = json.loads(json.dumps(current_contract(), default=str))

    broken = broken_promises(saved, current)

    assert not broken, "\n".join(broken)


def test_every_name_is_saved() -> None:
    saved = json.loads(SAVED.read_text(encoding="utf-8"))

    new = sorted(set(current_contract()) - set(saved))

    assert not new, f"save these with `python -m tests.support.contract`: {new}"


def test_additional_allowed_values_are_no_incompatible_change() -> None:
    saved = {"workload": {"type": "string", "enum": ["ppo", "sft"]}}
    more = {"workload": {"type": "string", "enum": ["dpo", "ppo", "sft"]}}
    fewer = {"workload": {"type": "string", "enum": ["ppo"]}}

    assert broken_promises(saved, more) == []
    assert len(broken_promises(saved, fewer)) == 1


def test_removed_and_changed_names_are_reported() -> None:
    saved = {"exit code: EXIT_FAILED": 1, "verb: ls": True, "verb: show": True}
    current = {"exit code: EXIT_FAILED": 4, "verb: ls": True, "verb: new": True}

    broken = broken_promises(saved, current)

    assert broken == ["exit code: EXIT_FAILED was 1 and is 4", "verb: show is gone"]
