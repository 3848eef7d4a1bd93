"""Write a first run spec for an existing training, from the files in its directory.

The command `muster init` uses this module.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tasks.spec.config_paths import ConfigPath, find_config_path
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import find_project_root, make_absolute, parse_yaml
from tasks.spec.script_checkpoints import (
    find_constant_folder,
    find_loading_options,
    find_saving_option,
    find_subfolder,
)
from tasks.spec.script_imports import ImportFinder
from tasks.spec.script_loops import StepLoop, find_step_loop, may_end_early
from tasks.spec.script_metrics import (
    WrittenMetrics,
    adds_one_to,
    find_json_keys,
    find_written_metrics,
    may_skip_steps,
)
from tasks.spec.script_options import Purpose, ScriptOption, read_options, read_variables
from tasks.spec.script_paths import PathReader
from tasks.spec.script_structure import (
    only_defines,
    only_imports,
    read_imports,
    starts_own_ranks,
)

#: YAML file with the training frameworks that Muster recognises, and with templates for their run
#: specs.
_TEMPLATES = Path(__file__).with_suffix(".yaml")
#: Name of a Python module that Muster writes for a training script. The script uses the module to
#: write its metrics.
HOOK_NAME = "muster_metrics.py"
#: File with the text of the module `muster_metrics.py`. This file has no suffix `.py`, because
#: Muster itself never imports the module.
_HOOK = Path(__file__).with_name("muster_metrics.txt")
#: Number of bytes that are read at the beginning of each possible main file of a training.
_READ_BYTES = 65_536
#: Same as `_READ_BYTES`, but for Python files. This limit is higher, because a Python file that is
#: cut off is often not valid Python.
_READ_PYTHON_BYTES = 1 << 19
#: Matches paths that are ignored, such as hidden files, installed packages and outputs of
#: trainings.
_IGNORED = re.compile(
    r"(^|/)(\.|__pycache__|node_modules|site-packages|wandb/|outputs/"
    rf"|(?:setup|conftest|__init__|{Path(HOOK_NAME).stem})\.py$|muster\.yaml$)"
)
#: Mapping from each workload to a pattern for the training's main file, in lower case. The first
#: workload whose pattern matches is used. The word `endpoint` contains dpo, but must not match.
_WORKLOADS = {
    "grpo": re.compile("grpo"),
    "ppo": re.compile("ppo"),
    "dpo": re.compile("(?<![a-z])dpo"),
    "rm": re.compile("rewardtrainer|rewardconfig|trl reward"),
    "sft": re.compile("sft"),
}
#: Mapping from a workload to the name of its TRL command, if the names differ. TRL has no command
#: `ppo`, so the command `grpo` is used.
_TRL_METHODS = {"ppo": "grpo", "rm": "reward"}
#: Matches a variable in the template for a run spec, such as COMMAND.
_VARIABLE = re.compile(r"\b[A-Z]{4,}\b")
#: Words that are common in the name of a training's main file, the most common first. The order is
#: used to sort the possible main files, see `_CandidateFile.rank`.
_LIKELY = ("rl", "train", *_WORKLOADS, "run", "main")
#: Matches the names of helper files of a training, such as `data.py`. A helper file is hardly ever
#: the main file, which starts the training.
_HELPER = re.compile(
    r"(?i)(^|[_-])(test|tests|eval\w*|data\w*|utils?|helpers?|config\w*|models?|plot\w*|serve\w*"
    r"|infer\w*|prepare\w*|convert\w*|download\w*|install\w*)($|[_-])"
)
#: Matches Python code that only the main file of a program contains.
_MAIN = re.compile(r"__main__|\.parse_args\(|\.backward\(|\.train\(|\.fit\(")
#: Matches Python code that trains a model, or reads the options of a program.
_TRAINING_CALL = re.compile(r"\.parse_args\(|\.backward\(|\.train\(|\.fit\(")
#: Matches the import of a library that computes on GPUs.
_GPU_LIBRARY = re.compile(r"\b(?:import|from) (?:torch|jax|tensorflow|keras|mlx)\b|\bcuda\b")
#: Matches Python code of scripts whose options are the fields of `TrainingArguments` of
#: transformers.
_TRAINING_ARGUMENTS = re.compile(r"\b(?:HfArgumentParser|TrlParser|TrlArgumentParser)\b")
#: Matches comments and docstrings of Python code.
_PROSE = re.compile(r'#[^\n]*|""".*?"""|\'\'\'.*?\'\'\'', re.DOTALL)
#: Matches code that sets the total number of training steps, such as `max_steps=60`.
_STEPS = re.compile(r"\b(?:max_steps|num_steps|total_steps|n_steps)\s*[=:]\s*(\d+)\b")
#: Names of the training step in metrics.
_STEP_KEYS = frozenset({"global_step", "step", "iteration", "iter"})
#: Matches a name in `_STEP_KEYS`, in quotes, in the source of a script.
_STEP_KEY = re.compile(rf"""["']({"|".join(sorted(_STEP_KEYS))})["']\s*[:\]]""")
#: Matches a loop over the training steps. The group contains the first argument of `range`.
_STEP_LOOP = re.compile(
    r"\bfor\s+(?:\w*step\w*|\w*iter\w*|it?|t)\s+in\s+(?:\w+\()?range\(((?:[^(),]|\([^()]*\))*)[,)]"
)
#: Matches the first argument of `range`, such as `start + 1`, if the loop counts from 1.
_FROM_ONE = re.compile(r"(?:^|\+)\s*1\s*$")
#: Matches a word that needs no quotes in a YAML list such as `[python, train.py]`.
_PLAIN_WORD = re.compile(r"[A-Za-z_./-][\w./=@+-]*")
#: Matches the name of a file with metrics in the source of a script, such as `"metrics.jsonl"`.
_METRICS_NAME = re.compile(
    r"""["']((?:metrics?|stats|history|progress|(?:train(?:ing)?_)?logs?)\.jsonl)["']"""
)
#: Number of GPUs in a run spec that is written on a machine without GPUs. In the written spec, the
#: lines with this number are comments.
_EXAMPLE_GPUS = 8
#: Largest number of scripts in `Draft.other_scripts`.
_MAX_OTHER_SCRIPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFolder:
    """A folder for checkpoints that a script or its configuration file names."""

    #: Path of the folder, as the script or the configuration file names it.
    path: str
    #: True if the script certainly saves its checkpoints in this folder.
    is_fixed: bool
    #: How Muster found the folder, such as `because of the key output_dir in configs/tiny.yaml`.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A run spec for the training in a directory."""

    #: Name of the recognised framework, such as `TRL`, or `a script` if no framework was
    #: recognised.
    framework: str
    #: Path of the training's main file, relative to the directory of the training.
    file: Path
    #: Text of the run spec, in YAML with comments.
    text: str
    #: Paths of other scripts that may start the training, relative to the directory of the
    #: training. The most probable script comes first.
    other_scripts: tuple[Path, ...]
    #: Names of required arguments of the script that have no value in the run spec.
    missing_arguments: tuple[str, ...]
    #: Path of the Python module with which the script writes metrics, relative to the directory of
    #: the training. None if the script needs no such module.
    hook: Path | None
    #: Folder of the checkpoints that the script or its configuration file names. None if neither
    #: names the folder, or if the script has an option or a variable for the folder.
    own_folder: OwnFolder | None = None
    #: True if Muster found no way to tell the script the folder of its checkpoints, and the script
    #: names no folder, either.
    needs_checkpoints_variable: bool = False


def read_hook() -> str:
    """Return the text of the Python module with which a training script writes its metrics."""
    return _HOOK.read_text(encoding="utf-8")


def draft_spec(
    directory: Path, file: Path | None = None, *, gpus: int = 0, guide: str = "docs/run-spec.md"
) -> Draft:
    """Recognise the training in a directory, and return a commented run spec for this training.

    Args:
        directory: The directory of the training.
        file: Path of the main file, relative to the directory. None to choose the most likely file.
        gpus: Number of GPUs of this machine that a run can get.
        guide: Path of the document that explains the keys of a run spec.

    Raises:
        InvalidSpec: The directory contains no training that Muster can start.
    """
    if not _is_utf8(str(make_absolute(directory / (file or "")))):
        fault = Fault(
            path="", problem="the path is no valid UTF-8", remedy="rename the file or folder"
        )
        raise InvalidSpec((fault,), ascii(str(directory / (file or ""))))
    templates = parse_yaml(_TEMPLATES.read_text(encoding="utf-8"), _TEMPLATES.name)
    assert isinstance(templates, dict)
    files = [file] if file is not None else [*_find_candidate_files(directory)]
    scripts = _read_candidate_files(make_absolute(directory), files)
    scripts.sort(key=lambda script: script.rank)
    choice = _choose_script(scripts, templates["ways"])
    if choice is not None:
        script, framework = choice
        writer = _SpecWriter(templates, framework, script, make_absolute(directory), gpus, guide)
        return Draft(
            framework=writer.framework_name,
            file=script.file,
            text=writer.write(),
            other_scripts=_find_other_scripts(script, scripts if file is None else ()),
            missing_arguments=writer.missing_arguments,
            hook=writer.hook,
            own_folder=writer.own_folder,
            needs_checkpoints_variable=writer.needs_checkpoints_variable,
        )
    problem = "this folder contains no script, and no configuration of verl, TRL, slime or prime-rl"
    remedy = (
        "change to the folder of the training, or write the path of the folder after `muster init`"
    )
    source = str(directory)
    if file is not None:
        problem = (
            "this file is no Python or shell script, and no configuration of verl, TRL or prime-rl"
        )
        remedy = "write the path of the script that starts the training"
        source = str(directory / file)
    raise InvalidSpec((Fault(path="", problem=problem, remedy=remedy),), source)


def _find_candidate_files(directory: Path) -> Iterator[Path]:
    """Yield the paths of the files that may start a training, relative to the directory.

    The function looks in the directory, and in folders up to two levels below the directory.
    """
    for pattern in ("*", "*/*", "*/*/*"):
        for path in directory.glob(pattern):
            file = path.relative_to(directory)
            # A run spec cannot contain a file name that is no valid UTF-8.
            if _is_utf8(str(file)) and path.is_file() and not _IGNORED.search(str(file)):
                yield file


def _is_utf8(path: str) -> bool:
    """Return True if a path is valid UTF-8. Other paths contain surrogate characters."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_beginning(path: Path) -> str:
    """Return the beginning of a file as text, or "" if the file cannot be read.

    The number of bytes depends on the suffix of the file."""
    at_most = _READ_PYTHON_BYTES if path.suffix == ".py" else _READ_BYTES
    with suppress(OSError), path.open("rb") as f:
        return f.read(at_most).decode("utf-8", errors="replace")
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CandidateFile:
    """A file that may start a training."""

    #: Path of the file, relative to the directory of the training.
    file: Path
    #: Beginning of the file.
    content: str
    #: Source texts of the project's modules that the file imports, directly or through other
    #: modules. Only the beginning of a long module is included.
    imported: tuple[str, ...]
    #: True if another script starts this script once for each rank of the training.
    is_started_by_launcher: bool = False
    #: True if the file is a Python file that only imports modules and defines names.
    only_defines: bool
    #: Same as `only_defines`, but False for a file that consists of imports, because an imported
    #: module may start the training.
    is_module: bool

    @property
    def rank(self) -> tuple[bool, int, int, bool, str]:
        """Sort key of the file. The most likely main file comes first.

        Helper files, such as `data.py`, come last. A module that only defines functions is a helper
        file, too. The other files are sorted by the number of folders in their path, and then by
        their names: common names of main files come first.
        """
        stem = self.file.stem
        ranks = [rank for rank, name in enumerate(_LIKELY) if name in stem.lower()]
        name_rank = min(ranks, default=len(_LIKELY))
        return self.is_helper, len(self.file.parts), name_rank, not self.is_main, str(self.file)

    @property
    def is_helper(self) -> bool:
        """True if the file is hardly ever the main file, according to its name or its content."""
        return _HELPER.search(self.file.stem) is not None or self.only_defines

    @property
    def is_wrapper(self) -> bool:
        """True if the Python file has no options, and leaves the training to another module.

        That module is often a script with options.
        """
        return not read_options(self.content) and _TRAINING_CALL.search(self.content) is None

    @property
    def is_main(self) -> bool:
        """True if the text of the file looks like that of the main file of a program."""
        return self.file.suffix == ".sh" or _MAIN.search(self.content) is not None

    @property
    def starts_own_ranks(self) -> bool:
        """True if the file is a Python script that itself starts the ranks of its training.

        The ranks may also be started by a module of the project that the script imports.
        """
        return self.file.suffix == ".py" and starts_own_ranks((self.content, *self.imported))


def _read_candidate_files(directory: Path, files: Iterable[Path]) -> list[_CandidateFile]:
    """Read files that may start a training, and the project's modules that these files import.

    Args:
        directory: Absolute path of the directory of the training.
        files: Paths of the files, relative to the directory.
    """
    read = cache(_read_beginning)
    finder = ImportFinder(find_project_root(directory / "muster.yaml"), read)
    scripts = []
    for file in files:
        path = directory / file
        content = read(path)
        # Only the beginning of a long file was read. The rest may start the training, so a long
        # file does not count as a module.
        is_complete = len(content) < _READ_PYTHON_BYTES
        is_helper = file.suffix == ".py" and is_complete and only_defines(content)
        modules = finder.find_modules(path) if file.suffix == ".py" else ()
        # Leave out Muster's own module for metrics: it names several frameworks without using them.
        imported = tuple(read(module) for module in modules if module.name != HOOK_NAME)
        scripts.append(
            _CandidateFile(
                file=file,
                content=content,
                imported=imported,
                only_defines=is_helper,
                is_module=is_helper and not only_imports(content),
            )
        )
    return _mark_started_scripts(scripts)


def _mark_started_scripts(scripts: Sequence[_CandidateFile]) -> list[_CandidateFile]:
    """Return all scripts, with `is_started_by_launcher` set for scripts that a launcher starts.

    A launcher is a Python script that itself starts the ranks of its training. Each script whose
    file name appears in the launcher counts as started by the launcher. The source texts of the
    started script and of its imports are added to the field `imported` of the launcher.
    """
    marked = {script.file: script for script in scripts}
    for launcher in scripts:
        if launcher.is_helper or not launcher.starts_own_ranks:
            continue
        for script in scripts:
            name = re.escape(script.file.name)
            if script != launcher and re.search(rf"""["'/]{name}["']""", launcher.content):
                marked[script.file] = replace(marked[script.file], is_started_by_launcher=True)
                texts = (*marked[launcher.file].imported, script.content, *script.imported)
                marked[launcher.file] = replace(marked[launcher.file], imported=texts)
    return [*marked.values()]


def _choose_script(
    scripts: Sequence[_CandidateFile], frameworks: Sequence[Mapping[str, Any]]
) -> tuple[_CandidateFile, Mapping[str, Any]] | None:
    """Return the script that most probably starts the training, and the framework of the script.

    Two kinds of files are chosen only if there is no other file: modules that only define names,
    and scripts that a launcher starts. The other scripts are compared by their frameworks. Among
    scripts with the same framework, scripts that only call an imported training come last.
    Remaining ties are decided by the positions in `scripts`.

    Args:
        scripts: Files that may start the training, the most likely first.
        frameworks: Content of `ways` in `draft.yaml`.

    Returns:
        None if no file starts a training with one of the frameworks.
    """

    # Cache the results, because many scripts may import the same module.
    @cache
    def find_framework(suffix: str, text: str) -> int:
        """Return the index in `frameworks` of the first framework that a file uses.

        If the file uses no framework, return `len(frameworks)`.

        Args:
            suffix: Suffix of the file name, such as `.py`.
            text: Text of the file.
        """
        for index, framework in enumerate(frameworks):
            has_command = suffix in framework["commands"]
            if has_command and re.search(framework["pattern"], text, re.MULTILINE):
                return index
        return len(frameworks)

    @cache
    def remove_prose(text: str) -> str:
        return _PROSE.sub("", text)

    choices: list[tuple[bool, bool, int, bool, int, int]] = []
    for position, script in enumerate(scripts):
        suffix = script.file.suffix
        own = find_framework(suffix, script.content)
        index = own
        # The last framework in the list matches any script. If the script itself uses no other
        # framework, search the imported modules for a framework.
        if own >= len(frameworks) - 1:
            # A comment in a helper module may name a framework that the training does not use.
            codes = (remove_prose(text) for text in script.imported)
            index = min((own, *(find_framework(suffix, code) for code in codes)))
        if index < len(frameworks):
            # An evaluation script often imports the training. So ignore the imports of a helper
            # file such as eval.py.
            compared = own if script.is_helper else index
            is_wrapper = own > compared and script.is_wrapper
            is_started = script.is_started_by_launcher
            choices.append((script.is_module, is_started, compared, is_wrapper, position, index))
    if not choices:
        return None
    *_, position, index = min(choices)
    return scripts[position], frameworks[index]


def _find_other_scripts(
    chosen: _CandidateFile, scripts: Sequence[_CandidateFile]
) -> tuple[Path, ...]:
    """Return the scripts that may start a training, except the chosen script."""
    others = [
        script.file
        for script in scripts
        if script.file != chosen.file
        and script.file.suffix in (".py", ".sh")
        and script.content.strip()
        and not script.is_helper
    ]
    return tuple(others[:_MAX_OTHER_SCRIPTS])


class _SpecWriter:
    """Writes a run spec for a training that a certain Python file starts."""

    def __init__(
        self,
        templates: Mapping[str, Any],
        framework: Mapping[str, Any],
        script: _CandidateFile,
        directory: Path,
        gpus: int,
        guide: str,
    ) -> None:
        """
        Args:
            templates: Content of the file `draft.yaml`.
            framework: The recognised framework, an item of `ways` in `templates`.
            script: Main file of the training.
            directory: Absolute path of the directory of the training.
            gpus: Number of GPUs of this machine that a run can get.
            guide: Path of the document that explains the keys of a run spec.
        """
        self._templates = templates
        self._script = script
        self._starts_own_ranks = script.starts_own_ranks
        self._framework = framework
        if self._starts_own_ranks:
            self._framework = {**framework, **templates["own_ranks"]}
        self._directory = directory
        self._root = find_project_root(directory / "muster.yaml")
        self._guide = guide
        needs_all = self._framework["gpus"] == "all"
        needs_gpus = needs_all or _GPU_LIBRARY.search(script.content) is not None
        #: Number of GPUs that the key `gang` of the spec requests. 0 if the training needs no GPUs
        #: or this machine has none. With 0, the spec has no key `gang`.
        self._gpus = gpus if needs_all else min(gpus, 1)
        if not needs_gpus:
            self._gpus = 0
        self._machine_gpus = gpus
        self._options: list[ScriptOption] = []
        #: Mapping from the purpose of a path, such as the folder of the checkpoints, to the name of
        #: the environment variable from which the script reads the path.
        self._variables: Mapping[Purpose, str] = {}
        #: Reader of the paths in the script and in the modules of the project.
        self._reader: PathReader | None = None
        if script.file.suffix == ".py":
            sources = (script.content, *script.imported)
            self._options = read_options(script.content)
            self._variables = read_variables(sources)
            self._reader = PathReader(sources)
        self._used_options = self._choose_options()
        #: Folder for checkpoints whose path is in the script or in its configuration file, or None.
        self.own_folder = self._find_own_folder()
        #: Metrics file that the script reads from a configuration file, or None.
        self._config_metrics = self._find_config_path(Purpose.METRICS)
        #: Metrics file that the script itself writes, or None if unknown.
        self._written_metrics: WrittenMetrics | None = None
        #: Part of the checkpoints' path that follows the output folder of the script. Example: if
        #: the output folder is `out`, this is `/checkpoints` for checkpoints in `out/checkpoints`,
        #: and `-x` for checkpoints in `out-x`. Empty for checkpoints directly in the output folder.
        self._subfolder = ""
        if self._reader is not None:
            self._written_metrics = find_written_metrics(self._reader)
            if name := self._checkpoints_setting:
                self._subfolder = find_subfolder(self._reader, name)

    @property
    def _checkpoints_setting(self) -> str:
        """Name with which the script reads the folder of its checkpoints.

        This is the attribute of an option, such as `out` for `args.out`, or the name of an
        environment variable. Empty if the script has neither.
        """
        option = self._used_options.get(Purpose.CHECKPOINTS)
        return option.attribute if option else self._variables.get(Purpose.CHECKPOINTS, "")

    def _find_own_folder(self) -> OwnFolder | None:
        """Return the folder of the checkpoints that the script or its configuration file names.

        Returns:
            None if there is no such folder, or if the script has an option or a variable for it.
        """
        if self._checkpoints_setting or "variables" not in self._framework["parts"]:
            return None
        config = self._find_config_path(Purpose.CHECKPOINTS)
        if config is not None:
            path = config.path
            if self._reader is not None and config.is_fixed:
                key = config.key.rpartition(".")[2]
                subfolder = find_subfolder(self._reader, key)
                path = f"{path.rstrip('/')}{subfolder}" if subfolder else path
            reason = f"because of the key {config.key} in {config.file}"
            return OwnFolder(path=path, is_fixed=config.is_fixed, reason=reason)
        path = find_constant_folder(self._reader) if self._reader is not None else ""
        if not path:
            return None
        return OwnFolder(path=path, is_fixed=True, reason=f"according to {self._script.file}")

    @property
    def needs_checkpoints_variable(self) -> bool:
        """True if the spec passes the folder of the checkpoints in a variable of Muster's choice.

        The script does not read this variable yet.
        """
        has_folder = self.own_folder is not None and self.own_folder.is_fixed
        has_variables = "variables" in self._framework["parts"]
        return has_variables and not self._checkpoints_setting and not has_folder

    def _find_config_path(self, purpose: Purpose) -> ConfigPath | None:
        """Return a path that the script reads from a configuration file.

        Returns:
            None if there is no such path, or if the script has an option or a variable for it.
        """
        is_named = purpose in self._used_options or purpose in self._variables
        if is_named or "variables" not in self._framework["parts"]:
            return None
        cwd = self._find_package_base() or self._directory
        script_folder = (self._directory / self._script.file).parent
        folders = (cwd, self._directory, script_folder, self._root)
        return find_config_path(self._options, folders, purpose)

    @property
    def framework_name(self) -> str:
        """Name of the recognised framework, such as `TRL`, or `a script`.

        If a script starts its ranks itself, the name is not `torchrun` but `a script`, because
        torchrun must not start this script.
        """
        is_plain = self._starts_own_ranks and self._framework["name"] == "torchrun"
        return "a script" if is_plain else self._framework["name"]

    @property
    def hook(self) -> Path | None:
        """Path of the Python module with which the script writes its metrics.

        The path is relative to the directory of the training. None if the script needs no such
        module.
        """
        if "variables" not in self._framework["parts"] or self._writes_metrics:
            return None
        folder = self._script.file.parent if self._script.file.suffix == ".py" else Path()
        return folder / HOOK_NAME

    @property
    def _writes_metrics(self) -> bool:
        """True if the script writes its metrics to a file that Muster knows.

        This is so in two cases: an option, a variable or a key of a configuration file names the
        metrics file, or the script writes the file into its output folder.
        """
        return (
            Purpose.METRICS in self._used_options
            or Purpose.METRICS in self._variables
            or self._metrics_file is not None
        )

    @property
    def _metrics_file(self) -> str | None:
        """Path of the metrics file that the script chooses itself, or None if unknown.

        The path comes from a configuration file, or from the option for the folder of the
        checkpoints.
        """
        metrics = self._config_metrics
        if metrics is not None:
            return metrics.path if metrics.is_fixed else None
        return self._metrics_beside_checkpoints

    @property
    def _output_folder(self) -> str:
        """Value of the script's option for its checkpoints, or for its output folder."""
        return "${run.dir}/output" if self._subfolder else "${run.dir}/checkpoints"

    @property
    def _metrics_beside_checkpoints(self) -> str | None:
        """Path of the metrics file that the script writes into its output folder.

        None if the script writes no such file, or if no option, variable or configuration file
        names the folder.
        """
        written = self._written_metrics
        if written is None or Purpose.METRICS in self._used_options:
            return None
        if written.folder_attribute and written.folder_attribute == self._checkpoints_setting:
            return f"{self._output_folder}/{written.name}"
        config = self._find_config_path(Purpose.CHECKPOINTS)
        key = config.key.rpartition(".")[2] if config is not None and config.is_fixed else ""
        if config is not None and key and written.folder_attribute == key:
            return f"{config.path.rstrip('/')}/{written.name}"
        return None

    @property
    def missing_arguments(self) -> tuple[str, ...]:
        """Names of required arguments of the script that have no value in the run spec."""
        written = {name for name, _ in self._written_options}
        return tuple(
            option.name
            for option in self._options
            if option.is_required and option.name not in written
        )

    def write(self) -> str:
        """Return the text of the run spec."""
        parts = []
        for part in ("head", *self._framework["parts"]):
            if not self._is_needed(part):
                continue
            if part == "gang" and not self._gpus:
                part = "no_gang"
            elif part == "success" and self._counts_from_zero:
                part = "success_from_zero"
            text = (
                self._write_variables() if part == "variables" else self._templates["parts"][part]
            )
            if part.startswith("success") and self._find_step_key() is None:
                # The key `success` makes a run fail if Muster does not find the last training step
                # in the metrics. This script may not write the step, so write the key as a comment.
                text = self._templates["unproven_step"] + text.replace("success:", "# success:")
            elif part.startswith("success") and self._may_skip_steps:
                text = self._templates["skipped_steps"] + text.replace("success:", "# success:")
            elif part.startswith("success") and may_end_early(self._script.content):
                text = self._templates["early_end"] + text.replace("success:", "# success:")
            elif part == "steps":
                text = self._write_steps(text)
            elif part == "checkpoints":
                text = self._write_checkpoints(text)
            parts.append(text)
        command = self._framework["commands"][self._script.file.suffix]
        options = ", ".join(
            name if value is None else f"{name}, {json.dumps(value)}"
            for name, value in self._written_options
        )
        command = command.replace(", OPTIONS", f", {options}" if options else "")
        if self.missing_arguments:
            # Add a comment to the run spec, with the indentation of the key `command`.
            names = ", ".join(self.missing_arguments)
            command += f"\n    # The script also requires: {names}"
        flag = self._resume_flag
        if flag is not None and flag.purpose is Purpose.RESUME_FLAG:
            explanation = "without a checkpoint, the script must start at its first step"
            command += f"\n    # {flag.name}: {explanation}"
        if option := self._used_options.get(Purpose.RESUME_FROM):
            command += (
                f"\n    # {option.name}: this value is empty if there is no checkpoint. The script "
                "must then start\n    # at its first step."
            )
        if self._starts_own_ranks:
            command += f"\n{self._templates['own_ranks_comment'].rstrip()}"
        if "PROCESSES" in command and not self._gpus:
            command += f"\n{self._templates['processes_without_gang'].rstrip()}"
        text = "".join(parts).replace("COMMAND", command)
        text = text.replace("OVERRIDES", self._templates["overrides"])
        text = text.replace("IMPORT", self._write_hook_import())
        if not self._find_total():
            text = text.replace(", total: TOTAL}", "}  # add total: NUMBER OF STEPS")
        values = self._make_values()
        return _VARIABLE.sub(lambda match: values.get(match[0], match[0]), text)

    def _write_checkpoints(self, text: str) -> str:
        """Return the key `checkpoints` of the run spec, with comments.

        If the script saves its checkpoints in a subfolder of its output folder, or in a folder
        beside the output folder, the key names this folder. If the script or its configuration file
        names the folder of the checkpoints, the key names this folder, and a comment says how to
        give each run a folder of its own.

        Args:
            text: The key as the template contains it.
        """
        if self._subfolder:
            path = _name_checkpoints(f"{self._output_folder}{self._subfolder}")
            text = text.replace('"${run.dir}/checkpoints"', json.dumps(path))
            option = self._used_options.get(Purpose.CHECKPOINTS)
            name = option.name if option else self._variables[Purpose.CHECKPOINTS]
            comment = "subfolder" if self._subfolder.startswith("/") else "sibling_folder"
            return _add_comment(text, self._templates[comment].replace("OPTION", name))
        folder = self.own_folder
        if folder is None:
            return text
        name = "own_folder" if folder.is_fixed else "vague_own_folder"
        comment = self._templates[name].replace("REASON", folder.reason)
        if folder.is_fixed:
            path = _name_checkpoints(folder.path)
            text = text.replace('"${run.dir}/checkpoints"', _quote(path))
        return _add_comment(text, comment)

    def _write_steps(self, text: str) -> str:
        """Return the key `progress` of the run spec, with comments.

        Args:
            text: The key as the template contains it.
        """
        text = text.replace("step: step", f"step: {self._find_step_key() or 'step'}")
        if self._metrics_file is not None and self._config_metrics is not None:
            config = self._config_metrics
            comment = f"# The key {config.key} in {config.file} names this file.\n"
            path = _quote(self._metrics_file)
            return comment + text.replace('"${attempt.dir}/metrics.jsonl"', path)
        if self._metrics_file is not None:
            comment = "# The script itself writes this file, into its output folder.\n"
            path = _quote(self._metrics_file)
            return comment + text.replace('"${attempt.dir}/metrics.jsonl"', path)
        if file := self._find_unnamed_metrics():
            return (
                f"# If the script already writes its steps to {file}, use this file instead:\n"
                f"#   progress: {{jsonl: {_quote(file)}, step: name-of-the-step}}\n"
                f"{text}"
            )
        if self._written_metrics is not None and not self._writes_metrics:
            return (
                f"# The script seems to write its own metrics file {self._written_metrics.name}. "
                "To use this\n"
                "# file, write its path in `progress.jsonl`, and the key of the step in "
                f"`progress.step`.\n{text}"
            )
        return text

    def _find_unnamed_metrics(self) -> str:
        """Search the source of the script for the name of a metrics file, and return its path.

        Return "" if there is no such name, or if neither the script nor its configuration file
        names the folder of the checkpoints.
        """
        folder = self._find_config_path(Purpose.CHECKPOINTS)
        if folder is None or not folder.is_fixed or self._writes_metrics:
            return ""
        texts = (self._script.content, *self._script.imported)
        names = {name for text in texts for name in _METRICS_NAME.findall(text)}
        return f"{folder.path.rstrip('/')}/{names.pop()}" if len(names) == 1 else ""

    def _is_needed(self, part: str) -> bool:
        """Return True if the run spec needs a certain part of the template."""
        if part.endswith("_hook"):
            return self.hook is not None
        if part == "success":
            return self._find_total() is not None
        return True

    def _choose_options(self) -> dict[Purpose, ScriptOption]:
        """Return the options of the script that have a known purpose, by their purpose."""
        chosen: dict[Purpose, ScriptOption] = {}
        for option in self._options:
            if option.purpose is not None:
                chosen.setdefault(option.purpose, option)
        if self._reader is not None:
            self._correct_by_source(chosen, self._reader)
        if _TRAINING_ARGUMENTS.search(self._script.content):
            name = "--output_dir"
            # If the script's own dataclass has an option for the folder, use that option.
            chosen.setdefault(Purpose.CHECKPOINTS, ScriptOption(name=name, is_required=False))
        return chosen

    def _correct_by_source(self, chosen: dict[Purpose, ScriptOption], reader: PathReader) -> None:
        """Correct the purposes of options with the help of the calls that save and load.

        An option such as `--ckpt` may name a folder, or a checkpoint to load. An option such as
        `--run-root` may name the folder of the checkpoints, although its name does not say so.

        Args:
            chosen: Options by their purpose. This method changes the mapping.
            reader: Reader of the script.
        """
        saving = find_saving_option(reader)
        loading = find_loading_options(reader)
        folder = chosen.get(Purpose.CHECKPOINTS)
        if folder is not None and folder.attribute in loading and folder.attribute != saving:
            del chosen[Purpose.CHECKPOINTS]
            chosen.setdefault(Purpose.RESUME_FROM, folder)
        for option in self._options:
            is_path = not option.is_flag and option.name.startswith("-")
            if is_path and option.attribute == saving and option not in chosen.values():
                chosen[Purpose.CHECKPOINTS] = option

    @property
    def _resume_flag(self) -> ScriptOption | None:
        """Option without a value that makes the script resume, or None if none is needed."""
        if Purpose.RESUME_FROM in self._used_options or Purpose.RESUME_FROM in self._variables:
            return self._used_options.get(Purpose.AUTO_RESUME)
        return self._used_options.get(
            Purpose.AUTO_RESUME, self._used_options.get(Purpose.RESUME_FLAG)
        )

    @property
    def _written_options(self) -> list[tuple[str, str | None]]:
        """The options in the command of the run spec, with their values. None means no value."""
        values = {
            Purpose.CHECKPOINTS: self._output_folder,
            Purpose.RESUME_FROM: "${attempt.resume_from}",
            Purpose.STEPS: "${progress.total}",
            Purpose.METRICS: "${attempt.dir}/metrics.jsonl",
        }
        written: list[tuple[str, str | None]] = []
        for purpose, value in values.items():
            option = self._used_options.get(purpose)
            if option is not None and (purpose is not Purpose.STEPS or self._find_total()):
                written.append((option.name, value))
        if flag := self._resume_flag:
            written.append((flag.name, None))
        return written

    def _write_variables(self) -> str:
        """Return the key `env` of the run spec as YAML, or "" if there are no variables.

        The variables pass up to three paths to the script: the metrics file, the folder of
        checkpoints, and the checkpoint from which the script resumes. If the script has a
        command-line option for a path, the path needs no variable. If the script already reads a
        variable for a path, the spec sets this variable. If a configuration file of the script
        names the path, the path needs no variable, either. The variable PYTHONPATH contains the
        folders that are added to Python's search path for modules.
        """
        lines = ["env:"]
        if import_folders := self._find_import_folders():
            lines.append(
                "  # Folders in which Python finds the project's modules that the script imports"
            )
            lines.append(f"  PYTHONPATH: {_quote(os.pathsep.join(import_folders))}")
        if Purpose.METRICS not in self._used_options and self._metrics_file is None:
            name = self._variables.get(Purpose.METRICS, "METRICS")
            lines.append(f'  {name}: "${{attempt.dir}}/metrics.jsonl"')
        if Purpose.CHECKPOINTS not in self._used_options and Purpose.CHECKPOINTS in self._variables:
            lines.append(f'  {self._variables[Purpose.CHECKPOINTS]}: "{self._output_folder}"')
        elif self.needs_checkpoints_variable:
            lines.append('  # Save the checkpoints in this folder: os.environ["CHECKPOINTS"]')
            lines.append('  CHECKPOINTS: "${run.dir}/checkpoints"')
        if Purpose.RESUME_FROM in self._variables:
            lines.append(f'  {self._variables[Purpose.RESUME_FROM]}: "${{attempt.resume_from}}"')
        elif Purpose.RESUME_FROM not in self._used_options and self._resume_flag is None:
            default = 'load the checkpoint os.environ["RESUME_FROM"], if this variable is not empty'
            resuming = self._templates["resuming"].get(self._framework["name"], default)
            lines.append(f"  # To resume, the script needs: {resuming}")
            lines.append('  RESUME_FROM: "${attempt.resume_from}"')
        return "\n".join(lines) + "\n" if len(lines) > 1 else ""

    def _find_step_key(self) -> str | None:
        """Return the key of the training step in the metrics that the training writes.

        Returns:
            The key. None if the script does not write its metrics yet, or if the code does
            not contain exactly one possible key.
        """
        if not self._writes_metrics:
            return None
        keys: Set[str] = set()
        if self._reader is not None:
            keys = find_json_keys(self._reader) & _STEP_KEYS
        if not keys:
            texts = (self._script.content, *self._script.imported)
            keys = {key for text in texts for key in _STEP_KEY.findall(text)}
        return next(iter(keys)) if len(keys) == 1 else None

    @property
    def _may_skip_steps(self) -> bool:
        """True if the script may write only some of its steps into the metrics."""
        key = self._find_step_key()
        sources = (self._script.content, *self._script.imported)
        return key is not None and may_skip_steps(key, sources)

    def _find_total(self) -> int | None:
        """Return the number of training steps according to the script, or None if unknown."""
        option = self._used_options.get(Purpose.STEPS)
        if option is not None:
            return option.default_number
        match = _STEPS.search(_PROSE.sub("", self._script.content))
        if match is not None:
            return int(match[1]) or None
        return self._step_loop.total if self._step_loop is not None else None

    def _find_last_step(self) -> int | None:
        """Return the number of the last training step, or None if unknown.

        If the script counts its steps from 0, the last step is one less than the number of steps.
        """
        total = self._find_total()
        return total - 1 if total and self._counts_from_zero else total

    @property
    def _step_loop(self) -> StepLoop | None:
        """Loop over the training steps in the script, or None if the number of steps is unclear."""
        is_python = self._script.file.suffix == ".py"
        has_loop = is_python and "loop_hook" in self._framework["parts"]
        return find_step_loop(self._script.content) if has_loop else None

    @property
    def _counts_from_zero(self) -> bool:
        """True if the script has a loop over its steps that probably starts with step 0.

        False if the trainer class of a framework runs the steps, because such classes count from 1.
        Also False if the script writes `step + 1` into its metrics.
        """
        if "loop_hook" not in self._framework["parts"]:
            return False
        step_key = self._find_step_key()
        reader = self._reader
        if step_key is not None and reader is not None and adds_one_to(step_key, reader):
            return False
        if self._step_loop is not None:
            return self._step_loop.last_step < self._step_loop.total
        loops = _STEP_LOOP.finditer(self._script.content)
        return any(not self._begins_with_one(loop) for loop in loops)

    @staticmethod
    def _begins_with_one(loop: re.Match[str]) -> bool:
        """Return True if a loop over the steps starts with step 1.

        Args:
            loop: A match of `_STEP_LOOP`.
        """
        has_start = loop[0].endswith(",")
        return has_start and _FROM_ONE.search(loop[1]) is not None

    def _write_script(self) -> str:
        """Return the script as items of a YAML list, for the command that starts the training.

        If the script is a module of a package and imports other modules of this package, it is
        started with `-m`. Otherwise Python would not find these modules.
        """
        base = self._find_package_base()
        if base is None:
            return _quote(str(self._script.file))
        file = (self._directory / self._script.file).relative_to(base)
        module = file.parent if file.name == "__main__.py" else file.with_suffix("")
        return f"-m, {_quote('.'.join(module.parts))}"

    def _write_hook_import(self) -> str:
        """Return the statement with which the script imports the module `muster_metrics`."""
        name = Path(HOOK_NAME).stem
        base = self._find_package_base()
        if base is None:
            return f"import {name}"
        package = (self._directory / self._script.file).parent.relative_to(base)
        return f"from {'.'.join(package.parts)} import {name}"

    def _find_package_base(self) -> Path | None:
        """Return the directory from which Python can import the package that contains the script.

        Returns:
            The directory of the training, or a folder above it if the directory of the training
            belongs to the package. None if the script imports no other modules of its package.
        """
        if self._script.file.suffix != ".py":
            return None
        file = self._directory / self._script.file
        imports = read_imports(self._script.content)
        base = self._directory
        while base != self._root and (base / "__init__.py").is_file():
            base = base.parent
        # A relative import with N leading dots needs N packages above the script. These packages
        # may lack the file __init__.py.
        while len(file.relative_to(base).parts) <= imports.level and base != base.parent:
            base = base.parent
        imports_package = (
            file.parent != base
            and file.relative_to(base).parts[0] in imports.names
            and (file.name == "__main__.py" or (file.parent / "__init__.py").is_file())
        )
        return base if imports.level or imports_package else None

    def _find_import_folders(self) -> list[str]:
        """Return the folders that must be added to Python's search path for modules.

        A script in the folder `scripts` may import a package from the folder `src`, or from the
        root of the project. Python does not search these folders by itself.

        Returns:
            Paths relative to the working directory of the run. Empty if no folder must be added.
        """
        if self._script.file.suffix != ".py":
            return []
        cwd = self._find_package_base() or self._directory
        is_module = self._find_package_base() is not None
        searched = cwd if is_module else (self._directory / self._script.file).parent
        names = {
            name
            for name in read_imports(self._script.content).names
            if not _has_module(searched, name)
        }
        folders = dict.fromkeys((cwd, cwd / "src", self._root, self._root / "src"))
        return [
            os.path.relpath(folder, cwd)
            for folder in folders
            if any(_has_module(folder, name) for name in names)
        ]

    def _write_cwd(self) -> str:
        """Return the working directory of the run for the run spec.

        The path is relative to the root of the project, or absolute if it is not in the project.
        """
        cwd = self._find_package_base() or self._directory
        return str(cwd.relative_to(self._root) if cwd.is_relative_to(self._root) else cwd)

    def _make_values(self) -> dict[str, str]:
        """Return a mapping from the names of variables in the template to their values."""
        file = self._script.file
        name = re.sub(r"[^a-z0-9]+", "-", self._directory.name.lower()).lstrip("-0123456789")
        lowered = f"{file} {self._script.content}".lower()
        default_workload = self._framework.get("workload", "sft")
        mentioned = (name for name, words in _WORKLOADS.items() if words.search(lowered))
        workload = next(mentioned, default_workload)
        gpus = self._gpus or self._machine_gpus or _EXAMPLE_GPUS
        without_gang = "If the run needs GPUs, remove the first # of the next line in this file."
        if not self._machine_gpus:
            without_gang = f"This machine shows no GPUs. {without_gang}"
        return {
            "TRAINING": self.framework_name,
            "FILE": self._write_script(),
            "SCRIPT": str(file),
            "FOLDER": str((self._directory / file).parent),
            "STEM": file.stem,
            "NAME": name[:32].strip("-") or "training",
            "WORKLOAD": workload,
            "METHOD": _TRL_METHODS.get(workload, workload),
            "HERE": _quote(self._write_cwd()),
            "GUIDE": self._guide,
            "COUNT": str(gpus),
            "PROCESSES": str(self._gpus or 1),
            "WITHOUT": without_gang,
            "TOTAL": str(self._find_total()),
            "LAST": str(self._find_last_step()),
        }


def _has_module(folder: Path, name: str) -> bool:
    """Return True if a folder contains a Python module or package with a certain name."""
    return bool(name) and ((folder / f"{name}.py").is_file() or any((folder / name).glob("*.py")))


def _add_comment(text: str, comment: str) -> str:
    """Add a comment above the last line of a part of a run spec, and return the new text."""
    head, _, key = text.rstrip("\n").rpartition("\n")
    return f"{head}\n{comment.rstrip()}\n{key}\n"


def _name_checkpoints(folder: str) -> str:
    """Return the value of the key `checkpoints` for a folder.

    If the name of the folder contains a character such as `[`, Muster would read the name as a
    pattern of checkpoints. So the result is a pattern that matches the content of the folder.
    """
    return f"{glob.escape(folder)}/*" if glob.has_magic(folder) else folder


def _quote(text: str) -> str:
    """Return a text as an item of a YAML list, in quotes if necessary."""
    is_plain = _PLAIN_WORD.fullmatch(text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)
