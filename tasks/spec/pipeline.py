"""The spec of a pipeline, which is a graph of runs and steps, and the functions that load it.

`PipelineSpec` is also the type of the parameter `spec` of the Prefect flow `pipeline`. The form in
the Prefect UI shows its titles, descriptions and examples.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tasks.spec.conditions import InvalidCondition, parse_condition
from tasks.spec.data_inputs import drop_invalid_inputs, list_paths, make_result_uri
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import suggest_name
from tasks.spec.loading import (
    apply_value,
    collect_faults,
    copy_as_dict,
    find_project_root,
    load_spec,
    locate_spec,
    name_source,
    parse_spec,
    parse_yaml,
    read_override,
    read_override_spellings,
    read_spellings,
    read_text,
)
from tasks.spec.matrix import Best, Matrix, StopEarly, check_matrix, list_points
from tasks.spec.placeholders import (
    BEST,
    CHECKPOINT,
    POINT,
    RESULT,
    RESULTS,
    RUN_DIR,
    RUN_ID,
    STAGE,
    STATE,
    Kind,
    Use,
    check_stage_names,
    check_stage_uses,
    fill_in_stages,
    find_names,
    find_unknown_names,
    join_path,
    mapping_or_empty,
)
from tasks.spec.run import Ray, RunSpec
from tasks.spec.spellings import Spelling, quote_spellings
from tasks.spec.stage_graph import find_graph_faults, list_ancestors, list_needs
from tasks.spec.standard_input import STANDARD_INPUT
from tasks.spec.start_from import is_run_id
from tasks.spec.step import build_run_spec, find_call_faults, is_step, rename_path
from tasks.spec.step_resources import Resources, check_ray_secrets, check_resources
from tasks.spec.values import (
    Count,
    CountOrZero,
    Document,
    DottedKey,
    Env,
    Model,
    PartName,
    Refusal,
    Seconds,
    SpecName,
    Text,
    Words,
    describe_value,
    make_refusal,
)

#: Name of the deployment that creates the run of a stage if the stage names no deployment.
STAGE_DEPLOYMENT = "train/any"
#: Keys that only a stage with a run spec may have, and keys that only a step may have. A step is a
#: stage that runs a function or a command.
_RUN_KEYS = ("deployment", "spec", "set", "checkpoint", "stop_early")
_STEP_KEYS = ("args", "env", "on", "resources", "retries", "timeout_s", "cache", "code")
#: Matches the beginning of the path of a value in the key `set` of a stage.
_SET = re.compile(r"(stages\.\d+)\.set\.")


def _check_condition(text: str) -> str:
    """Return the text of a condition unchanged, or raise an error if the text is not valid."""
    try:
        parse_condition(text)
    except InvalidCondition as error:
        raise make_refusal(error.problem, error.remedy) from None
    return text


def _check_json(value: Any) -> Any:
    """Return the value of a step's argument, or raise an error if it is not JSON data."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        problem = f"must be JSON data, found {describe_value(value)}"
        raise make_refusal(
            problem, "write a text in quotes, a number, a list or a mapping"
        ) from None
    return value


class Stage(Model):
    """A run or a step of a pipeline.

    A run is a training with a run spec. A step is a Python function or a command.
    """

    name: PartName = Field(
        description="Name of the stage. Later stages use it in placeholders such as "
        "${stage.NAME.checkpoint}.",
        examples=["sft"],
    )
    needs: tuple[Text, ...] | None = Field(
        None,
        description="Names of the stages that must have ended before this stage begins. If "
        "omitted, these are all stages before it in the file. []: the stage begins at once.",
        examples=[["sft", "eval"]],
    )
    when: Annotated[Text, AfterValidator(_check_condition)] | None = Field(
        None,
        description="Condition of the stage. If the condition is false, the stage is skipped. "
        "The condition may contain literals, comparisons, arithmetic, `and`, `or`, `not`, `in`, "
        "and placeholders of earlier stages.",
        examples=["${stage.eval.result.score} > 0.6"],
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="Effect of a failure of this stage. stop: no further stage begins, and the "
        "pipeline fails when the stages that are running have ended. continue: the pipeline "
        "continues, and stages that use a value of this stage are skipped.",
    )
    deployment: Annotated[str, Field(strict=True, pattern=r"^train/[^/\s]+$")] | None = Field(
        None,
        description="Prefect deployment that creates the run of this stage. If the stage has no "
        "`spec`, the run spec of this deployment applies. If omitted, the deployment is "
        "train/any.",
        examples=["train/verl-sft"],
    )
    spec: Mapping[str, Any] | None = Field(
        None,
        description="Run spec of this stage. A pipeline file may contain the path of a run spec "
        "file instead. The run spec may use values of earlier stages: ${stage.NAME.checkpoint}, "
        "${stage.NAME.run_dir}, ${stage.NAME.run_id} and ${stage.NAME.result}.",
    )
    set: Mapping[DottedKey, Any] = Field(
        default_factory=dict,
        description="Changes to the run spec of this stage: the dotted path of a key, and its "
        "new value.",
        examples=[{"progress.total": 20}],
    )
    checkpoint: Text | None = Field(
        None,
        description="Path or pattern of the checkpoint that later stages get as "
        "${stage.NAME.checkpoint}. It may use ${run.dir}, ${run.id} and ${attempt.dir}. If "
        "omitted, later stages get the checkpoint from which the run of this stage would resume.",
        examples=["${run.dir}/hf/step-*"],
    )
    call: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = (
        Field(
            None,
            description="Python function of the step, as MODULE:FUNCTION. The module belongs to "
            "the project that contains the pipeline's file. The function may also be a Prefect "
            "task. The function returns JSON data, which is the result of the step.",
            examples=["evals.score:benchmark"],
        )
    )
    args: Mapping[Text, Annotated[Any, AfterValidator(_check_json)]] = Field(
        default_factory=dict,
        description="Arguments of the function in `call`, by name. A text may contain "
        "placeholders. If a text consists only of ${stage.NAME.result.KEY}, the argument keeps "
        "the type of the value.",
        examples=[{"model": "${stage.sft.checkpoint}"}],
    )
    command: Words | None = Field(
        None,
        description="Program of the step and its arguments, with one list item for each "
        "argument. The environment variable MUSTER_RESULT names a file into which the program "
        "may write a JSON result.",
        examples=[["python", "merge.py", "${stage.sft.checkpoint}"]],
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables of the step. To use the value of a Prefect Secret "
        "block, write `{secret: BLOCK}` in place of the value.",
        examples=[{"HF_HUB_OFFLINE": "1"}],
    )
    on: Literal["ray", "host"] = Field(
        "ray",
        description="Place where the step runs. ray: a node of the Ray cluster. host: the host "
        "of the worker that starts the step, without Ray.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources that the step takes while it runs. With `on: host`, only `gpus` "
        "is allowed.",
    )
    retries: CountOrZero = Field(
        0,
        description="Number of times that Muster runs the step again after a failure.",
        examples=[2],
    )
    timeout_s: Seconds | None = Field(
        None,
        description="Time limit of each try of the step in seconds. Muster stops a longer try, "
        "which then counts as failed. If omitted, there is no limit.",
        examples=[3600],
    )
    cache: Literal["inputs", "inputs_and_code"] | None = Field(
        None,
        description="Condition under which Muster does not run this step, but reuses the result "
        "of an earlier step. The earlier step may be from another pipeline. inputs: the earlier "
        "step had the same program, arguments and environment variables. inputs_and_code: the "
        "files of the project were the same, too. If omitted, the step always runs.",
        examples=["inputs"],
    )
    code: Annotated[str, Field(strict=True, pattern=r"^(live|[0-9a-f]{64})$")] | None = Field(
        None,
        description="Version of the project's files that the step uses. live: the files as they "
        "are when the step starts. If omitted, Muster stores a copy of the files when the "
        "pipeline is started, and writes the name of the copy here.",
        examples=["live"],
    )
    matrix: Matrix | None = Field(
        None,
        description="Parameter sweep: the stage starts one run or step, called a point, for each "
        "combination of values. Each key names a parameter: a dotted path in the run spec, an "
        "argument in `args`, or env.NAME for a command. Each parameter has a list of values. With "
        "`sample`, a parameter may instead have a range {min, max, scale}, from which Muster draws "
        "random values.",
        examples=[{"env.LR": [0.00001, 0.00003], "env.SEED": [1, 2]}],
    )
    sample: Count | None = Field(
        None,
        description="Number of random points that Muster draws from the matrix. If omitted, the "
        "points are all combinations of the values.",
        examples=[16],
    )
    at_most: Count | None = Field(
        None,
        description="Largest number of points of the matrix that run or wait in the queue at the "
        "same time. If omitted, there is no limit.",
        examples=[4],
    )
    best: Best | None = Field(
        None,
        description="Rule that chooses the best run or step of this stage's `matrix`. Later "
        "stages use the result, for example as ${stage.NAME.best.checkpoint}.",
        examples=[{"by": "reward", "mode": "max"}],
    )
    stop_early: StopEarly | None = Field(
        None,
        description="Rule that stops a point of the matrix early if its metric is worse than the "
        "metric of the other points. The rule needs the Python package optuna.",
        examples=[{"by": "reward", "mode": "max", "rule": "median", "after_step": 20}],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        is_written = {key: written.get(key) is not None for key in cls.model_fields}
        kinds = [key for key in ("spec", "call", "command") if is_written[key]]
        if is_written["deployment"] and not is_written["spec"]:
            kinds.insert(0, "deployment")
        if not kinds:
            problem = "missing: a stage needs a run spec, a deployment, a function or a command"
            yield (
                ("spec",),
                make_refusal(
                    problem,
                    "write `spec: FILE.yaml`, `deployment: train/NAME`, `call: MODULE:FUNCTION`, "
                    "or `command: [PROGRAM, ARGUMENT]`",
                ),
            )
            return
        if len(kinds) > 1:
            problem = f"a stage may have only one of these keys, found {' and '.join(kinds)}"
            yield (kinds[1],), make_refusal(problem, "make it two stages, or leave out one key")
            return

        kind = "step" if kinds[0] in ("call", "command") else "run"
        for key in _RUN_KEYS if kind == "step" else _STEP_KEYS:
            # A run must not have the keys of a step, and a step must not have the keys of a run.
            # But a key with its default value is accepted, because Prefect adds the default values
            # of all keys to the parameters of a flow run.
            default = cls.model_fields[key].get_default(call_default_factory=True)
            value = written.get(key)
            is_blank = isinstance(value, Mapping) and not any(value.values())
            if is_written[key] and value != default and not is_blank:
                other = "step" if kind == "run" else "run"
                problem = (
                    f"only a stage with a {other} may have this key, but this stage has a {kind}"
                )
                yield (key,), make_refusal(problem, "remove it")
        if written.get("args") and kinds[0] == "command":
            yield (
                ("args",),
                make_refusal("this key needs `call`", "write the arguments in `command`"),
            )
        yield from check_resources(written, on=written.get("on"))
        if kind == "step" and written.get("on") != "host":
            yield from check_ray_secrets(mapping_or_empty(written.get("env")))
        yield from check_matrix(written)
        matrix = mapping_or_empty(written.get("matrix"))
        for key in matrix if kinds[0] == "command" else ():
            if not str(key).startswith("env."):
                problem = "in a stage with a command, the matrix can only set environment variables"
                yield ("matrix", str(key)), make_refusal(problem, "write env.NAME: [VALUE, ...]")

    @property
    def is_step(self) -> bool:
        """True if the stage runs a function or a command, and False if the stage is a training."""
        return self.call is not None or self.command is not None

    @property
    def best_evaluation(self) -> str:
        """Name of the evaluation whose results decide which run of the matrix is the best.

        Empty if a metric of the training or the result of a step decides instead.
        """
        name = self.best.by.partition(".")[0] if self.best is not None else ""
        return name if name in mapping_or_empty((self.spec or {}).get("evals")) else ""

    @property
    def points(self) -> list[dict[str, Any]]:
        """Points of the matrix, each as a mapping from keys to values. Empty without a matrix."""
        return list_points(self.name, self.matrix, self.sample) if self.matrix is not None else []

    @property
    def units(self) -> tuple[str, ...]:
        """A name for each run of the stage: `NAME.1`, `NAME.2` and so on for a stage with a matrix.

        Without a matrix, there is only one run, and the result is the name of the stage.
        """
        if self.matrix is None:
            return (self.name,)
        return tuple(f"{self.name}.{number}" for number in range(1, len(self.points) + 1))


class PipelineSpec(Document):
    """Graph of runs and steps. Each stage starts when the stages that it needs have ended."""

    name: SpecName = Field(
        description="Name of the pipeline. The names of its flow runs begin with this name.",
        examples=["sft-then-grpo"],
    )
    tags: tuple[Text, ...] = Field(
        (),
        description="Labels of the pipeline's flow run and of each run that the pipeline starts.",
        examples=[["demo"]],
    )
    ray: Ray | None = Field(
        None,
        description="Ray cluster on which the steps of the pipeline run. It may be omitted if "
        "the settings of the work pool list exactly one cluster. Only the key `address` has an "
        "effect.",
        examples=[{"address": "http://127.0.0.1:8265"}],
    )
    stages: tuple[Stage, ...] = Field(
        description="Stages of the pipeline. A stage without `needs` waits for all stages before "
        "it.",
        examples=[[{"name": "sft", "deployment": "train/verl-sft"}]],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        stages = written.get("stages")
        if stages in ([], ()):
            yield ("stages",), make_refusal("must not be empty", "write at least one stage")
        earlier_names: list[object] = []
        for index, stage in enumerate(stages if isinstance(stages, list | tuple) else ()):
            name = mapping_or_empty(stage).get("name")
            if name is not None and name in earlier_names:
                problem = f"an earlier stage has the same name {name!r}"
                yield ("stages", index, "name"), make_refusal(problem, "write another name")
            earlier_names.append(name)

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the stages, in the order of the file."""
        return tuple(stage.name for stage in self.stages)

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """Mapping from each stage to the stages that must have ended before it starts."""
        return list_needs([stage.model_dump(exclude_none=True) for stage in self.stages])

    def stage(self, name: str) -> Stage:
        """Return the stage with a certain name. Raise KeyError if there is no such stage."""
        return {stage.name: stage for stage in self.stages}[name]

    def unit_stage(self, unit: str) -> Stage:
        """Return the stage to which a run or step of the pipeline belongs.

        Args:
            unit: The run or step. For a stage with a matrix: `NAME.N`, the name of the stage and
                the number of the run or step. Otherwise: the name of the stage.

        Raises:
            KeyError: The pipeline has no such stage.
        """
        return self.stage(unit.partition(".")[0])

    def run_spec(self, unit: str) -> dict[str, Any]:
        """Return the run spec of a run or step of the pipeline, as plain data.

        The placeholders `${stage.NAME.KEY}` are not replaced. For a step, the run spec is created
        from the keys of the step.

        Args:
            unit: Name of the stage, or `NAME.N` for the run or step N of the stage's matrix.

        Raises:
            KeyError: The pipeline has no such stage, or the stage has no run spec yet.
        """
        written = self._written_point(unit)
        if is_step(written):
            return build_run_spec(written, ray_address=self.ray.address if self.ray else None)
        spec: dict[str, Any] = written["spec"]
        return spec

    def fill_run_spec(self, unit: str, value_of: Callable[[str, str], object]) -> dict[str, Any]:
        """Return the run spec of a stage, with placeholders `${stage.NAME.KEY}` replaced by values.

        Data that the stage gets from earlier stages is added to the key `inputs`. So `muster
        lineage` can show the data.

        Args:
            unit: Name of the stage, or `NAME.N` for the run or step N of the stage's matrix.
            value_of: Function that receives the name of a stage and a key, and returns the value as
                JSON data.
        """
        stage_inputs: dict[str, None] = {}

        def note_value(name: str, key: str) -> object:
            value = value_of(name, key)
            stage_inputs.update(dict.fromkeys(_list_stage_inputs(name, key, value, value_of)))
            return value

        written = self._written_point(unit)
        if written.get("args"):
            written["args"] = _fill_args(written["args"], note_value)
        if is_step(written):
            address = self.ray.address if self.ray else None
            spec = build_run_spec(written, ray_address=address)
        else:
            spec = written["spec"]
        filled: Any = fill_in_stages(spec, lambda name, key: _to_text(note_value(name, key)))
        if stage_inputs:
            present = filled.get("inputs") or ()
            added = (path.replace("${", "$${") for path in stage_inputs)
            filled["inputs"] = [*dict.fromkeys((*present, *added))]
        drop_invalid_inputs(filled)
        return parse_spec(filled).written()

    def _written_point(self, unit: str) -> dict[str, Any]:
        """Return a stage as plain data, with one combination of values from the stage's matrix.

        Args:
            unit: Name of the stage, or `NAME.N` for the run or step N of the stage's matrix.
        """
        stage = self.unit_stage(unit)
        written: dict[str, Any] = stage.model_dump(mode="json", exclude_unset=True)
        number = unit.partition(".")[2]
        if number:
            _apply_point(written, stage.points[int(number) - 1])
        return written


def _list_stage_inputs(
    name: str, key: str, value: object, value_of: Callable[[str, str], object]
) -> list[str]:
    """Return the paths and URIs of the data that a stage gets from an earlier stage.

    These are the absolute paths and URIs in the value of a placeholder. If the placeholder stands
    for the result of the earlier stage, and the result contains no path, the URI of the result is
    returned.

    Args:
        name: Name of the earlier stage.
        key: Part of the placeholder after the name of the stage.
        value: Value of the placeholder.
        value_of: Function that receives the name of a stage and a key, and returns the value as
            JSON data.
    """
    if paths := list_paths(value):
        return paths
    best = f"{BEST}." if key.startswith(f"{BEST}.") else ""
    own_key = key.removeprefix(best)
    if own_key != RESULT and not own_key.startswith(f"{RESULT}."):
        return []
    run_id = value_of(name, f"{best}{RUN_ID}")
    uri = make_result_uri(str(run_id))
    return [uri] if is_run_id(str(run_id)) else []


def _apply_point(written: dict[str, Any], point: Mapping[str, Any]) -> None:
    """Write one combination of values of a matrix into a stage.

    Args:
        written: The stage as plain data. It is changed.
        point: Mapping from the keys of the matrix to the values.

    Raises:
        InvalidSpec: A key of the matrix is not a possible path in the run spec.
    """
    for key, value in point.items():
        if written.get("call") is not None:
            written.setdefault("args", {})[key] = value
        elif written.get("command") is not None:
            written.setdefault("env", {})[key.removeprefix("env.")] = value
        else:
            apply_value(written["spec"], key, value)


def _fill_args(node: Any, value_of: Callable[[str, str], object]) -> Any:
    """Return arguments of a step, with placeholders `${stage.NAME.KEY}` replaced by values.

    Args:
        node: The arguments, or a part of them.
        value_of: Function that receives the name of a stage and a key, and returns the value as
            JSON data.
    """
    if isinstance(node, Mapping):
        return {key: _fill_args(value, value_of) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_fill_args(value, value_of) for value in node]
    if not isinstance(node, str):
        return node
    names = [*find_names(node)]
    if len(names) == 1 and node == f"${{{names[0]}}}" and str(names[0]).startswith(STAGE):
        stage, _, key = str(names[0]).removeprefix(STAGE).partition(".")
        return _escape_nested(value_of(stage, key))
    as_spec: Any = fill_in_stages({"cwd": node}, lambda name, key: _to_text(value_of(name, key)))
    return as_spec["cwd"]


def _escape_nested(value: Any) -> Any:
    """Return JSON data in which each `${` in a text is replaced by `$${`.

    In a run spec, `$${` means the plain text `${` instead of a placeholder.
    """
    if isinstance(value, Mapping):
        return {_escape_nested(key): _escape_nested(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_nested(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value


def _to_text(value: object) -> str:
    """Return a value as text that can be inserted into a spec.

    A text is returned unchanged. Other values become JSON.
    """
    return value if isinstance(value, str) else json.dumps(value)


def is_pipeline_file(path: Path) -> bool:
    """Return True if a YAML file contains the spec of a pipeline instead of a run.

    For standard input, the result is False. Standard input can be read only once, and the caller
    reads it later.
    """
    if path == STANDARD_INPUT:
        return False
    try:
        written = parse_yaml(read_text(path), name_source(path))
    except InvalidSpec:
        return False
    return isinstance(written, Mapping) and "stages" in written and "components" not in written


def load_any_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec | PipelineSpec:
    """Load the spec of a run or of a pipeline from a YAML file.

    Args:
        path: The file.
        overrides: Changes of the form `a.b=c`. They are applied in order.

    Raises:
        InvalidSpec: The file or an override has faults.
    """
    load = load_pipeline if is_pipeline_file(path) else load_spec
    return load(path, overrides)


def load_pipeline(
    path: Path, overrides: Sequence[str] = (), root: Path | None = None
) -> PipelineSpec:
    """Load a pipeline spec from a YAML file, and also the run specs of its stages.

    Muster looks for the functions of `call` steps in the project.

    Args:
        path: File of the pipeline spec.
        overrides: Changes of the form `STAGE.a.b=c`. They are applied in order.
        root: Directory from which relative file names of run specs start. None means the root of
            the project that contains the pipeline file.

    Raises:
        InvalidSpec: A file cannot be read, or a spec or an override has faults. Faults of specs and
            overrides are reported only if all files can be read.
    """
    source = name_source(path)
    root = root or find_project_root(path)
    faults: list[Fault] = []
    text = read_text(path)
    written = copy_as_dict(parse_yaml(text, source), source)
    #: Mapping from the dotted path of each part of the pipeline to the YAML text of the part.
    texts = {"": text}
    for index, stage in _index_stages(written).items():
        if isinstance(name := stage.get("spec"), str):
            candidates = [folder / name for folder in (root, locate_spec(path).parent)]
            file = next(filter(Path.exists, candidates), candidates[0])
            with collect_faults(faults, f"stages.{index}.spec: {name}"):
                text = read_text(file)
                stage["spec"] = copy_as_dict(parse_yaml(text, name), name)
                texts[f"stages.{index}.spec"] = text
    if faults:
        raise InvalidSpec(tuple(faults), source)
    with quote_spellings(lambda: _read_stage_spellings(texts)):
        return parse_pipeline(written, overrides, source, root=root)


def _read_stage_spellings(texts: Mapping[str, str]) -> dict[str, Spelling]:
    """Return the spelling of each unquoted value in a pipeline spec.

    The keys of the result are the dotted paths of the values. A value in the key `set` of a stage
    is in the result twice: with its path in the pipeline spec, and with its path in the run spec
    of the stage.

    Args:
        texts: Mapping from the dotted path of each part of the pipeline to its YAML text.
    """
    spellings: dict[str, Spelling] = {}
    for path, text in texts.items():
        spellings |= read_spellings(text, path)
    changes = {
        _SET.sub(r"\1.spec.", path): item for path, item in spellings.items() if _SET.match(path)
    }
    return {**spellings, **changes}


def parse_pipeline(
    data: object,
    overrides: Sequence[str] = (),
    source: str = "the pipeline",
    *,
    root: Path | None = None,
) -> PipelineSpec:
    """Validate plain data, such as the parameter of a flow, as a pipeline spec.

    In the result, the changes in the key `set` of a stage are already applied to its run spec, and
    the run spec contains the key `start_order`. A stage with a deployment has no run spec yet: see
    `add_deployment_specs`.

    Args:
        data: The pipeline spec as plain data.
        overrides: Changes of the form `STAGE.a.b=c`. They are applied in order.
        source: Name of the input for error messages.
        root: Root directory of the project that contains the functions of `call` steps. If None,
            the functions are not checked.

    Raises:
        InvalidSpec: The data or the overrides have faults. The error lists all faults.
    """
    written = copy_as_dict(data, source)
    faults: list[Fault] = []
    if isinstance(written.get("stages"), list):
        # YAML anchors allow stages to share an object. Copy the objects, because each stage is
        # changed separately.
        written["stages"] = [copy.deepcopy(stage) for stage in written["stages"]]
    stages = _index_stages(written)

    for override in overrides:
        with collect_faults(faults):
            _add_override([*stages.values()], override)
    with collect_faults(faults):
        PipelineSpec.model_validate(written)
    faults += find_graph_faults(stages)

    needs = list_needs([*stages.values()])
    names_of_stages = {str(stage.get("name")): stage for stage in stages.values()}
    for index, stage in stages.items():
        path = f"stages.{index}"
        faults += find_unknown_names(stage.get("checkpoint"), f"{path}.checkpoint")
        #: Mapping from the placeholder names of earlier stages, such as `stage.sft.run_id`, to True
        #: if the placeholder can get a value, and to False if not.
        known_names: dict[str, bool] = {}
        for ancestor in list_ancestors(str(stage.get("name")), needs):
            known_names |= _list_placeholder_names(names_of_stages[ancestor])
        stage_faults: list[Fault] = []
        if is_step(stage):
            _check_step(stage, path, known_names, stage_faults)
            if root is not None:
                stage_faults += find_call_faults(stage, path, root)
        elif isinstance(stage.get("spec"), dict):
            _check_stage(stage, path, known_names, stage_faults)
            _check_metrics_file(stage, path, stage_faults)
            _check_best_evaluation(stage, path, stage_faults)
        with collect_faults(stage_faults):
            _check_condition_names(stage, path, known_names)
        if not any(fault.path.startswith(f"{path}.matrix") for fault in faults):
            _check_points(stage, path, stage_faults)
        faults += _explain_needs(stage, stage_faults, names_of_stages)
    if faults:
        with quote_spellings(lambda: _read_override_spellings(stages, overrides)):
            raise InvalidSpec(tuple(dict.fromkeys(faults)), source)
    return PipelineSpec.model_validate(written)


def _read_override_spellings(
    stages: Mapping[int, Mapping[str, Any]], overrides: Iterable[str]
) -> dict[str, Spelling]:
    """Return the spelling of each unquoted value in overrides.

    The keys of the result are the dotted paths of the values in the pipeline spec.

    Args:
        stages: The stages of the pipeline by their indexes.
        overrides: Changes of the form `STAGE.a.b=VALUE`.
    """
    spellings: dict[str, Spelling] = {}
    indexes = {str(stage.get("name")): index for index, stage in stages.items()}
    for path, item in read_override_spellings(overrides).items():
        name, _, key = path.partition(".")
        stage_path = f"stages.{indexes.get(name)}"
        spellings |= {f"{stage_path}.{key}": item, f"{stage_path}.spec.{key}": item}
    return spellings


def add_deployment_specs(pipeline: PipelineSpec, specs: Mapping[str, object]) -> PipelineSpec:
    """Return a copy of the pipeline in which each training stage has a run spec.

    If a stage has a deployment instead of a run spec, the run spec of the deployment is added.

    Args:
        pipeline: A validated pipeline spec.
        specs: Mapping from the name of each stage without a run spec to the run spec of its
            deployment.

    Raises:
        InvalidSpec: An added spec has faults. The error lists all faults.
    """
    written = pipeline.written()
    for stage in written["stages"]:
        if stage.get("spec") is None and not is_step(stage):
            stage["spec"] = specs.get(stage["name"])
    return parse_pipeline(written, source=f"pipeline {pipeline.name!r}")


def _index_stages(written: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return a mapping from the index of each stage in the list to the stage.

    Args:
        written: The pipeline spec, not validated. A stage that is no mapping is skipped.
    """
    stages = written.get("stages")
    indexed = enumerate(stages if isinstance(stages, list) else ())
    return {index: stage for index, stage in indexed if isinstance(stage, dict)}


def _add_override(stages: Sequence[dict[str, Any]], override: str) -> None:
    """Apply an override from the command line to the stage that the override names.

    For a run, the override changes the run spec. For a step, the override changes a key of the
    step.

    Args:
        stages: The stages of the pipeline as plain data. One of them is changed.
        override: Change of the form `STAGE.a.b=c`.

    Raises:
        InvalidSpec: The override does not have this form, or names no existing stage.
    """
    path, value = read_override(override)
    name, _, key = path.partition(".")
    names = [str(stage.get("name")) for stage in stages]
    if not key or name not in names:
        problem = (
            f"there is no stage {name!r}"
            if key
            else "must begin with the name of a stage, as in STAGE.KEY=VALUE"
        )
        remedy = suggest_name(name, names)
        remedy = remedy or f"write STAGE.KEY=VALUE; known stages: {', '.join(names)}"
        raise InvalidSpec((Fault(path="", problem=f"--set {path}: {problem}", remedy=remedy),))
    stage = stages[names.index(name)]
    if is_step(stage):
        apply_value(stage, key, value)
    else:
        stage["set"] = {**mapping_or_empty(stage.get("set")), key: value}


def _list_placeholder_names(stage: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names of placeholders with which later stages can use values of a stage.

    Args:
        stage: The earlier stage as plain data.

    Returns:
        Mapping from each name, such as `stage.sft.run_id`, to True if the placeholder can get a
        value, and to False if not. A name with a dot at the end stands for all names that begin
        with this name.
    """
    name = f"{STAGE}{stage.get('name')}"
    if is_step(stage):
        keys = {RUN_DIR: True, RUN_ID: True, RESULT: True, f"{RESULT}.": True}
    else:
        may_have_checkpoint = not isinstance(stage.get("spec"), dict) or _names_checkpoint(stage)
        keys = {CHECKPOINT: may_have_checkpoint, RUN_DIR: True, RUN_ID: True}
    if stage.get("matrix") is None:
        return {f"{name}.{key}": has_value for key, has_value in {**keys, STATE: True}.items()}
    names = {f"{name}.{STATE}": True}
    if is_step(stage):
        names[f"{name}.{RESULTS}"] = True
    if stage.get("best") is not None:
        best_keys = {f"{name}.{BEST}.{key}": has_value for key, has_value in keys.items()}
        names |= {**best_keys, f"{name}.{BEST}.{POINT}.": True}
    return names


def _check_stage(
    stage: dict[str, Any], path: str, known_names: Mapping[str, bool], faults: list[Fault]
) -> None:
    """Apply the changes in the key `set` of a stage to its run spec, and check the result.

    If there are no faults, the result replaces the run spec of the stage.

    Args:
        stage: The stage as plain data. It is changed.
        path: Dotted path of the stage in the pipeline spec, for the faults.
        known_names: Placeholder names of earlier stages, such as `stage.sft.run_id`, as the keys of
            a mapping. The entry is True if the placeholder can get a value.
        faults: List to which the faults of the changed run spec are added.
    """
    written = stage["spec"]
    for key, value in mapping_or_empty(stage.pop("set", None)).items():
        with collect_faults(faults, f"{path}.set"):
            apply_value(written, str(key), value)
    with collect_faults(faults, f"{path}.spec"):
        check_stage_names(written, known_names)
    with collect_faults(faults, f"{path}.spec"):
        # The values of `${stage...}` are not known yet, so use any text for the validation.
        parse_spec(fill_in_stages(written, lambda _stage, _key: "stage"))
        stage["spec"] = RunSpec.model_validate(written).to_server_data()


def _check_metrics_file(stage: Mapping[str, Any], path: str, faults: list[Fault]) -> None:
    """Check that a stage with the key `stop_early` has a metrics file in its run spec.

    Muster compares the metrics of the runs to decide which run it stops early.

    Args:
        stage: The stage as plain data, with the changes in `set` applied to its run spec.
        path: Dotted path of the stage in the pipeline spec, for the faults.
        faults: List to which a fault is added.
    """
    progress = mapping_or_empty(stage["spec"].get("progress"))
    if stage.get("stop_early") is not None and not progress.get("jsonl"):
        faults.append(
            Fault(
                path=f"{path}.stop_early",
                problem="the run spec names no metrics file, so Muster cannot compare the runs",
                remedy="write `progress: {jsonl: FILE, step: KEY}` in the run spec",
            )
        )


def _check_best_evaluation(stage: Mapping[str, Any], path: str, faults: list[Fault]) -> None:
    """Check that a stage defines all evaluations whose results it compares.

    Args:
        stage: The stage as plain data, with the changes in `set` applied to its run spec.
        path: Dotted path of the stage in the pipeline spec, for the faults.
        faults: List to which the faults are added.
    """
    spec = stage["spec"]
    evaluations = mapping_or_empty(spec.get("evals"))
    stop_by = mapping_or_empty(stage.get("stop_early")).get("by")
    if isinstance(stop_by, str) and stop_by.partition(".")[0] in evaluations:
        problem = f"{stop_by} is a number from an evaluation, but this rule compares only metrics"
        remedy = "write the name of a metric from the run's metrics file"
        faults.append(Fault(path=f"{path}.stop_early.by", problem=problem, remedy=remedy))

    best = mapping_or_empty(stage.get("best"))
    by = best.get("by")
    if not isinstance(by, str) or by.partition(".")[0] not in evaluations:
        return
    components = mapping_or_empty(spec.get("components")).values()
    removes_checkpoints = any(mapping_or_empty(component).get("keep") for component in components)
    rule = {"by": by, "mode": best.get("mode") or "max"}
    kept = mapping_or_empty(spec.get("keep_best"))
    kept_rule = {"by": kept.get("by"), "mode": kept.get("mode") or "max"}
    if removes_checkpoints and kept_rule != rule and stage.get("checkpoint") is None:
        problem = (
            f"Muster could delete the checkpoint with the best {by}, because the run spec has the "
            "key `keep`"
        )
        remedy = f"write `keep_best: {{by: {by}, mode: {rule['mode']}}}` in the run spec"
        faults.append(Fault(path=f"{path}.best", problem=problem, remedy=remedy))


def _check_step(
    stage: Mapping[str, Any], path: str, known_names: Mapping[str, bool], faults: list[Fault]
) -> None:
    """Check the placeholders of a step, and the run spec that is created for the step.

    A step is a stage that runs a function or a command.

    Args:
        stage: The step as plain data.
        path: Dotted path of the step in the pipeline spec, for the faults.
        known_names: Placeholder names of earlier stages, such as `stage.sft.run_id`, as the keys of
            a mapping. The entry is True if the placeholder can get a value.
        faults: List to which the faults are added.
    """
    args_uses = [*_find_arg_uses(stage.get("args"), "args")]
    with collect_faults(faults, path):
        check_stage_uses(args_uses, known_names)
    filled_args = _fill_args(stage.get("args"), lambda _stage, _key: "stage")
    try:
        spec = build_run_spec({**stage, "args": filled_args})
        check_stage_names(spec, known_names)
        parse_spec(fill_in_stages(spec, lambda _stage, _key: "stage"))
    except InvalidSpec as error:
        for fault in error.faults:
            place = f"{path}.{rename_path(fault.path)}"
            faults.append(Fault(path=place, problem=fault.problem, remedy=fault.remedy))
    except (TypeError, ValueError):
        # The arguments are not JSON data. This fault is reported when the stage is validated.
        return


def _find_arg_uses(node: Any, path: str) -> Iterator[Use]:
    """Yield a `Use` for each placeholder in the arguments of a step.

    Args:
        node: The arguments, or a part of them.
        path: Dotted path of `node` in the spec.
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _find_arg_uses(value, join_path(path, key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _find_arg_uses(value, join_path(path, index))
    elif isinstance(node, str):
        for name in find_names(node):
            yield Use(path=path, name=name, kind=Kind.TEXT)


def _check_condition_names(
    stage: Mapping[str, Any], path: str, known_names: Mapping[str, bool]
) -> None:
    """Check that each placeholder in the condition of a stage will have a value.

    Args:
        stage: The stage as plain data.
        path: Dotted path of the stage in the pipeline spec.
        known_names: Mapping from the placeholder names of earlier stages, see `_check_stage`.

    Raises:
        InvalidSpec: The name of a placeholder is unknown, or the placeholder will have no value.
    """
    condition = stage.get("when")
    if not isinstance(condition, str):
        return
    try:
        names = parse_condition(condition).names
    except InvalidCondition:
        # The condition is invalid. This fault is reported when the stage is validated.
        return
    place = f"{path}.when"
    uses = [Use(path=place, name=name, kind=Kind.TEXT) for name in names]
    faults = [
        Fault(
            path=place,
            problem=f"unknown name `{use}`",
            remedy="a condition may use placeholders of earlier stages: ${stage.NAME.KEY}",
        )
        for use in uses
        if not (use.name or "").startswith(STAGE)
    ]
    with collect_faults(faults):
        check_stage_uses(uses, known_names)
    if faults:
        raise InvalidSpec(tuple(faults))


def _check_points(stage: Mapping[str, Any], path: str, faults: list[Fault]) -> None:
    """Check the run specs that result from the values of a matrix.

    Each value in the lists of the matrix is checked once. In this check, all other keys of the
    matrix have their first values. Only the smallest value of a range is checked.

    Args:
        stage: The stage as plain data. Its run spec without the matrix was already checked.
        path: Dotted path of the stage in the pipeline spec, for the faults.
        faults: List to which the faults are added. If it is not empty, nothing is checked.
    """
    matrix = stage.get("matrix")
    is_run = isinstance(stage.get("spec"), dict)
    if faults or not isinstance(matrix, Mapping) or not (is_run or is_step(stage)):
        return
    lists = {
        str(key): values if isinstance(values, list | tuple) else [mapping_or_empty(values)["min"]]
        for key, values in matrix.items()
        if isinstance(values, list | tuple) or "min" in mapping_or_empty(values)
    }
    first_point = {key: values[0] for key, values in lists.items() if values}
    if not first_point:
        return
    first_faults = _find_point_faults(stage, first_point)
    owners = {fault: _find_owner(stage, fault, first_point) for fault in first_faults}
    for key, values in lists.items():
        for index, value in enumerate(values):
            if index == 0:
                own_faults = [fault for fault in first_faults if owners[fault] == key]
            else:
                # Only this key has a later value; all other keys have their first values. A fault
                # that also occurs with only first values is already reported there. So keep a
                # fault only if it is new, or if its place in the run spec gets its value from this
                # key.
                own_faults = [
                    fault
                    for fault in _find_point_faults(stage, {**first_point, key: value})
                    if _find_key(fault.path, first_point) == key or fault not in owners
                ]
            if own_faults:
                problem = "; ".join(map(str, own_faults))
                faults.append(Fault(path=f"{path}.matrix.{key}.{index}", problem=problem))


def _find_point_faults(stage: Mapping[str, Any], point: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of the run spec that results from one combination of values of a matrix.

    Args:
        stage: The stage as plain data.
        point: Mapping from the keys of the matrix to the values.
    """
    point_stage = copy.deepcopy(dict(stage))
    faults: list[Fault] = []
    with collect_faults(faults):
        _apply_point(point_stage, point)
        spec = point_stage.get("spec")
        if is_step(point_stage):
            args = _fill_args(point_stage.get("args"), lambda _stage, _key: "stage")
            spec = build_run_spec({**point_stage, "args": args})
        parse_spec(fill_in_stages(spec, lambda _stage, _key: "stage"))
    return faults


def _find_owner(stage: Mapping[str, Any], fault: Fault, first_point: Mapping[str, Any]) -> str:
    """Return the key of a matrix at which a fault should be reported.

    A matrix maps keys, such as `progress.total`, to lists of values. The fault occurs if each key
    has the first value of its list.

    Args:
        stage: The stage as plain data. It contains the matrix.
        fault: The fault of the run spec.
        first_point: Mapping from each key of the matrix to its first value.

    Returns:
        The first of these keys that exists:

        - the key that sets the place of the fault in the run spec
        - the key whose first value alone causes the fault
        - the first key of the matrix, if only several values together cause the fault
    """
    if key := _find_key(fault.path, first_point):
        return key
    for key, value in first_point.items():
        if fault in _find_point_faults(stage, {key: value}):
            return key
    # Only several values together cause the fault.
    return next(iter(first_point))


def _find_key(path: str, keys: Iterable[str]) -> str:
    """Return the key of a matrix whose value replaces a given place of the run spec.

    Example: the key `progress` replaces `progress.total`, because its value is a whole mapping.

    Args:
        path: Place in the run spec, as a dotted path such as `progress.total`.
        keys: The keys of the matrix, which are dotted paths, too.

    Returns:
        The longest key that replaces the place, or an empty string if no key does.
    """
    fitting = [key for key in keys if path == key or path.startswith(f"{key}.")]
    return max(fitting, key=len, default="")


def _explain_needs(
    stage: Mapping[str, Any],
    faults: Sequence[Fault],
    stages: Mapping[str, Mapping[str, Any]],
) -> Iterator[Fault]:
    """Yield the faults of a stage, with advice to add missing stages to the key `needs`.

    If a placeholder uses a value of another stage, the key `needs` must contain that stage.

    Args:
        stage: The stage as plain data.
        faults: The faults of the stage.
        stages: Mapping from names to all stages as plain data.
    """
    for fault in faults:
        names = [*find_names(fault.problem)] if fault.problem.startswith("unknown name `") else []
        other = str(names[0]).removeprefix(STAGE).partition(".")[0] if names else ""
        is_listed = stage.get("needs") is not None and other in stages
        if is_listed and f"{STAGE}{other}" in fault.problem and other not in stage["needs"]:
            remedy = f"add {other} to the key `needs` of this stage"
            if other == stage.get("name"):
                remedy = "a stage cannot use its own value"
            yield Fault(path=fault.path, problem=fault.problem, remedy=remedy)
        else:
            yield fault


def _names_checkpoint(stage: Mapping[str, Any]) -> bool:
    """Return True if a stage contains the path of its checkpoints.

    The path is in the key `checkpoint` of the stage, or in the key `checkpoints` of a component.
    """
    components = mapping_or_empty(stage["spec"].get("components")).values()
    has_folder = any(mapping_or_empty(component).get("checkpoints") for component in components)
    return has_folder or bool(stage.get("checkpoint"))
