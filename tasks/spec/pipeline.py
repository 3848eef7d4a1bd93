"""Spec of a pipeline, which is a sequence of runs, and the functions that load it.

`PipelineSpec` is also the parameter of the flow `pipeline`. Its titles, descriptions and examples
are shown in the form of the Prefect UI.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import suggest_name
from tasks.spec.loading import (
    apply_value,
    collect_faults,
    copy_as_dict,
    find_project_root,
    parse_spec,
    parse_yaml,
    read_override,
    read_text,
)
from tasks.spec.placeholders import (
    CHECKPOINT,
    STAGE,
    STAGE_KEYS,
    check_stage_names,
    fill_in_stages,
    find_unknown_names,
    mapping_or_empty,
)
from tasks.spec.run import RunSpec
from tasks.spec.values import (
    Document,
    DottedKey,
    Model,
    PartName,
    Refusal,
    SpecName,
    Text,
    make_refusal,
)

#: Default deployment that creates the run of a stage.
STAGE_DEPLOYMENT = "train/any"


class Stage(Model):
    """A run of a pipeline."""

    name: PartName = Field(
        description="What later stages call it: ${stage.NAME.checkpoint}.", examples=["sft"]
    )
    deployment: Annotated[str, Field(strict=True, pattern=r"^train/[^/\s]+$")] | None = Field(
        None,
        description="Through which its run is created, and whose spec it has unless one stands "
        "here; left out: train/any.",
        examples=["train/verl-sft"],
    )
    spec: Mapping[str, Any] | None = Field(
        None,
        description="The run spec; in a file of a pipeline also the name of a file of one. It may "
        "use ${stage.NAME.checkpoint}, ${stage.NAME.run_dir} and ${stage.NAME.run_id} of the "
        "stages before it, wherever a run spec may use placeholders.",
    )
    set: Mapping[DottedKey, Any] = Field(
        default_factory=dict,
        description="Changes to the spec, each by its path.",
        examples=[{"progress.total": 20}],
    )
    checkpoint: Text | None = Field(
        None,
        description="What it hands on, as a path or pattern, with ${run.dir}, ${run.id} and "
        "${attempt.dir}; left out: the checkpoint that the run would be resumed from.",
        examples=["${run.dir}/hf/step-*"],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("deployment") is None and written.get("spec") is None:
            problem = "missing: nothing says what the stage runs"
            yield (
                ("spec",),
                make_refusal(problem, "write spec: FILE.yaml, or deployment: train/NAME"),
            )


class PipelineSpec(Document):
    """Runs in sequence. Each run starts when the previous run has completed."""

    name: SpecName = Field(
        description="What this pipeline is called; its flow runs' names begin with it.",
        examples=["sft-then-grpo"],
    )
    tags: tuple[Text, ...] = Field(
        (), description="Labels of the pipeline and of each of its runs.", examples=[["demo"]]
    )
    stages: tuple[Stage, ...] = Field(
        description="Its runs, in this order.",
        examples=[[{"name": "sft", "deployment": "train/verl-sft"}]],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        stages = written.get("stages")
        if stages in ([], ()):
            yield ("stages",), make_refusal("must not be empty")
        earlier_names: list[object] = []
        for index, stage in enumerate(stages if isinstance(stages, list | tuple) else ()):
            name = mapping_or_empty(stage).get("name")
            if name is not None and name in earlier_names:
                problem = f"another stage is called {name!r} too"
                yield (
                    ("stages", index, "name"),
                    make_refusal(problem, "give each a name of its own"),
                )
            earlier_names.append(name)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def stage(self, name: str) -> Stage:
        """Return a stage by its name. Raises: KeyError."""
        return {stage.name: stage for stage in self.stages}[name]


def load_pipeline(
    path: Path, overrides: Sequence[str] = (), root: Path | None = None
) -> PipelineSpec:
    """Load a pipeline spec and the run specs that it names from YAML files.

    Args:
        path: File of the pipeline spec.
        overrides: Changes of the form `STAGE.a.b=c`. They are applied in order.
        root: Directory that relative file names start from. None means the root of the project
            that contains the file.

    Raises:
        InvalidSpec: A file cannot be read, the specs have faults, or an override has. Faults in
            specs and overrides are reported only if all files can be read.
    """
    source = str(path)
    faults: list[Fault] = []
    written = copy_as_dict(parse_yaml(read_text(path), source), source)
    for index, stage in _stages_by_index(written).items():
        if isinstance(name := stage.get("spec"), str):
            candidates = [
                folder / name for folder in (root or find_project_root(path), path.parent)
            ]
            file = next(filter(Path.exists, candidates), candidates[0])
            with collect_faults(faults, f"stages.{index}.spec: {name}"):
                stage["spec"] = copy_as_dict(parse_yaml(read_text(file), name), name)
    if faults:
        raise InvalidSpec(tuple(faults), source)
    return parse_pipeline(written, overrides, source)


def parse_pipeline(
    data: object, overrides: Sequence[str] = (), source: str = "the pipeline"
) -> PipelineSpec:
    """Validate plain data, such as the parameter of a flow, as a pipeline spec.

    In the result, the `set` of a stage is already applied to its spec, and the spec has its
    `start_order`. The spec of a stage that only names a deployment stays empty until
    `add_deployment_specs`.

    Args:
        data: The pipeline spec as plain data.
        overrides: Changes of the form `STAGE.a.b=c`. They are applied in order.
        source: Name of the input for error messages.

    Raises:
        InvalidSpec: With all faults of the data and of the overrides.
    """
    written = copy_as_dict(data, source)
    faults: list[Fault] = []
    if isinstance(written.get("stages"), list):
        # Stages may share an object through a YAML anchor, but each stage is changed separately.
        written["stages"] = [copy.deepcopy(stage) for stage in written["stages"]]
    stages = _stages_by_index(written)

    for override in overrides:
        with collect_faults(faults):
            _add_override([*stages.values()], override)
    with collect_faults(faults):
        PipelineSpec.model_validate(written)

    #: Placeholder names that later stages may use. False if the name will have no value.
    known_names: dict[str, bool] = {}
    for index, stage in stages.items():
        faults += find_unknown_names(stage.get("checkpoint"), f"stages.{index}.checkpoint")
        has_spec = isinstance(stage.get("spec"), dict)
        if has_spec:
            _check_stage(stage, f"stages.{index}", known_names, faults)
        may_have_checkpoint = not has_spec or _names_checkpoint(stage)
        for key in STAGE_KEYS:
            placeholder = f"{STAGE}{stage.get('name')}.{key}"
            known_names[placeholder] = may_have_checkpoint or key != CHECKPOINT
    if faults:
        raise InvalidSpec(tuple(dict.fromkeys(faults)), source)
    return PipelineSpec.model_validate(written)


def add_deployment_specs(pipeline: PipelineSpec, specs: Mapping[str, object]) -> PipelineSpec:
    """Return the pipeline with the run specs of the deployments that its stages name.

    Args:
        pipeline: A validated pipeline spec.
        specs: Run spec for each stage without a spec, by the name of the stage.

    Raises:
        InvalidSpec: With all faults of the added specs.
    """
    written = pipeline.written()
    for stage in written["stages"]:
        if stage.get("spec") is None:
            stage["spec"] = specs.get(stage["name"])
    return parse_pipeline(written, source=f"pipeline {pipeline.name!r}")


def _stages_by_index(written: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the stages that are mappings, by their index in the list."""
    stages = written.get("stages")
    indexed = enumerate(stages if isinstance(stages, list) else ())
    return {index: stage for index, stage in indexed if isinstance(stage, dict)}


def _add_override(stages: Sequence[dict[str, Any]], override: str) -> None:
    """Add an override of the command line to the `set` of its stage. Raises: InvalidSpec."""
    path, value = read_override(override)
    name, _, key = path.partition(".")
    names = [str(stage.get("name")) for stage in stages]
    if not key or name not in names:
        problem = f"no stage {name!r}" if key else "has no `STAGE.KEY=` before its value"
        remedy = suggest_name(name, names) or f"write STAGE.KEY=VALUE; known are {', '.join(names)}"
        raise InvalidSpec((Fault(path="", problem=f"--set {path}: {problem}", remedy=remedy),))
    stage = stages[names.index(name)]
    stage["set"] = {**mapping_or_empty(stage.get("set")), key: value}


def _check_stage(
    stage: dict[str, Any], path: str, known_names: Mapping[str, bool], faults: list[Fault]
) -> None:
    """Apply the `set` of a stage to its spec, and add the faults of the result to `faults`.

    If there are no faults, the spec in the stage is replaced by its normal form.
    """
    written = stage["spec"]
    for key, value in mapping_or_empty(stage.pop("set", None)).items():
        with collect_faults(faults, f"{path}.set"):
            apply_value(written, str(key), value)
    with collect_faults(faults, f"{path}.spec"):
        check_stage_names(written, known_names)
    with collect_faults(faults, f"{path}.spec"):
        # The values of the placeholders are not known yet, so any text serves for validation.
        parse_spec(fill_in_stages(written, lambda _stage, _key: "stage"))
        stage["spec"] = RunSpec.model_validate(written).to_server_data()


def _names_checkpoint(stage: Mapping[str, Any]) -> bool:
    """Return True if a stage names the place of its checkpoints."""
    components = mapping_or_empty(stage["spec"].get("components")).values()
    has_folder = any(mapping_or_empty(component).get("checkpoints") for component in components)
    return has_folder or bool(stage.get("checkpoint"))
