"""The lineage of a run: the data that the run reads, and the checkpoints and files that it makes.

The flow process of a run writes the lineage into the file `lineage.json` of the run's directory.
The artifact `lineage` on the Prefect server contains the same JSON. So the lineage of a run stays
known after its old checkpoints were removed, and on other hosts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from tasks.record.checkpoint_names import NameKind, classify_name
from tasks.record.checkpoints import judge_checkpoints
from tasks.record.disk import write_json
from tasks.record.outcome import Recorded
from tasks.record.places import RunPlace, read_own_file
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.spec.checkpoint_urls import is_url
from tasks.spec.data_inputs import is_data_path, list_paths, make_result_uri
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.run import RunSpec
from tasks.spec.start_from import find_run_id
from tasks.spec.step import ARGS_VARIABLE, RESULT_FILE, RESULT_VARIABLE

#: Largest number of outputs in a lineage. If there are more, the oldest checkpoints are left out.
_MAX_OUTPUTS = 500
#: Largest number of inputs in a lineage.
_MAX_INPUTS = 100
#: Largest number of recorded paths from the commands and variables of a run spec.
_MAX_PATHS = 200
#: Largest number of figures that are recorded for one output. A figure is a number in the result of
#: a pipeline step.
_MAX_FIGURES = 20
#: Largest size in bytes of a pipeline step's result. A larger result is not read.
_MAX_RESULT_BYTES = 1 << 20
#: Matches the names of options for the data of a training. Before the match, leading dashes and
#: Hydra groups such as `data.` are removed from the name, and `-` is replaced by `_`.
_DATA_OPTION = re.compile(
    r"(?:(?:train|training|val|valid|validation|test|eval|prompt|input|pretrain|sft)_)?"
    r"(?:data|datasets?)(?:_(?:paths?|files?|dir|name|folder|set))?"
    r"|(?:train|training|val|valid|validation|test|eval|prompt)_files?|prompts|prompt_path"
)
#: Matches an option and its value in a single word, such as `--data=FILE` or
#: `data.train_files=FILE`.
_ASSIGNMENT = re.compile(r"(?:--?|\+{1,2})?([A-Za-z][\w.-]*)=(.+)", re.DOTALL)
#: Matches the suffixes of data files. A value with such a suffix is a path.
_DATA_FILE = re.compile(
    r"\.(?:parquet|arrow|jsonl?|csv|tsv|txt|tfrecords?|bin|npy|npz|pt|tar|gz|zst|xz)$"
)


class DataKind(StrEnum):
    """Kind of the data that a run reads or writes."""

    #: Files or a data set.
    DATA = "data"
    CHECKPOINT = "checkpoint"
    #: JSON result of a pipeline step.
    RESULT = "result"
    #: JSON result of a pipeline step that evaluated a checkpoint. The result contains numbers.
    EVALUATION = "evaluation"
    #: File or folder that a pipeline step created from a checkpoint.
    EXPORT = "export"


class LineageInput(Recorded):
    """Data that a run reads, such as a data set or a checkpoint."""

    #: Absolute path or URI, or the name of a data set as written in the command of the run.
    uri: str = ""
    kind: DataKind = DataKind.DATA
    #: Id of the run that wrote the data, as found in the path. None if the path contains no run id.
    run: str | None = None
    #: Training step of a checkpoint, or None if unknown.
    step: float | None = None


class LineageResume(Recorded):
    """Record of an attempt that started from a checkpoint of the same run."""

    attempt: int = 0
    uri: str = ""
    step: float | None = None


class LineageOutput(Recorded):
    """Checkpoint, file or result that a run has written."""

    if_any = ("step", "signature", "figures", "path")

    #: Absolute path or URI. The result of a pipeline step has the URI `muster://runs/RUN/result`.
    uri: str = ""
    kind: DataKind = DataKind.DATA
    #: Training step of a checkpoint, or None if unknown.
    step: float | None = None
    #: Number of the attempt that wrote the output, or None if unknown.
    attempt: int | None = None
    #: Time at which the output was saved, in UTC epoch seconds.
    at: float = 0.0
    #: Hash of the files of a checkpoint. The hash changes if the checkpoint is saved again.
    signature: str = ""
    #: Numbers in the result of an evaluation, by their dotted keys.
    figures: Mapping[str, float] = {}
    #: Path of the result file of a pipeline step. Empty for other outputs.
    path: str = ""


class Lineage(Recorded):
    """The data that a run reads and writes. This is the content of `lineage.json`."""

    run_id: str = ""
    flow_run_id: str = ""
    workload: str = ""
    #: Absolute paths and URIs in the commands and variables of the run's spec. If such a path is an
    #: output of another run, the path counts as an input of this run.
    paths: tuple[str, ...] = ()
    inputs: tuple[LineageInput, ...] = ()
    resumes: tuple[LineageResume, ...] = ()
    #: Outputs, sorted by the time at which they were saved.
    outputs: tuple[LineageOutput, ...] = ()

    def including(self, earlier: Lineage) -> Lineage:
        """Return this lineage, with outputs added that only an earlier lineage contains.

        For example, an output may be a checkpoint that was deleted in the meantime.

        Args:
            earlier: Lineage of the same run at an earlier time.
        """
        outputs = {(output.uri, output.signature): output for output in earlier.outputs}
        outputs |= {(output.uri, output.signature): output for output in self.outputs}
        by_time = sorted(outputs.values(), key=lambda output: output.at)
        return self.with_changes(
            paths=self.paths or earlier.paths,
            inputs=self.inputs or earlier.inputs,
            resumes=self.resumes or earlier.resumes,
            outputs=tuple(by_time[-_MAX_OUTPUTS:]),
        )


def read_lineage(place: RunPlace) -> Lineage | None:
    """Return the content of a run's `lineage.json`, or None if it is missing or cannot be read."""
    with suppress(OSError, ValueError):
        return Lineage.model_validate_json(read_own_file(place.lineage))
    return None


def write_lineage(place: RunPlace, content: Mapping[str, Any]) -> None:
    """Write the file `lineage.json` of a run.

    Args:
        place: Directory of the run.
        content: The lineage as JSON data, in which secrets are masked.

    Raises:
        OSError: The file cannot be written.
    """
    write_json(place.lineage, content)


def describe_lineage(
    spec: RunSpec,
    attempt_spec: Mapping[str, Any],
    place: RunPlace,
    record: RunJson,
    *,
    is_running: bool,
) -> Lineage:
    """Return the lineage of a run according to its files at this moment.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        attempt_spec: The spec of the last attempt as plain data, in which placeholders are
            replaced.
        place: Directory of the run.
        record: Record of the run.
        is_running: True if the trainer may still be writing checkpoints.

    Raises:
        OSError: The folder of the checkpoints cannot be read.
        ValueError: A file of Muster is not valid.
    """
    inputs = list_inputs(attempt_spec, place.run_id)
    outputs = [
        *_list_checkpoints(spec, place, record, is_running=is_running),
        *_list_step_outputs(spec, place, record, inputs),
    ]
    return Lineage(
        run_id=place.run_id,
        flow_run_id=record.flow_run_id,
        workload=record.workload,
        paths=list_spec_paths(attempt_spec),
        inputs=inputs,
        resumes=tuple(_list_resumes(record.attempts, inputs)),
        outputs=tuple(sorted(outputs, key=lambda output: output.at)),
    )


def list_inputs(spec: Mapping[str, Any], run_id: str) -> tuple[LineageInput, ...]:
    """Return the inputs of a run that the run's spec names.

    The inputs are:

    - the checkpoint in the key `start_from`
    - the items of the key `inputs`
    - the values of options such as `--dataset`
    - files of other runs

    Args:
        spec: The run spec as plain data. If it is the spec of an attempt, relative paths become
            absolute.
        run_id: Id of the run. Files of this run are left out.
    """
    inputs: dict[str, LineageInput] = {}
    start = mapping_or_empty(spec.get("start_from"))
    if start.get("checkpoint") and start.get("attempt") is None:
        uri = str(start["checkpoint"])
        inputs[uri] = LineageInput(
            uri=uri, kind=DataKind.CHECKPOINT, run=start.get("run"), step=start.get("step")
        )
    components = mapping_or_empty(spec.get("components")).values()
    root = str(spec.get("cwd") or "")
    uris = [_locate(str(text), root) for text in spec.get("inputs") or ()]
    for component in map(mapping_or_empty, components):
        component_root = os.path.join(root, str(component.get("cwd") or ""))
        words = [*map(str, component.get("command") or ()), *map(str, component.get("args") or ())]
        uris += [_locate_value(value, component_root) for value in _list_option_values(words)]
    uris += [path for path in list_spec_paths(spec) if find_run_id(path)]
    for uri in map(_as_storable, uris):
        if uri not in inputs and find_run_id(uri) != run_id:
            inputs[uri] = LineageInput(uri=uri, kind=classify_uri(uri), run=find_run_id(uri))
    return tuple(inputs.values())[:_MAX_INPUTS]


def classify_uri(uri: str) -> DataKind:
    """Return the probable kind of the data at a path or URI, according to the path alone."""
    if (run_id := find_run_id(uri)) and uri == make_result_uri(run_id):
        return DataKind.RESULT
    kind = classify_name(uri.rstrip("/").rpartition("/")[2])
    is_checkpoint = kind in (NameKind.CHECKPOINT, NameKind.NAMED_CHECKPOINT)
    return DataKind.CHECKPOINT if is_checkpoint else DataKind.DATA


def list_spec_paths(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the absolute paths and URIs in the commands and variables of a run spec.

    Args:
        spec: The run spec as plain data.
    """
    paths = dict.fromkeys(text for text in _list_spec_texts(spec) if is_data_path(text))
    return tuple(map(_as_storable, paths))[:_MAX_PATHS]


def _list_spec_texts(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of environment variables and the words of the commands in a run spec.

    An option such as `--data=FILE` yields FILE. If a pipeline step calls a Python function, each
    argument of the function is yielded separately.
    """
    components = [*mapping_or_empty(spec.get("components")).values()]
    for part in (spec, *components):
        for name, value in mapping_or_empty(mapping_or_empty(part).get("env")).items():
            if name == RESULT_VARIABLE or not isinstance(value, str):
                continue
            if name == ARGS_VARIABLE:
                with suppress(ValueError, RecursionError):
                    yield from _list_texts(json.loads(value))
            else:
                yield value
    for component in map(mapping_or_empty, components):
        for word in (*(component.get("command") or ()), *(component.get("args") or ())):
            match = _ASSIGNMENT.fullmatch(str(word))
            yield match[2] if match else str(word)


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _list_texts(item)


def _list_option_values(words: Sequence[str]) -> Iterator[str]:
    """Yield the values of options for the data of a training, such as `--dataset`.

    Args:
        words: The command as a list of words.
    """
    for position, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word)
        if match:
            name, values = match[1], [match[2]]
        elif word.startswith("-"):
            name = word.lstrip("-")
            values = []
            for following in words[position + 1 :]:
                # An option may have several values. Use a further word as a value only if it is the
                # name of a data file. Other words may be arguments of the program itself.
                if following.startswith("-") or (values and not _DATA_FILE.search(following)):
                    break
                values.append(following)
        else:
            continue
        plain_name = name.rpartition(".")[2].replace("-", "_").lower()
        if not _DATA_OPTION.fullmatch(plain_name):
            continue
        for value in values:
            # The value may be a list, which Hydra writes as [a,b].
            yield from filter(None, (part.strip("\"' ") for part in value.strip("[]").split(",")))


def _locate_value(value: str, root: str) -> str:
    """Return the value of an option, with a relative path changed to an absolute path.

    A value such as `openai/gsm8k`, without the suffix of a data file, is the name of a data set. A
    name is returned unchanged.
    """
    is_path = value.startswith(("./", "../")) or _DATA_FILE.search(value) is not None
    return _locate(value, root) if is_path else value


def _as_storable(text: str) -> str:
    """Return a text that can be encoded as UTF-8.

    Python represents each byte of a path that is not valid UTF-8 by a surrogate. Such a surrogate
    is replaced by an escape sequence, such as `\\udcff`.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _locate(text: str, root: str) -> str:
    """Return an absolute path for a relative path. Return a URI or an absolute path unchanged.

    Args:
        text: The path or URI.
        root: Directory from which a relative path starts.
    """
    if is_url(text) or text.startswith(("/", "$")):
        return text
    return os.path.normpath(os.path.join(root, text))


def _list_resumes(
    attempts: Iterable[AttemptRecord], inputs: Sequence[LineageInput]
) -> Iterator[LineageResume]:
    external = {data.uri for data in inputs}
    for attempt in attempts:
        uri = attempt.checkpoint
        if uri is not None and uri not in external:
            step = attempt.resume.step if attempt.resume is not None else None
            yield LineageResume(attempt=attempt.number, uri=uri, step=step)


def _list_checkpoints(
    spec: RunSpec, place: RunPlace, record: RunJson, *, is_running: bool
) -> Iterator[LineageOutput]:
    """Yield the complete checkpoints of a run that exist now."""
    if not record.attempts:
        return
    attempts = record.attempts
    judged = judge_checkpoints(
        spec, place, attempts, record.foreign_checkpoints, is_running=is_running
    )
    for one in judged:
        checkpoint = one.checkpoint
        if not checkpoint.is_complete or one.why_foreign:
            continue
        numbers = [one.number for one in attempts if one.started_at <= checkpoint.changed_at]
        if not numbers:
            continue
        yield LineageOutput(
            uri=_as_storable(str(checkpoint.path)),
            kind=DataKind.CHECKPOINT,
            step=checkpoint.step,
            attempt=max(numbers),
            at=checkpoint.changed_at,
            signature=checkpoint.signature,
        )


def _list_step_outputs(
    spec: RunSpec, place: RunPlace, record: RunJson, inputs: Sequence[LineageInput]
) -> Iterator[LineageOutput]:
    """Yield the result of a completed pipeline step, and the files whose paths are in the result.

    Nothing is yielded if the run is not a pipeline step.
    """
    attempt = record.attempt
    if spec.workload != "step" or attempt is None or attempt.state is not RunState.COMPLETED:
        return
    path = place.attempt(attempt.number).directory / RESULT_FILE
    result = _read_result(path)
    if result is None:
        return
    at = attempt.ended_at or attempt.started_at
    reads_checkpoint = any(data.kind is DataKind.CHECKPOINT for data in inputs)
    figures = dict(_list_figures(result))
    is_evaluation = reads_checkpoint and bool(figures)
    yield LineageOutput(
        uri=make_result_uri(place.run_id),
        kind=DataKind.EVALUATION if is_evaluation else DataKind.RESULT,
        attempt=attempt.number,
        at=at,
        figures=figures,
        path=str(path),
    )
    input_uris = {data.uri for data in inputs}
    for uri in list_paths(result):
        if uri not in input_uris:
            kind = DataKind.EXPORT if reads_checkpoint else DataKind.DATA
            yield LineageOutput(uri=uri, kind=kind, attempt=attempt.number, at=at)


def _read_result(path: Path) -> Any:
    """Return the JSON result of a pipeline step, or None if it is missing, too large or invalid."""
    with suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= _MAX_RESULT_BYTES:
            return json.loads(read_own_file(path))
    return None


def _list_figures(result: Any) -> list[tuple[str, float]]:
    """Return the finite numbers in the result of a pipeline step, each with its dotted key.

    At most the first 20 numbers are returned.
    """
    figures: list[tuple[str, float]] = []

    def collect(value: Any, key: str) -> None:
        if len(figures) == _MAX_FIGURES:
            return
        if isinstance(value, dict):
            for name, item in value.items():
                collect(item, f"{key}.{name}" if key else str(name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if not math.isfinite(number):
                return
            figures.append((key or "result", number))

    collect(result, "")
    return figures


class LineageIndex:
    """Finds the runs that wrote the inputs of another run, by a search in many lineages."""

    def __init__(self, lineages: Mapping[str, Lineage]) -> None:
        """
        Args:
            lineages: Mapping from run ids to lineages.
        """
        self.lineages = lineages
        #: Mapping from the URI of an output to a pair: the id of the run that wrote the output, and
        #: the output.
        self._outputs: dict[str, tuple[str, LineageOutput]] = {}
        for run_id, lineage in lineages.items():
            for output in lineage.outputs:
                self._outputs[output.uri] = (run_id, output)

    def list_inputs(self, run_id: str) -> list[LineageInput]:
        """Return the inputs of a run, each with the run that wrote the input, if known."""
        lineage = self.lineages.get(run_id)
        if lineage is None:
            return []
        inputs: dict[str, LineageInput] = {}
        for data in lineage.inputs:
            inputs[data.uri] = self._complete(data, run_id)
        for path in lineage.paths:
            maker = self._find_maker(path, run_id)
            if maker is not None and path not in inputs:
                inputs[path] = self._complete(LineageInput(uri=path), run_id)
        return [*inputs.values()]

    def list_users(self, run_id: str) -> dict[str, list[LineageInput]]:
        """Return the other runs that read outputs of a run.

        Args:
            run_id: Id of the run that wrote the outputs.

        Returns:
            Mapping from the id of each other run to a list of inputs: the outputs of the run
            `run_id` that the other run reads.
        """
        users: dict[str, list[LineageInput]] = {}
        for other_id in self.lineages:
            used = [data for data in self.list_inputs(other_id) if data.run == run_id]
            if used and other_id != run_id:
                users[other_id] = used
        return users

    def find_output(self, data: LineageInput) -> LineageOutput | None:
        """Return the output that contains an input, or None if no known run wrote the input.

        The path of the output is the path of the input, or is a folder that contains the input.
        """
        maker = self._find_maker(data.uri, "")
        return maker[1] if maker is not None else None

    def _complete(self, data: LineageInput, run_id: str) -> LineageInput:
        """Return an input with additional fields from the lineage of the run that wrote the input.

        These fields are the run id, the kind of data and the training step. If no known run wrote
        the input, the input is returned unchanged.

        Args:
            data: The input.
            run_id: Id of the run that reads the input.
        """
        maker = self._find_maker(data.uri, run_id)
        if maker is None:
            return data
        maker_id, output = maker
        return data.with_changes(run=maker_id, kind=output.kind, step=output.step)

    def _find_maker(self, path: str, run_id: str) -> tuple[str, LineageOutput] | None:
        """Find the run that wrote the file or folder at a path.

        Args:
            path: The path or URI.
            run_id: Id of the run that reads the path. The result is never this run.

        Returns:
            The id of the run that wrote the path, and the output of that run. The path of the
            output is `path` itself, or a folder that contains `path`. None if no known run has such
            an output.
        """
        while path.strip("/"):
            maker = self._outputs.get(path)
            if maker is not None:
                return maker if maker[0] != run_id else None
            path = path.rpartition("/")[0]
        return None
