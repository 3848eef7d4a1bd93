"""How many small faults in the code the unit tests notice: `make mutants`.

A mutant is the code with one change that cosmic-ray makes: a comparison turned, a number moved, a
condition negated. A seeded sample of places is drawn, as many from each group of GROUPS, and one
change a place. Each mutant runs the unit tests that run its line, up to the first failure; a line
that runs on import has those that run anything in its file. Coverage finds those tests once.

All of it happens in a copy of the tree under the temporary folder. The copy and the verdicts are
kept under a name made from the tree's content: the same call again carries on where it stopped.
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
#: What is mutated, as many mutants from each group.
GROUPS = {
    "spec": ("tasks/spec/*.py",),
    "record": ("tasks/record/*.py",),
    "queue": ("tasks/queue/policy.py", "tasks/queue/packing.py", "tasks/queue/decision.py"),
    "rollout": ("tasks/rollout/registry.py", "tasks/rollout/recovery.py"),
}
#: Operators that are left out: the first two need arguments of their own, `|` stands mostly in
#: annotations, which nothing reads, and what is compared by identity has no order.
_LEFT_OUT = re.compile(
    r"Variable(Replacer|Inserter)"
    r"|ReplaceBinaryOperator_BitOr"
    r"|ReplaceComparisonOperator_(Is(Not)?_(?!Is)|(?!Is)\w+_Is(Not)?$)"
)
_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")
#: One test on a mutant: an endless loop fails here.
_TEST_TIMEOUT_S = 60
#: All tests of a mutant.
_MUTANT_TIMEOUT_S = 900
#: What is measured is slower; a test that fails then is left out for all mutants.
_MEASURED_TEST_TIMEOUT_S = 600
_COVERAGE_TIMEOUT_S = 7200


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change in one file."""

    group: str
    path: str
    operator: str
    #: Which of the operator's places in the file, from 0.
    occurrence: int
    #: The lines of the place, both included.
    first_line: int
    last_line: int

    @property
    def key(self) -> str:
        return f"{self.path}:{self.operator}:{self.occurrence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said about a mutant."""

    key: str
    #: "killed", "survived", "timeout" or "not reached" (no unit test runs its lines).
    outcome: str
    seconds: float
    #: The test that failed.
    by: str = ""


def copy_of(tree: Path) -> tuple[Path, Path]:
    """Where the work on `tree` as it is now is kept, and the copy of it in there."""
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
        # Some tests ask git which files there are.
        subprocess.run(("git", "init", "-q"), cwd=copy, check=True, timeout=60)
        # `tree` may be older than this program.
        shutil.copytree(Path(__file__).parent, copy / "tests" / "mutants", dirs_exist_ok=True)
        (state / "copied").touch()
    return state, copy


def environment_of(copy: Path) -> dict[str, str]:
    """Nothing is compiled to disk: a mutant may have the size and second of its original."""
    return os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def lines_run(state: Path, copy: Path) -> CoverageData:
    """Which unit tests run which lines, measured once."""
    data = state / "coverage"
    if not (state / "failed.json").exists():
        print("Measuring which unit tests run which lines: some minutes.", flush=True)
        sources = ",".join(sorted({str(Path(p).parent) for ps in GROUPS.values() for p in ps}))
        with (state / "coverage.log").open("wb") as log:
            done = subprocess.run(
                (
                    *(sys.executable, "-m", "coverage", "run"),
                    *(f"--data-file={data}", f"--source={sources}", "-m"),
                    *(*_PYTEST, "-o", f"timeout={_MEASURED_TEST_TIMEOUT_S}"),
                    *("-p", "tests.mutants.contexts", "tests/unit"),
                ),
                cwd=copy,
                env=environment_of(copy) | {FAILED_VARIABLE: str(state / "failed.json")},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=_COVERAGE_TIMEOUT_S,
            )
        # 1: some tests fail, which are left out from now on. Anything else: they did not run.
        if done.returncode not in (0, 1):
            (state / "failed.json").unlink(missing_ok=True)
            sys.exit(f"pytest exited {done.returncode}: {state / 'coverage.log'} says why")
    found = CoverageData(basename=str(data))
    found.read()
    return found


def places(group: str, path: str, code: str) -> dict[tuple[object, ...], list[Mutant]]:
    """The places of a file that can be changed, each with its changes."""
    found = defaultdict(list)
    nodes = list(ast_nodes(get_ast(code)))
    for name in sorted(operator_names()):
        short = name.partition("/")[2]
        if _LEFT_OUT.match(short):
            continue
        operator = get_operator(name)()
        positions = (p for node in nodes for p in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            mutant = Mutant(
                group=group,
                path=path,
                operator=name,
                occurrence=occurrence,
                first_line=start[0],
                last_line=end[0],
            )
            found[path, start, end, short.partition("_")[0]].append(mutant)
    return found


def sample(copy: Path, seed: int, count: int) -> list[Mutant]:
    """The mutants of a seed, the groups in turn, so that a stopped run has seen all of them."""
    drawn: dict[str, list[Mutant]] = {}
    for group, patterns in GROUPS.items():
        chance = random.Random(f"{seed}:{group}")
        paths = sorted({p for pattern in patterns for p in copy.glob(pattern)})
        found: dict[tuple[object, ...], list[Mutant]] = {}
        codes = {str(p.relative_to(copy)): p.read_text(encoding="utf-8") for p in paths}
        for path, code in codes.items():
            found |= places(group, path, code)
        order = sorted(found, key=repr)
        chance.shuffle(order)
        chosen = (chance.choice(found[place]) for place in order)
        drawn[group] = []
        for mutant in chosen:
            if len(drawn[group]) == -(-count // len(GROUPS)):
                break
            if changes(codes[mutant.path], mutated(codes[mutant.path], mutant)):
                drawn[group].append(mutant)
    longest = max(map(len, drawn.values()))
    return [ms[i] for i in range(longest) for ms in drawn.values() if i < len(ms)][:count]


def mutated(code: str, mutant: Mutant) -> str:
    return str(mutate_code(code, get_operator(mutant.operator)(), mutant.occurrence))


def changes(code: str, changed: str) -> bool:
    """Whether the mutant is a program, and one that does something else.

    A dataclass that is not frozen or has no slots does the same: the types are checked by mypy.
    """
    try:
        before, after = ast.parse(code), ast.parse(changed)
    except SyntaxError:
        return False
    for node in (*ast.walk(before), *ast.walk(after)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dataclass":
            node.keywords = []
    return ast.dump(before) != ast.dump(after)


def tests_of(mutant: Mutant, copy: Path, data: CoverageData, failed: set[str]) -> list[str]:
    """The tests that run the mutant's lines, or its file where those run on import.

    The files of tests that run most of the mutated file come first: they are about it.
    """
    contexts = data.contexts_by_lineno(str(copy / mutant.path))
    reach: Counter[str] = Counter(
        test.partition("::")[0] for tests in contexts.values() for test in tests
    )
    lines = range(mutant.first_line, mutant.last_line + 1)
    on_line = {test for line in lines for test in contexts.get(line, ())}
    if "" in on_line:
        on_line |= {test for tests in contexts.values() for test in tests}
    chosen = on_line - failed - {""}
    return sorted(chosen, key=lambda test: (-reach[test.partition("::")[0]], test))


def judge(mutant: Mutant, copy: Path, state: Path, tests: list[str]) -> Verdict:
    """Run `tests` on the mutant; the copy is as before afterwards."""
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
            *(sys.executable, "-m", *_PYTEST, "-x", "--no-header", "--tb=no"),
            *("-o", f"timeout={_TEST_TIMEOUT_S}", f"@{arguments}"),
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
        outcome, output = "timeout", ""
    finally:
        if pytest.poll() is None:
            os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
        file.write_text(code, encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return Verdict(key=mutant.key, outcome=outcome, seconds=seconds, by=by[:200])


def verdicts(
    mutants: list[Mutant], copy: Path, state: Path, data: CoverageData
) -> Iterator[tuple[Mutant, Verdict]]:
    """A verdict for each mutant, those of an earlier call from what it wrote down."""
    failed = set(json.loads((state / "failed.json").read_text(encoding="utf-8")))
    written = state / "verdicts.jsonl"
    lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    known = {(v := Verdict(**json.loads(line))).key: v for line in lines}
    for mutant in mutants:
        verdict = known.get(mutant.key)
        if verdict is None:
            verdict = judge(mutant, copy, state, tests_of(mutant, copy, data, failed))
            with written.open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(verdict)) + "\n")
        yield mutant, verdict


def change_in(copy: Path, mutant: Mutant) -> str:
    """The changed line, before and after."""
    code = (copy / mutant.path).read_text(encoding="utf-8")
    before, after = code.splitlines(), mutated(code, mutant).splitlines()
    pairs = zip(before, after, strict=False)
    row = next((i for i, (old, new) in enumerate(pairs) if old != new), 0)
    if len(after) < len(before):
        row, after = mutant.first_line - 1, [*before[: mutant.first_line - 1], "(gone)"]
    return f"{mutant.path}:{row + 1}  {before[row].strip()}  ->  {after[row].strip()}"


def report(judged: list[tuple[Mutant, Verdict]], copy: Path) -> None:
    """The figures of each file, and what lives."""
    kinds = ("killed", "timeout", "survived", "not reached")
    print(f"\n{'':44}" + "".join(f"{kind:>13}" for kind in kinds))
    by_path: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, verdict in judged:
        for row in (mutant.path, f"all of {mutant.group}", "together"):
            by_path[row][verdict.outcome] += 1
    for row in sorted(by_path, key=lambda r: (r == "together", r.startswith("all of"), r)):
        print(f"{row:44}" + "".join(f"{by_path[row][kind]:13}" for kind in kinds))
    seen = by_path["together"]
    noticed = seen["killed"] + seen["timeout"]
    print(f"\nnoticed: {noticed} of {len(judged)} ({100 * noticed / len(judged):.1f} %)")
    for kind in kinds[2:]:
        if seen[kind]:
            print(f"\n{kind}:")
        for mutant, verdict in judged:
            if verdict.outcome == kind:
                print(f"  {change_in(copy, mutant)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--count", type=int, default=160, help="how many mutants (default 160)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout (default: this one)")
    given = parser.parse_args()
    state, copy = copy_of(given.tree.resolve())
    print(f"seed {given.seed}, kept in {state}", flush=True)
    data = lines_run(state, copy)
    left_out = json.loads((state / "failed.json").read_text(encoding="utf-8"))
    print(
        f"{len(left_out)} tests fail on the code as it is, and are left out", *left_out, sep="\n  "
    )
    mutants = sample(copy, given.seed, given.count)
    judged = []
    for mutant, verdict in verdicts(mutants, copy, state, data):
        judged.append((mutant, verdict))
        progress = f"{len(judged)}/{len(mutants)} {verdict.outcome} in {verdict.seconds} s"
        print(f"{progress}: {change_in(copy, mutant)}", flush=True)
    report(judged, copy)


if __name__ == "__main__":
    main()
