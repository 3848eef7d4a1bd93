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

#: Largest number of outputs in a lineage. The oldest checkpoints are dropped first.
_MAX_OUTPUTS = 500
#: Largest number of inputs in a lineage.
_MAX_INPUTS = 100
#: Largest number of paths that are recorded from the commands and variables of a run spec.
_MAX_PATHS = 200
#: Largest number of figures (numbers in the result of a pipeline step) that are recorded for one
#: output.
_MAX_FIGURES = 20
#: Largest size in bytes of the result of a pipeline step that is read.
_MAX_RESULT_BYTES = 1 << 20
#: Matches the names of options whose values name the data of a training. The name has no leading
#: dashes, `_` instead of `-`, and no Hydra groups such as `data.`.
_DATA_OPTION = re.compile(
    r"(?:(?:train|training|val|valid|validation|test|eval|prompt|input|pretrain|sft)_)?"
    r"(?:data|datasets?)(?:_(?:paths?|files?|dir|name|folder|set))?"
    r"|(?:train|training|val|valid|validation|test|eval|prompt)_files?|prompts|prompt_path"
)
#: Matches an option with its value in one word, such as `--data=FILE` or `data.train_files=FILE`.
_ASSIGNMENT = re.compile(r"(?:--?|\+{1,2})?([A-Za-z][\w.-]*)=(.+)", re.DOTALL)
#: Matches the ends of the names of data files. A value with such an end is a path.
_DATA_FILE = re.compile(
    r"\.(?:parquet|arrow|jsonl?|csv|tsv|txt|tfrecords?|bin|npy|npz|pt|tar|gz|zst|xz)$"
)


class DataKind(StrEnum):
    """Kind of the data that a run reads or makes."""

    #: Files or a data set.
    DATA = "data"
    CHECKPOINT = "checkpoint"
    #: JSON result of a pipeline step.
    RESULT = "result"
    #: JSON result of a pipeline step that read a checkpoint, if the result contains numbers.
    EVALUATION = "evaluation"
    #: File or folder that a pipeline step made from a checkpoint.
    EXPORT = "export"


class LineageInput(Recorded):
    """Data from which a run is made."""

    #: Absolute path, URI, or the name of a data set as the command contains it.
    uri: str = ""
    kind: DataKind = DataKind.DATA
    #: Id of the run that made the data. None if the path of the data does not contain a run id.
    run: str | None = None
    #: Training step of a checkpoint, or None if unknown.
    step: float | None = None


class LineageResume(Recorded):
    """Start of an attempt from a checkpoint that the run itself had saved."""

    attempt: int = 0
    uri: str = ""
    step: float | None = None


class LineageOutput(Recorded):
    """Checkpoint, file or result that a run made."""

    if_any = ("step", "signature", "figures", "path")

    #: Absolute path or URI. For the result of a pipeline step, it is `muster://runs/RUN/result`.
    uri: str = ""
    kind: DataKind = DataKind.DATA
    #: Training step of a checkpoint, or None if unknown.
    step: float | None = None
    #: Number of the attempt that made the output, or None if unknown.
    attempt: int | None = None
    #: Time at which the output was saved, in UTC epoch seconds.
    at: float = 0.0
    #: Hash of the files of a checkpoint. It differs if the checkpoint is saved again.
    signature: str = ""
    #: Numbers of an evaluation, by their dotted keys in the result.
    figures: Mapping[str, float] = {}
    #: Path of the file with the result of a pipeline step. An empty string for other outputs.
    path: str = ""


class Lineage(Recorded):
    """The data that one run reads, and the data that it makes: content of `lineage.json`."""

    run_id: str = ""
    flow_run_id: str = ""
    workload: str = ""
    #: Absolute paths and URIs in the commands and variables of the run's spec. If one of them is an
    #: output of another run, it is an input of this run.
    paths: tuple[str, ...] = ()
    inputs: tuple[LineageInput, ...] = ()
    resumes: tuple[LineageResume, ...] = ()
    #: Outputs in the order of their times.
    outputs: tuple[LineageOutput, ...] = ()

    def including(self, earlier: Lineage) -> Lineage:
        """Return this lineage, extended by the outputs that only an earlier lineage has.

        For example, such an output is a checkpoint that was removed since then.

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
    """Return the lineage of a run, as the run's files show it now.

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
    """Return the data that a run reads, as far as the run's spec names them.

    The data are:

    - the checkpoint in the key `start_from`
    - the items of the key `inputs`
    - the values of options such as `--dataset`
    - files of other runs

    Files of the run itself are omitted.

    Args:
        spec: The run spec as plain data. If it is the spec of an attempt, relative paths become
            absolute.
        run_id: Id of the run.
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
    """Return the probable kind of the data at a path or URI. Only the path is considered."""
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
    """Yield the values of environment variables, and the words of commands, of a run spec.

    An option such as `--data=FILE` yields FILE. The arguments of a `call` step are yielded one by
    one.
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
    """Yield the values of those options in a command that name the data of a training.

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
                # An option may have several values. Take a second word only if it names a data
                # file, because another word may be an argument of the program itself.
                if following.startswith("-") or (values and not _DATA_FILE.search(following)):
                    break
                values.append(following)
        else:
            continue
        plain_name = name.rpartition(".")[2].replace("-", "_").lower()
        if not _DATA_OPTION.fullmatch(plain_name):
            continue
        for value in values:
            # Split a list: Hydra writes a list as [a,b].
            yield from filter(None, (part.strip("\"' ") for part in value.strip("[]").split(",")))


def _locate_value(value: str, root: str) -> str:
    """Return the value of an option: a path as an absolute path, and a name unchanged.

    A relative path without the end of a data file, such as `openai/gsm8k`, counts as the name of a
    data set.
    """
    is_path = value.startswith(("./", "../")) or _DATA_FILE.search(value) is not None
    return _locate(value, root) if is_path else value


def _as_storable(text: str) -> str:
    """Return a text that can be encoded as UTF-8.

    If a path has bytes that are not UTF-8, Python represents each of them by a surrogate. Each
    surrogate is replaced by its escape sequence, such as `\\udcff`.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _locate(text: str, root: str) -> str:
    """Return a relative path as an absolute path, and a URI or an absolute path unchanged.

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
    """Yield the result of a completed pipeline step, and the files that the result names.

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
    """Return finite numbers in the result of a pipeline step, as pairs with their dotted keys.

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
    """Finds the run that made the inputs of another run, from the lineages of many runs."""

    def __init__(self, lineages: Mapping[str, Lineage]) -> None:
        """
        Args:
            lineages: The lineages by run id.
        """
        self.lineages = lineages
        #: Id of the run that made an output, and the output, by the URI of the output.
        self._outputs: dict[str, tuple[str, LineageOutput]] = {}
        for run_id, lineage in lineages.items():
            for output in lineage.outputs:
                self._outputs[output.uri] = (run_id, output)

    def list_inputs(self, run_id: str) -> list[LineageInput]:
        """Return the inputs of a run, each with the run that made it if that run is known."""
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
            run_id: Id of the run that made the outputs.

        Returns:
            For each other run, by run id, those of its inputs that the run `run_id` has made.
        """
        users: dict[str, list[LineageInput]] = {}
        for other_id in self.lineages:
            used = [data for data in self.list_inputs(other_id) if data.run == run_id]
            if used and other_id != run_id:
                users[other_id] = used
        return users

    def find_output(self, data: LineageInput) -> LineageOutput | None:
        """Return the output of another run from which an input was taken, or None if unknown.

        The path of the output is the path of the input, or a folder that contains the input.
        """
        maker = self._find_maker(data.uri, "")
        return maker[1] if maker is not None else None

    def _complete(self, data: LineageInput, run_id: str) -> LineageInput:
        """Return an input, completed from the lineage of the run that made it.

        The run id, the kind of data and the training step are filled in. If no known run made the
        input, it is returned unchanged.

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
        """Return the id of the run that made the file or folder at a path, and the run's output.

        The output is at the path itself, or is a folder that contains the path. None if no known
        run has such an output.

        Args:
            path: The path or URI.
            run_id: Id of the run that reads the path. The result is never this run.
        """
        while path.strip("/"):
            maker = self._outputs.get(path)
            if maker is not None:
                return maker if maker[0] != run_id else None
            path = path.rpartition("/")[0]
        return None
