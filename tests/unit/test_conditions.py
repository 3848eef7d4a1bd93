"""Conditions of pipeline stages: the allowed part of Python, and its values."""

from __future__ import annotations

import pytest

from tasks.spec.conditions import InvalidCondition, parse_condition

VALUES = {
    "stage.eval.result.score": 0.7,
    "stage.eval.result.name": "math",
    "stage.eval.result.items": ["a", "b"],
    "stage.eval.result.none": None,
    "stage.eval.state": "completed",
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("${stage.eval.result.score} > 0.6", True),
        ("${stage.eval.result.score}>0.6 and not ${stage.eval.result.score} > 0.8", True),
        ("0.5 < ${stage.eval.result.score} < 0.6", False),
        ("(${stage.eval.result.score} + 1) * 2 - 0.4 / 2 >= 3", True),
        ("-${stage.eval.result.score} < 0 or false", True),
        ("7 // 2 == 3 and 7 % 2 == 1", True),
        ("${stage.eval.result.name} == 'math'", True),
        ("${stage.eval.result.name} in ['code', 'math']", True),
        ("'a' not in ${stage.eval.result.items}", False),
        ("'at' in ${stage.eval.result.name}", True),
        ("${stage.eval.result.none} == null", True),
        ("${stage.eval.state} != 'failed'", True),
        ("true", True),
    ],
)
def test_condition_has_the_value_of_its_expression(text: str, holds: bool) -> None:
    assert parse_condition(text).evaluate(VALUES.__getitem__) is holds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be a condition"),
        ("${stage.a.result} >", "must be a condition"),
        ("${stage.a.result > 1", "no closing `}`"),
        ("score > 1", "the name 'score' is not allowed"),
        ("__import__('os').system('true')", "is not allowed"),
        ("(1).__class__", "is not allowed"),
        ("[x for x in [1]]", "is not allowed"),
        ("lambda: 1", "is not allowed"),
        ("2 ** 99999999", "is not allowed"),
        ("f'{1}' == '1'", "is not allowed"),
        ("1 if true else 2", "is not allowed"),
        ("(x := 1)", "is not allowed"),
        ("b'a' == 'a'", "is not allowed"),
        ("null is null", "`is` is not allowed"),
        ("'${stage.a.result}' == 'x'", "a placeholder is in quotes"),
        ("stage_value_0", "must not contain the name stage_value_"),
        ("(" * 400 + "1" + ")" * 400, "at most 500 characters"),
        ("(" * 240 + "1" + ")" * 240, "must be a condition"),
    ],
)
def test_other_expressions_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidCondition) as caught:
        parse_condition(text)

    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("${stage.eval.result.name} > 1", "the text 'math' cannot be compared with 1"),
        ("${stage.eval.result.none} < 1", "nothing cannot be compared with 1"),
        ("${stage.eval.result.name} * 1000000 == 1", "arithmetic needs numbers"),
        (
            "1 / (${stage.eval.result.score} - 0.7) > 1",
            "cannot be computed: float division by zero",
        ),
        ("1 in ${stage.eval.result.name}", "1 cannot be searched in the text 'math'"),
    ],
)
def test_values_with_which_a_condition_cannot_be_computed_are_reported(
    text: str, problem: str
) -> None:
    condition = parse_condition(text)

    with pytest.raises(InvalidCondition) as caught:
        condition.evaluate(VALUES.__getitem__)

    assert problem in caught.value.problem
