"""The spec of a pipeline, which is a sequence of runs, and the functions that load it.

`PipelineSpec` is also the type of the parameter `spec` of the Prefect flow `pipeline`. The form in
the Prefect UI shows its titles, descriptions and examples.
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
    locate_spec,
    name_source,
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

#: Name of the deployment that creates the run of a stage, if the stage names no other deployment.
STAGE_DEPLOYMENT = "train/any"


class Stage(Model):
    """Stage of a pipeline, which is one run."""

    name: PartName = Field(
        description="Name of the stage. Later stages use it in placeholders such as "
        "${stage.NAME.checkpoint}.",
        examples=["sft"],
    )
    deployment: Annotated[str, Field(strict=True, pattern=r"^train/[^/\s]+$")] | None = Field(
        None,
        description="Deployment that creates the run of this stage. Without `spec`, the stage uses "
        "the run spec of this deployment. If omitted, it is train/any.",
        examples=["train/verl-sft"],
    )
    spec: Mapping[str, Any] | None = Field(
        None,
        description="Run spec of this stage. In a pipeline file, it may also be the name of a run "
        "spec file. It may use ${stage.NAME.checkpoint}, ${stage.NAME.run_dir} and "
        "${stage.NAME.run_id} of earlier stages, in all places for placeholders.",
    )
    set: Mapping[DottedKey, Any] = Field(
        default_factory=dict,
        description="Changes to the run spec of this stage: new values by their dotted paths.",
        examples=[{"progress.total": 20}],
    )
    checkpoint: Text | None = Field(
        None,
        description="Path or pattern of the checkpoint for later stages. It may use ${run.dir}, "
        "${run.id} and ${attempt.dir}. If omitted, it is the checkpoint from which the run would "
        "resume.",
        examples=["${run.dir}/hf/step-*"],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("deployment") is None and written.get("spec") is None:
            problem = "missing: a stage needs a run spec or a deployment"
            yield (
                ("spec",),
                make_refusal(problem, "write spec: FILE.yaml, or deployment: train/NAME"),
            )


class PipelineSpec(Document):
    """Sequence of runs. Each run starts when the previous run has completed."""

    name: SpecName = Field(
        description="Name of the pipeline. The names of its flow runs begin with it.",
        examples=["sft-then-grpo"],
    )
    tags: tuple[Text, ...] = Field(
        (), description="Labels of the pipeline and of each of its runs.", examples=[["demo"]]
    )
    stages: tuple[Stage, ...] = Field(
        description="Stages of the pipeline, in the order in which they run.",
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
        """Names of the stages, in their order."""
        return tuple(stage.name for stage in self.stages)

    def stage(self, name: str) -> Stage:
        """Return the stage with this name. Raises: KeyError, if the pipeline has no such stage."""
        return {stage.name: stage for stage in self.stages}[name]


def load_pipeline(
    path: Path, overrides: Sequence[str] = (), root: Path | None = None
) -> PipelineSpec:
    """Load a pipeline spec, and the run spec files that its stages name, from YAML files.

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
    faults: list[Fault] = []
    written = copy_as_dict(parse_yaml(read_text(path), source), source)
    for index, stage in _index_stages(written).items():
        if isinstance(name := stage.get("spec"), str):
            candidates = [
                folder / name
                for folder in (root or find_project_root(path), locate_spec(path).parent)
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

    In the result, the changes in `set` of a stage are already applied to its run spec, and the run
    spec has the key `start_order`. A stage that only names a deployment has no run spec in the
    result; `add_deployment_specs` adds it later.

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
    stages = _index_stages(written)

    for override in overrides:
        with collect_faults(faults):
            _add_override([*stages.values()], override)
    with collect_faults(faults):
        PipelineSpec.model_validate(written)

    #: Placeholder names of the stages so far, such as `stage.sft.run_id`. The value is False if
    #: such a placeholder will never have a value.
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
    """Return the pipeline with a run spec for each stage that only names a deployment.

    Args:
        pipeline: A validated pipeline spec.
        specs: Run spec of the deployment for each stage without a spec, by the name of the stage.

    Raises:
        InvalidSpec: An added spec has faults. The error lists all faults.
    """
    written = pipeline.written()
    for stage in written["stages"]:
        if stage.get("spec") is None:
            stage["spec"] = specs.get(stage["name"])
    return parse_pipeline(written, source=f"pipeline {pipeline.name!r}")


def _index_stages(written: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the stages of a pipeline that are mappings, by their index in the list.

    Args:
        written: The pipeline spec, not validated. A stage that is no mapping is skipped.
    """
    stages = written.get("stages")
    indexed = enumerate(stages if isinstance(stages, list) else ())
    return {index: stage for index, stage in indexed if isinstance(stage, dict)}


def _add_override(stages: Sequence[dict[str, Any]], override: str) -> None:
    """Add an override of the command line to the mapping `set` of its stage.

    Args:
        stages: The stages of the pipeline as plain data. One of them is changed.
        override: Change of the form `STAGE.a.b=c`.

    Raises:
        InvalidSpec: The override has no such form, or names an unknown stage.
    """
    path, value = read_override(override)
    name, _, key = path.partition(".")
    names = [str(stage.get("name")) for stage in stages]
    if not key or name not in names:
        problem = f"there is no stage {name!r}" if key else "must begin with STAGE.KEY="
        remedy = suggest_name(name, names)
        remedy = remedy or f"write STAGE.KEY=VALUE; known stages: {', '.join(names)}"
        raise InvalidSpec((Fault(path="", problem=f"--set {path}: {problem}", remedy=remedy),))
    stage = stages[names.index(name)]
    stage["set"] = {**mapping_or_empty(stage.get("set")), key: value}


def _check_stage(
    stage: dict[str, Any], path: str, known_names: Mapping[str, bool], faults: list[Fault]
) -> None:
    """Apply the changes in `set` of a stage to its run spec, and check the result.

    If the result has no faults, it replaces the run spec in the stage, with `start_order` added.

    Args:
        stage: The stage as plain data. It is changed.
        path: Dotted path of the stage in the pipeline spec, for the faults.
        known_names: Placeholder names of the earlier stages, such as `stage.sft.run_id`. The value
            is False if such a placeholder will never have a value.
        faults: List to which the faults of the changed run spec are added.
    """
    written = stage["spec"]
    for key, value in mapping_or_empty(stage.pop("set", None)).items():
        with collect_faults(faults, f"{path}.set"):
            apply_value(written, str(key), value)
    with collect_faults(faults, f"{path}.spec"):
        check_stage_names(written, known_names)
    with collect_faults(faults, f"{path}.spec"):
        # The values of `${stage...}` are not known yet. For the validation, any text will do.
        parse_spec(fill_in_stages(written, lambda _stage, _key: "stage"))
        stage["spec"] = RunSpec.model_validate(written).to_server_data()


def _names_checkpoint(stage: Mapping[str, Any]) -> bool:
    """Return True if a stage says where its checkpoints are.

    The path is in the key `checkpoint` of the stage, or in the key `checkpoints` of a component.
    """
    components = mapping_or_empty(stage["spec"].get("components")).values()
    has_folder = any(mapping_or_empty(component).get("checkpoints") for component in components)
    return has_folder or bool(stage.get("checkpoint"))
