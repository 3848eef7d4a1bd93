"""Tests that the number of training steps is read from the loops of a script."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

from tasks.spec.script_loops import StepLoop, find_step_loop, may_end_early


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


@pytest.mark.parametrize(
    "body",
    [
        """
        if bad >= 50:
            break
        """,
        "yield batch",
    ],
)
def test_loop_that_may_end_early_is_ignored(body: str) -> None:
    source = "for step in range(1_000_000):\n" + _indent(body)

    assert find_step_loop(source) is None


def test_loop_with_a_return_is_ignored() -> None:
    source = "def train():\n  for step in range(20):\n    if bad >= 50: return\ntrain()"

    assert find_step_loop(source) is None
    assert may_end_early(source)


def test_break_of_another_loop_does_not_end_the_training() -> None:
    source = "for step in range(20):\n  for batch in data:\n    break\nfor row in rows:\n  break"

    assert not may_end_early(source)


@pytest.mark.parametrize(
    "body",
    [
        """
        for batch in data:
            break
        """,
        """
        def pick():
            return 1
        """,
        "if bad: raise RuntimeError('the loss is not a number')",
        "if bad: sys.exit(1)",
    ],
)
def test_loop_is_read_if_only_a_failure_can_end_it_early(body: str) -> None:
    source = "for step in range(20):\n" + _indent(body)

    assert find_step_loop(source) == StepLoop(total=20, last_step=19)


@pytest.mark.parametrize(
    "use",
    [
        "for update in range(1000): ray.get(collect.remote())",
        "for update in range(1000): ray.get(collect.options(num_gpus=1).remote())",
        "results = map(collect, envs)",
        "Trainer(step_fn=collect)",
        "callbacks = [collect]",
        "call = lambda: collect()",
        "collect()\ncollect()",
    ],
)
def test_loop_in_a_function_that_may_run_several_times_is_ignored(use: str) -> None:
    source = f"def collect():\n  for step in range(128): act()\n{use}"

    assert find_step_loop(source) is None


@pytest.mark.parametrize(
    "use",
    [
        "for update in range(1000): ray.get(worker.collect.remote())",
        "for update in range(1000): worker.collect()",
        "pool.submit(worker.collect)",
        "Runner(worker).run()",
    ],
)
def test_loop_in_a_method_that_may_run_several_times_is_ignored(use: str) -> None:
    source = f"""
@ray.remote
class Worker:
    def collect(self):
        for step in range(128):
            act()
worker = Worker.remote()
{use}
"""

    assert find_step_loop(source) is None


@pytest.mark.parametrize(
    "use",
    [
        "ray.get(train.remote())",
        "typer.run(train)",
        "mp.spawn(train, args=(2,), nprocs=2)",
        "Process(target=train).start()",
        "fire.Fire(train)",
    ],
)
def test_loop_in_a_function_that_is_started_once_is_read(use: str) -> None:
    source = f"def train():\n  for step in range(128): act()\n{use}"

    assert find_step_loop(source) == StepLoop(total=128, last_step=127)


def test_method_of_the_model_is_not_mistaken_for_the_training() -> None:
    source = """
def train(model):
    for step in range(200):
        model.eval()
        model.train()
train(model)
"""

    assert find_step_loop(source) == StepLoop(total=200, last_step=199)


@pytest.mark.parametrize(
    "training",
    [
        """
        for epoch in range(5):
            for batch in data:
                update(batch)
        """,
        """
        for i in range(num_epochs):
            update(batch)
        """,
        """
        for batch in data:
            step += 1
        """,
        """
        for batch in data:
            self.global_step = self.global_step + 1
        """,
        """
        while loss > 0.1:
            update()
        """,
        """
        for batch in data:
            accelerator.backward(model(batch))
        """,
        """
        for batch in data:
            train_on(batch)
        """,
        "model.fit(data)",
        """
        for step in range(3):
            update()
        """,
    ],
)
def test_loop_of_a_warm_up_outside_the_training_is_ignored(training: str) -> None:
    source = f"for it in range(3):\n  model(x)\n{dedent(training)}"

    assert find_step_loop(source) is None


@pytest.mark.parametrize(
    "other_code",
    [
        """
        def batches():
            while True:
                for batch in data:
                    yield batch
        """,
        """
        class Evaluator:
            def run(self):
                while True:
                    act()
        """,
        """
        def update():
            done = False
            while not done:
                steps += 1
        """,
    ],
)
def test_loop_of_the_training_is_found_if_the_script_also_has_a_helper_function(
    other_code: str,
) -> None:
    source = f"{dedent(other_code)}\nfor step in range(20):\n  update()\n"

    assert find_step_loop(source) == StepLoop(total=20, last_step=19)


@pytest.mark.parametrize("name", ["Evaluator", "PolicyEvaluator", "TestRun", "InferenceServer"])
def test_loop_in_a_class_that_does_not_train_is_ignored(name: str) -> None:
    source = f"""
class {name}:
    def run(self):
        for step in range(50):
            act()
{name}().run()
"""

    assert find_step_loop(source) is None


def _indent(body: str) -> str:
    return indent(dedent(body), "    ")
