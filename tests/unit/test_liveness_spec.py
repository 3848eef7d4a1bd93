"""Tests of the spec key `live`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.spec.probes import LiveProbe, ReadyProbe


@pytest.mark.parametrize("question", [{"log": "ready"}, {"alive_s": 5}])
def test_check_that_cannot_fail_later_is_rejected_as_a_liveness_probe(
    question: dict[str, object],
) -> None:
    [key] = question

    with pytest.raises(ValidationError) as refused:
        LiveProbe.model_validate(question)

    [error] = refused.value.errors()
    assert error["loc"] == (key,)
    assert "cannot show that a component still works" in error["msg"]
    assert "use http, tcp, file or notify" in error["ctx"]["remedy"]
    assert ReadyProbe.model_validate(question)


@pytest.mark.parametrize(
    "question", [{"http": "http://h/"}, {"tcp": 80}, {"file": "alive"}, {"notify": True}]
)
def test_check_that_can_be_repeated_is_accepted_as_a_liveness_probe(
    question: dict[str, object],
) -> None:
    assert LiveProbe.model_validate(question)
