"""Tests that the number of training steps is read from the loops of a script."""

from __future__ import annotations

import pytest

from tasks.spec.script_loops import StepLoop, find_step_loop


@pytest.mark.parametrize(
    ("source", "total", "last_step"),
    [
        ("for step in range(1, 21): train()", 20, 20),
        ("for step in range(20): train()", 20, 19),
        ("for step in range(0, 20): train()", 20, 19),
        ("for iteration in range(20): train()", 20, 19),
        ("for global_step in tqdm(range(1, 21)): train()", 20, 20),
        ("STEPS = 20\nfor step in range(STEPS): train()", 20, 19),
        ("STEPS: int = 20\nfor step in range(1, STEPS + 1): train()", 20, 20),
        ("for step in range(start, 20): train()", 20, 19),
        ("for step in range(start + 1, 21): train()", 20, 20),
        ("def main():\n  for step in range(20): train()\nmain()", 20, 19),
        ("for step in range(20):\n  for i in range(4): train()", 20, 19),
        ("def evaluate():\n  for step in range(5): f()\nfor step in range(20): train()", 20, 19),
    ],
)
def test_loop_with_a_clear_number_of_steps_is_read(source: str, total: int, last_step: int) -> None:
    assert find_step_loop(source) == StepLoop(total=total, last_step=last_step)


@pytest.mark.parametrize(
    "source",
    [
        "print()",
        "for step in",
        f"total = {' + '.join(['1'] * 3000)}\nfor step in range(total): train()",
        "for row in range(20): train()",
        "for step, batch in enumerate(range(20)): train()",
        "for step in range(steps): train()",
        "for step in range(0): train()",
        "for step in range(5, 20): train()",
        "for step in range(0, 20, 5): train()",
        "for step in range(True): train()",
        "STEPS = 20\nSTEPS = 30\nfor step in range(STEPS): train()",
        "STEPS = 20\ndef f(STEPS):\n  for step in range(STEPS): train()",
        "for epoch in range(3):\n  for step in range(20): train()",
        "while True:\n  for step in range(20): train()",
        "def epoch():\n  for step in range(20): train()\nfor e in range(3): epoch()",
        "for step in range(20): train()\nfor step in range(5): evaluate()",
        "def evaluate():\n  for step in range(5): f()\nfor batch in data: train()",
        "def run_validation():\n  for step in range(5): f()\nfor batch in data: train()",
        "def e():\n  for step in range(20): train()\ndef f(): e()\nfor epoch in range(3): f()",
        "for step in range(20): train()\nfor step in range(len(data)): evaluate()",
    ],
)
def test_loop_with_an_unclear_number_of_steps_is_ignored(source: str) -> None:
    assert find_step_loop(source) is None
