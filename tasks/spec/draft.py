"""The first run spec of a training that is there already, by what lies in its directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import project_of

_READ_BYTES = 65_536
_PASSED_OVER = re.compile(r"(^|/)(\.|__pycache__|node_modules|site-packages|wandb/|outputs/)")
_WORKLOADS = ("grpo", "ppo", "sft")
#: Of several files that tell the same, one of these names comes first.
_LIKELY = ("rl", "train", *_WORKLOADS, "run", "main")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train."""

    name: str
    #: What is in the file that tells it.
    pattern: re.Pattern[str]
    #: How that file is started, in YAML, by its suffix.
    commands: Mapping[str, str]
    #: The rest of the spec.
    text: str
    #: Where the file does not say.
    workload: str = "sft"


_GANG = """\
# The whole gang is waited for; nothing is started before all of it is free.
gang: {nodes: 1, gpus_per_node: 8}
"""
_STEPS = """\
# With it the page shows steps, a curve and the time left: a file of JSON objects, one a line.
# progress: {jsonl: "${attempt.dir}/metrics.jsonl", step: step, total: 1000}
# Ends a run that lives and does nothing.
# stall_after_s: 1800
"""
_ONE = "components:\n  trainer:\n    command: COMMAND\n"
_SAVED = '    checkpoints: "${run.dir}/checkpoints"\n'
_SHELL = "[bash, FILE]"

#: The first that fits.
WAYS = (
    Way(
        name="prime-rl",
        pattern=re.compile(r"^\[(?:orchestrator|inference|trainer)[.\]]", re.MULTILINE),
        # It starts inference, orchestrator and trainer by itself.
        commands={".toml": '[uv, run, rl, "@", FILE, --output-dir, "${run.dir}"]'},
        text=_GANG + _ONE + _SAVED + _STEPS,
        workload="grpo",
    ),
    Way(
        name="verl",
        pattern=re.compile(r"^actor_rollout_ref:|verl\.trainer\.main_ppo", re.MULTILINE),
        commands={
            ".yaml": "[python, -m, verl.trainer.main_ppo, --config-path=FOLDER, --config-name=STEM,"
            " OVERRIDES]",
            ".sh": "[bash, FILE, OVERRIDES]",
        },
        text=_GANG
        + """\
# The dashboard of the cluster that verl runs on; `muster status` says that of this machine's
# stack. On one machine without Ray: leave out `ray` and `launcher`.
ray: {address: "http://127.0.0.1:8265"}
env: {VERL_FILE_LOGGER_PATH: "${attempt.dir}/metrics.jsonl"}
"""
        + _ONE
        + "    launcher: ray_job\n"
        + _SAVED
        + 'progress: {jsonl: "${attempt.dir}/metrics.jsonl", step: step}\n',
        workload="grpo",
    ),
    Way(
        name="slime",
        pattern=re.compile(r"--rollout-num-gpus|--actor-num-nodes"),
        commands={".sh": _SHELL},
        text=_GANG
        + "# Take `ray start`, `ray job submit` and `pkill` out of the script, and start slime's\n"
        "# train.py in it: Muster ends what it has started, and nothing else.\n" + _ONE + _STEPS,
        workload="grpo",
    ),
    Way(
        name="TRL",
        pattern=re.compile(
            r"\b(?:from|import) trl\b|\btrl (?:sft|grpo)\b|^model_name_or_path:", re.MULTILINE
        ),
        commands={
            ".yaml": '[trl, WORKLOAD, --config, FILE, --output_dir, "${run.dir}/checkpoints"]',
            ".py": '[accelerate, launch, FILE, --output_dir, "${run.dir}/checkpoints"]',
            ".sh": _SHELL,
        },
        text=_GANG + _ONE + _SAVED + _STEPS,
    ),
    Way(
        name="torchrun",
        pattern=re.compile(r"\btorchrun\b|torch\.distributed|init_process_group"),
        commands={".sh": _SHELL, ".py": "[torchrun, --standalone, --nproc-per-node=8, FILE]"},
        text=_GANG + _ONE + _STEPS,
    ),
    Way(
        name="a script",
        pattern=re.compile(r"\S"),
        commands={".py": "[python, FILE]", ".sh": _SHELL},
        text="# With it the run waits for GPUs: gang: {nodes: 1, gpus_per_node: 8}\n"
        + _ONE
        + _STEPS,
    ),
)
_OVERRIDES = (
    "trainer.nnodes=1, trainer.n_gpus_per_node=8, 'trainer.logger=[console,file]', "
    '"trainer.default_local_dir=${run.dir}/checkpoints", trainer.resume_mode=auto'
)


def draft_of(directory: Path) -> tuple[str, str]:
    """What was found in a directory, and a commented run spec for it.

    Raises: InvalidSpec, where nothing is there that could be started.
    """
    files = sorted(_files(directory), key=_likelihood)
    for way in WAYS:
        for file in files:
            said = _read(directory / file) if file.suffix in way.commands else ""
            if way.pattern.search(said):
                return f"{way.name} ({file})", _spec(directory, way, file, said)
    problem = "no script is in it, and no configuration of verl, TRL, slime or prime-rl"
    remedy = "go where the training lies, or name that directory"
    raise InvalidSpec((Fault(path="", problem=problem, remedy=remedy),), str(directory))


def _files(directory: Path) -> Iterator[Path]:
    """At most two folders down, relative to the directory."""
    for pattern in ("*", "*/*", "*/*/*"):
        for path in directory.glob(pattern):
            file = path.relative_to(directory)
            if path.is_file() and not _PASSED_OVER.search(str(file)) and file.name != "muster.yaml":
                yield file


def _likelihood(file: Path) -> tuple[int, int, str]:
    ranks = [rank for rank, name in enumerate(_LIKELY) if name in file.stem.lower()]
    return len(file.parts), min(ranks, default=len(_LIKELY)), str(file)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as f:
            return f.read(_READ_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _spec(directory: Path, way: Way, file: Path, said: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", directory.absolute().name.lower()).lstrip("-0123456789")
    told = f"{file} {said}".lower()
    workload = next((one for one in _WORKLOADS if one in told), way.workload)
    path = (directory / file).absolute()
    values = {
        "OVERRIDES": _OVERRIDES,
        "FILE": str(file),
        "FOLDER": str(path.parent),
        "STEM": file.stem,
        "WORKLOAD": workload if workload != "ppo" else "grpo",
    }
    command = re.sub("[A-Z]{4,}", lambda m: values.get(m[0], m[0]), way.commands[file.suffix])
    cwd = directory.absolute().relative_to(project_of(directory.absolute() / "muster.yaml"))
    return f"""\
# A run of {way.name}, by {file}. Its keys are explained in docs/run-spec.md.
name: {name[:32].strip("-") or "training"}
workload: {workload}  # ppo | grpo | sft
# Relative paths start from the project's root, the nearest folder above with .git or
# pyproject.toml; `python` is that of its .venv, where there is one.
cwd: {cwd}
{way.text.replace("COMMAND", command)}"""
