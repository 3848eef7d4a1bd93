"""Measure how many small faults in the code the unit tests notice: `make mutants`.

A mutant is the code with one change by cosmic-ray: a reversed comparison, a changed number or a
negated condition. The program draws a random sample of places in the code, the same number from
each group of GROUPS, and makes one change at each place. For each mutant, it runs the unit tests
that execute the changed line, until a test fails. If the import of the file executes the line, it
runs all unit tests that execute a line of the file. One measurement with coverage finds the tests
of each line.

All of this happens in a copy of the project in the temporary folder. The copy and the verdicts stay
there, under a name that depends on the content of the project. A second call with the same content
therefore continues after the last verdict.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

from tests.mutants.contexts import FAILED_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_SEED = 20261122
#: Files that the mutants change: mapping from the name of a group to the file name patterns of the
#: group.
GROUPS = {
    "spec": ("tasks/spec/*.py",),
    "record": ("tasks/record/*.py",),
    "queue": ("tasks/queue/policy.py", "tasks/queue/packing.py", "tasks/queue/decision.py"),
    "rollout": ("tasks/rollout/registry.py", "tasks/rollout/recovery.py"),
}
#: Operators of cosmic-ray that are not used. `VariableReplacer` and `VariableInserter` need
#: arguments. `|` occurs mostly in type annotations, which no test executes. The last pattern stands
#: for changes between `is` and another comparison such as `<`: objects that are compared with `is`
#: have no order.
_UNUSED_OPERATORS = re.compile(
    r"Variable(Replacer|Inserter)"
    r"|ReplaceBinaryOperator_BitOr"
    r"|ReplaceComparisonOperator_(Is(Not)?_(?!Is)|(?!Is)\w+_Is(Not)?$)"
)
_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")
#: Time limit for each test of a mutant, in seconds. A mutant is the code with one small change. The
#: limit ends mutants with an endless loop.
_TEST_TIMEOUT_S = 60
#: Time limit for all tests of a mutant in total, in seconds. A mutant is the code with one small
#: change.
_MUTANT_TIMEOUT_S = 900
#: Time limit of one test during the measurement with coverage, in seconds. Coverage slows the tests
#: down. A test that fails during this measurement is not used for any mutant.
_MEASURED_TEST_TIMEOUT_S = 600
#: Time limit of the measurement with coverage, in seconds.
_COVERAGE_TIMEOUT_S = 7200


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file by an operator of cosmic-ray."""

    #: Name of the changed file's group, a key of GROUPS.
    group: str
    #: Path of the changed file, relative to the root of the project.
    path: str
    #: Name of the operator that makes the change.
    operator: str
    #: Index of the changed place, from 0, among all places of the file that the operator could
    #: change.
    occurrence: int
    #: Number of the first line that the change concerns, from 1.
    first_line: int
    #: Number of the last line that the change concerns.
    last_line: int

    @property
    def key(self) -> str:
        """Text that identifies the mutant in the file with the results of the tests."""
        return f"{self.path}:{self.operator}:{self.occurrence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of the unit tests for one mutant."""

    #: Key of the mutant, as its property `key` returns it.
    key: str
    #: "killed" (a test failed), "survived" (no test failed), "timeout", or "not reached" (no unit
    #: test executes the changed lines).
    outcome: str
    #: Duration of the tests in seconds.
    seconds: float
    #: Line in which pytest reports the failed test. Empty if no test failed.
    by: str = ""


def copy_of(tree: Path) -> tuple[Path, Path]:
    """Copy a project, unless a project with the same content has been copied before.

    Args:
        tree: Root of the project.

    Returns:
        The directory for the results, and the root of the copy in it.
    """
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=tree,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout.decode()
    names = sorted(name for name in set(listed.split("\0")) if name and (tree / name).is_file())
    digest = hashlib.sha256()
    for name in names:
        if name.startswith(("tasks/", "tests/", "flows/", "deployments/", "pyproject")):
            digest.update(name.encode() + b"\0" + (tree / name).read_bytes())
    state = Path(tempfile.gettempdir()) / f"muster-mutants-{digest.hexdigest()[:12]}"
    copy = state / "tree"
    if not (state / "copied").exists():
        shutil.rmtree(state, ignore_errors=True)
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
        # Some tests list the files of the project with git.
        subprocess.run(("git", "init", "-q"), cwd=copy, check=True, timeout=60)
        # The tests in the copy use the pytest plugin in this package. An older version of the
        # project does not contain the package, so the package is copied from here.
        shutil.copytree(Path(__file__).parent, copy / "tests" / "mutants", dirs_exist_ok=True)
        (state / "copied").touch()
    return state, copy


def environment_of(copy: Path) -> dict[str, str]:
    """Return the environment variables for tests that run in a copy of the project.

    The variables prevent Python from storing compiled code in `.pyc` files. Otherwise Python could
    run the stored code of the original file instead of the mutant.
    """
    return os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def lines_run(state: Path, copy: Path) -> CoverageData:
    """Return, for each line of the code, the unit tests that execute this line.

    The first call runs the tests with coverage. Later calls read the stored result.

    Args:
        state: Directory for the results.
        copy: Root of the copied project.
    """
    data = state / "coverage"
    if not (state / "failed.json").exists():
        print("Measuring which unit tests run which lines: some minutes.", flush=True)
        folders = {str(Path(pattern).parent) for group in GROUPS.values() for pattern in group}
        sources = ",".join(sorted(folders))
        with (state / "coverage.log").open("wb") as log:
            result = subprocess.run(
                (
                    sys.executable,
                    "-m",
                    "coverage",
                    "run",
                    f"--data-file={data}",
                    f"--source={sources}",
                    "-m",
                    *_PYTEST,
                    "-o",
                    f"timeout={_MEASURED_TEST_TIMEOUT_S}",
                    "-p",
                    "tests.mutants.contexts",
                    "tests/unit",
                ),
                cwd=copy,
                env=environment_of(copy) | {FAILED_VARIABLE: str(state / "failed.json")},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=_COVERAGE_TIMEOUT_S,
            )
        # Exit code 1 means that some tests failed. The failed tests are not used for any mutant.
        # All exit codes except 0 and 1 mean that the tests did not run.
        if result.returncode not in (0, 1):
            (state / "failed.json").unlink(missing_ok=True)
            sys.exit(f"pytest exited {result.returncode}: {state / 'coverage.log'} says why")
    coverage_data = CoverageData(basename=str(data))
    coverage_data.read()
    return coverage_data


def places(group: str, path: str, code: str) -> dict[tuple[object, ...], list[Mutant]]:
    """Return a mapping from a position in the code to the possible mutants at this position.

    A mutant is the code with one small change.

    Args:
        group: Name of the file's group.
        path: Path of the file, relative to the root of the project.
        code: Content of the file.
    """
    mutants = defaultdict(list)
    nodes = list(ast_nodes(get_ast(code)))
    for name in sorted(operator_names()):
        short_name = name.partition("/")[2]
        if _UNUSED_OPERATORS.match(short_name):
            continue
        operator = get_operator(name)()
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            mutant = Mutant(
                group=group,
                path=path,
                operator=name,
                occurrence=occurrence,
                first_line=start[0],
                last_line=end[0],
            )
            mutants[path, start, end, short_name.partition("_")[0]].append(mutant)
    return mutants


def sample(copy: Path, seed: int, count: int) -> list[Mutant]:
    """Draw a random sample of mutants, with one mutant of each group in turn.

    So mutants of every group have been tested even if a developer stops the program early.

    Args:
        copy: Root of the copied project.
        seed: Seed of the random numbers.
        count: Number of mutants.
    """
    mutants_of_group: dict[str, list[Mutant]] = {}
    for group, patterns in GROUPS.items():
        chance = random.Random(f"{seed}:{group}")
        paths = sorted({path for pattern in patterns for path in copy.glob(pattern)})
        codes = {str(path.relative_to(copy)): path.read_text(encoding="utf-8") for path in paths}
        mutants_of_place: dict[tuple[object, ...], list[Mutant]] = {}
        for path, code in codes.items():
            mutants_of_place |= places(group, path, code)

        random_places = sorted(mutants_of_place, key=repr)
        chance.shuffle(random_places)
        candidates = (chance.choice(mutants_of_place[place]) for place in random_places)
        mutants: list[Mutant] = []
        mutants_of_group[group] = mutants
        for mutant in candidates:
            if len(mutants) == -(-count // len(GROUPS)):
                break
            if changes(codes[mutant.path], mutated(codes[mutant.path], mutant)):
                mutants.append(mutant)

    longest = max(map(len, mutants_of_group.values()))
    in_turn = [
        mutants[index]
        for index in range(longest)
        for mutants in mutants_of_group.values()
        if index < len(mutants)
    ]
    return in_turn[:count]


def mutated(code: str, mutant: Mutant) -> str:
    """Return the code of a file after the mutant's change."""
    return str(mutate_code(code, get_operator(mutant.operator)(), mutant.occurrence))


def changes(code: str, changed: str) -> bool:
    """Return True if the changed code is valid Python with another meaning.

    Changed arguments of `dataclass`, for example `frozen`, are ignored: mypy checks them, not the
    unit tests.
    """
    try:
        old_tree = ast.parse(code)
        new_tree = ast.parse(changed)
    except SyntaxError:
        return False
    for node in (*ast.walk(old_tree), *ast.walk(new_tree)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dataclass":
            node.keywords = []
    return ast.dump(old_tree) != ast.dump(new_tree)


def tests_of(mutant: Mutant, copy: Path, data: CoverageData, failed: set[str]) -> list[str]:
    """Return the unit tests that execute the changed lines of a mutant.

    If the lines are executed when the file is imported, return all tests that execute a line of the
    file. The test files that execute most lines of the changed file come first, because their tests
    fail most likely.

    Args:
        mutant: The mutant.
        copy: Root of the copied project.
        data: The unit tests that execute each line.
        failed: Tests that fail on the unchanged code. These tests are left out.
    """
    tests_of_line = data.contexts_by_lineno(str(copy / mutant.path))
    lines_of_test_file: Counter[str] = Counter(
        test.partition("::")[0] for tests in tests_of_line.values() for test in tests
    )
    lines = range(mutant.first_line, mutant.last_line + 1)
    tests = {test for line in lines for test in tests_of_line.get(line, ())}
    # If a line runs during the import of the changed file, coverage stores an empty string instead
    # of a test's name. A change of this line may affect all tests that use the file.
    if "" in tests:
        tests |= {test for tests_on_line in tests_of_line.values() for test in tests_on_line}
    usable = tests - failed - {""}
    return sorted(usable, key=lambda test: (-lines_of_test_file[test.partition("::")[0]], test))


def judge(mutant: Mutant, copy: Path, state: Path, tests: list[str]) -> Verdict:
    """Run unit tests on a mutant (the code with one change), and return their result.

    The function restores the copy of the project afterwards.

    Args:
        mutant: The mutant.
        copy: Root of the copied project.
        state: Directory for the results.
        tests: Ids of the tests.
    """
    if not tests:
        return Verdict(key=mutant.key, outcome="not reached", seconds=0.0)
    file = copy / mutant.path
    code = file.read_text(encoding="utf-8")
    arguments = state / "tests.txt"
    arguments.write_text("\n".join(tests), encoding="utf-8")
    began = time.monotonic()
    file.write_text(mutated(code, mutant), encoding="utf-8")
    pytest = subprocess.Popen(
        (
            sys.executable,
            "-m",
            *_PYTEST,
            "-x",
            "--no-header",
            "--tb=no",
            "-o",
            f"timeout={_TEST_TIMEOUT_S}",
            f"@{arguments}",
        ),
        cwd=copy,
        env=environment_of(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = pytest.communicate(timeout=_MUTANT_TIMEOUT_S)
        outcome = "survived" if pytest.returncode == 0 else "killed"
    except subprocess.TimeoutExpired:
        outcome = "timeout"
        output = ""
    finally:
        if pytest.poll() is None:
            os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
        file.write_text(code, encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    failures = (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR")))
    return Verdict(key=mutant.key, outcome=outcome, seconds=seconds, by=next(failures, "")[:200])


def verdicts(
    mutants: list[Mutant], copy: Path, state: Path, data: CoverageData
) -> Iterator[tuple[Mutant, Verdict]]:
    """Yield the result of the unit tests for each mutant.

    If an earlier call has tested a mutant, the result comes from a file, and no test runs again.

    Args:
        mutants: The mutants.
        copy: Root of the copied project.
        state: Directory for the results.
        data: The unit tests that execute each line.
    """
    failed = set(json.loads((state / "failed.json").read_text(encoding="utf-8")))
    path = state / "verdicts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    earlier_verdicts = [Verdict(**json.loads(line)) for line in lines]
    verdict_of_key = {verdict.key: verdict for verdict in earlier_verdicts}
    for mutant in mutants:
        verdict = verdict_of_key.get(mutant.key)
        if verdict is None:
            verdict = judge(mutant, copy, state, tests_of(mutant, copy, data, failed))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
        yield mutant, verdict


def change_in(copy: Path, mutant: Mutant) -> str:
    """Return a description of a mutant: its place, and its code before and after the change."""
    code = (copy / mutant.path).read_text(encoding="utf-8")
    old_lines = code.splitlines()
    new_lines = mutated(code, mutant).splitlines()
    pairs = enumerate(zip(old_lines, new_lines, strict=False))
    row = next((row for row, (old_line, new_line) in pairs if old_line != new_line), 0)
    if len(new_lines) < len(old_lines):
        row = mutant.first_line - 1
        new_lines = [*old_lines[:row], "(gone)"]
    return f"{mutant.path}:{row + 1}  {old_lines[row].strip()}  ->  {new_lines[row].strip()}"


def report(judged: list[tuple[Mutant, Verdict]], copy: Path) -> None:
    """Print the number of mutants for each file and outcome, and all mutants that survived."""
    outcomes = ("killed", "timeout", "survived", "not reached")
    print(f"\n{'':44}" + "".join(f"{outcome:>13}" for outcome in outcomes))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, verdict in judged:
        for row in (mutant.path, f"all of {mutant.group}", "together"):
            counts[row][verdict.outcome] += 1
    for row in sorted(counts, key=lambda row: (row == "together", row.startswith("all of"), row)):
        print(f"{row:44}" + "".join(f"{counts[row][outcome]:13}" for outcome in outcomes))

    totals = counts["together"]
    noticed = totals["killed"] + totals["timeout"]
    print(f"\nnoticed: {noticed} of {len(judged)} ({100 * noticed / len(judged):.1f} %)")
    for outcome in ("survived", "not reached"):
        if totals[outcome]:
            print(f"\n{outcome}:")
        for mutant, verdict in judged:
            if verdict.outcome == outcome:
                print(f"  {change_in(copy, mutant)}")


def main() -> None:
    """Run the unit tests on a sample of mutants, and print how many of them make a test fail.

    A mutant is the code with one random change.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--count", type=int, default=160, help="how many mutants (default 160)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout (default: this one)")
    options = parser.parse_args()
    state, copy = copy_of(options.tree.resolve())
    print(f"seed {options.seed}, kept in {state}", flush=True)
    data = lines_run(state, copy)
    failed = json.loads((state / "failed.json").read_text(encoding="utf-8"))
    print(f"{len(failed)} tests fail on the code as it is, and are left out", *failed, sep="\n  ")
    mutants = sample(copy, options.seed, options.count)
    judged = []
    for mutant, verdict in verdicts(mutants, copy, state, data):
        judged.append((mutant, verdict))
        progress = f"{len(judged)}/{len(mutants)} {verdict.outcome} in {verdict.seconds} s"
        print(f"{progress}: {change_in(copy, mutant)}", flush=True)
    report(judged, copy)


if __name__ == "__main__":
    main()
