"""The pipeline spec: runs in sequence, as frozen data; reading its files, and those of its stages.

`PipelineSpec` is also the one parameter of the flow `pipeline`, so titles, descriptions and
examples here are the labels of the form in the Prefect UI.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import (
    apply_value,
    as_mapping,
    collecting,
    parse,
    parse_spec,
    project_of,
    read_override,
    read_text,
)
from tasks.spec.placeholders import (
    CHECKPOINT,
    STAGE,
    STAGE_KEYS,
    check_names,
    filled_in,
    mapping,
    unknown_names,
)
from tasks.spec.run import RunSpec
from tasks.spec.values import Document, DottedKey, Model, PartName, Refusal, SpecName, Text, refused
from tasks.spec.words import did_you_mean

#: Through which a stage's run is created where the stage names no other.
STAGE_DEPLOYMENT = "train/any"


class Stage(Model):
    """One run of a pipeline."""

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
            yield ("spec",), refused(problem, "write spec: FILE.yaml, or deployment: train/NAME")


class PipelineSpec(Document):
    """Runs that follow each other, each when the one before has completed."""

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
            yield ("stages",), refused("must not be empty")
        seen: list[object] = []
        for index, stage in enumerate(stages if isinstance(stages, list | tuple) else ()):
            name = mapping(stage).get("name")
            if name is not None and name in seen:
                problem = f"another stage is called {name!r} too"
                yield ("stages", index, "name"), refused(problem, "give each a name of its own")
            seen.append(name)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def stage(self, name: str) -> Stage:
        """Raises: KeyError."""
        return {stage.name: stage for stage in self.stages}[name]


def load_pipeline(
    path: Path, overrides: Sequence[str] = (), root: Path | None = None
) -> PipelineSpec:
    """The pipeline spec of a YAML file, with the run specs of the files that it names, and the
    overrides, `STAGE.a.b=c` each, applied in order.

    Args:
        root: That the names of files start from; None: that of the file's project.

    Raises: InvalidSpec, with every fault of the files; where all can be read, of what is in them
        and of the overrides.
    """
    source, faults = str(path), list[Fault]()
    written = as_mapping(parse(read_text(path), source), source)
    for index, stage in _stages(written).items():
        if isinstance(name := stage.get("spec"), str):
            files = [place / name for place in (root or project_of(path), path.parent)]
            file = next(filter(Path.exists, files), files[0])
            with collecting(faults, f"stages.{index}.spec: {name}"):
                stage["spec"] = as_mapping(parse(read_text(file), name), name)
    if faults:
        raise InvalidSpec(tuple(faults), source)
    return parse_pipeline(written, overrides, source)


def parse_pipeline(
    data: object, overrides: Sequence[str] = (), source: str = "the pipeline"
) -> PipelineSpec:
    """The pipeline spec that plain data hold, such as a flow's parameter.

    A stage's spec has its `set` in it afterwards, and its `start_order`. Of a stage that only names
    a deployment nothing is known of the spec until `with_specs`.

    Raises: InvalidSpec, with every fault of the data and of the overrides.
    """
    written, faults = as_mapping(data, source), list[Fault]()
    if isinstance(written.get("stages"), list):
        # YAML's anchors make one of what two stages have; each is changed by itself.
        written["stages"] = [copy.deepcopy(stage) for stage in written["stages"]]
    stages = _stages(written)
    for override in overrides:
        with collecting(faults):
            _note([*stages.values()], override)
    with collecting(faults):
        PipelineSpec.model_validate(written)
    #: The names that later stages may use, each with whether it will have a value.
    known: dict[str, bool] = {}
    for index, stage in stages.items():
        faults += unknown_names(stage.get("checkpoint"), f"stages.{index}.checkpoint")
        is_known = isinstance(stage.get("spec"), dict)
        if is_known:
            _check(stage, f"stages.{index}", known, faults)
        has_checkpoint = not is_known or _hands_on(stage)
        for key in STAGE_KEYS:
            known[f"{STAGE}{stage.get('name')}.{key}"] = has_checkpoint or key != CHECKPOINT
    if faults:
        raise InvalidSpec(tuple(dict.fromkeys(faults)), source)
    return PipelineSpec.model_validate(written)


def with_specs(pipeline: PipelineSpec, specs: Mapping[str, object]) -> PipelineSpec:
    """The pipeline with the run specs that its deployments have, by stage.

    Raises: InvalidSpec, with every fault that they bring.
    """
    written = pipeline.written()
    for stage in written["stages"]:
        if stage.get("spec") is None:
            stage["spec"] = specs.get(stage["name"])
    return parse_pipeline(written, source=f"pipeline {pipeline.name!r}")


def _stages(written: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Those that are mappings, by their place."""
    stages = written.get("stages")
    found = enumerate(stages if isinstance(stages, list) else ())
    return {index: stage for index, stage in found if isinstance(stage, dict)}


def _note(stages: Sequence[dict[str, Any]], override: str) -> None:
    """Notes a change from the command line in the `set` of its stage. Raises: InvalidSpec."""
    path, value = read_override(override)
    name, _, key = path.partition(".")
    names = [str(stage.get("name")) for stage in stages]
    if not key or name not in names:
        problem = f"no stage {name!r}" if key else "has no `STAGE.KEY=` before its value"
        remedy = did_you_mean(name, names) or f"write STAGE.KEY=VALUE; known are {', '.join(names)}"
        raise InvalidSpec((Fault(path="", problem=f"--set {path}: {problem}", remedy=remedy),))
    stage = stages[names.index(name)]
    stage["set"] = {**mapping(stage.get("set")), key: value}


def _check(
    stage: dict[str, Any], path: str, known: Mapping[str, bool], faults: list[Fault]
) -> None:
    """Applies a stage's `set` to its spec, and notes what is wrong with that; the spec is put in
    order where nothing is."""
    written = stage["spec"]
    for key, value in mapping(stage.pop("set", None)).items():
        with collecting(faults, f"{path}.set"):
            apply_value(written, str(key), value)
    with collecting(faults, f"{path}.spec"):
        check_names(written, known)
    with collecting(faults, f"{path}.spec"):
        # Any text will do: what these will be is not known yet.
        parse_spec(filled_in(written, lambda _stage, _key: "stage"))
        stage["spec"] = RunSpec.model_validate(written).for_server()


def _hands_on(stage: Mapping[str, Any]) -> bool:
    """Whether a stage says where a checkpoint of it is to be found."""
    parts = mapping(stage["spec"].get("components")).values()
    named = any(mapping(part).get("checkpoints") for part in parts)
    return named or bool(stage.get("checkpoint"))
