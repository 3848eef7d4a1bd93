"""The pipeline spec: runs in sequence, as frozen data.

`PipelineSpec` is also the one parameter of the flow `pipeline`, so titles, descriptions and
examples here are the labels of the form in the Prefect UI. Files are read by `pipeline_loading`,
which also knows whether the spec of each stage is a valid one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from tasks.spec.errors import InvalidSpec
from tasks.spec.plain_words import faults_of
from tasks.spec.values import PART_NAME, DottedKey, Model, Refusal, Text, Worded, refused

#: Through which a stage's run is created where the stage names no other.
STAGE_DEPLOYMENT = "train/stage"

_PIPELINE_NAME = Worded(
    r"[a-z][a-z0-9-]{0,31}", "a small letter and up to 31 more of a-z, 0-9 and -"
)
_DEPLOYMENT = Worded(r"train/[^/\s]+", "a deployment of the flow train, such as train/quickstart")


class Stage(Model):
    """One run of a pipeline."""

    name: Annotated[Text, PART_NAME] = Field(
        title="Name",
        description="What later stages call it: ${stage.NAME.checkpoint}.",
        examples=["sft"],
    )
    deployment: Annotated[Text, _DEPLOYMENT] | None = Field(
        None,
        title="Deployment",
        description="Through which its run is created, and whose spec it has unless one stands "
        "here; left out: train/stage.",
        examples=["train/verl-sft"],
    )
    spec: Mapping[str, Any] | None = Field(
        None,
        title="Spec",
        description="The run spec; in a file of a pipeline also the name of a file of one. It may "
        "use ${stage.NAME.checkpoint}, ${stage.NAME.run_dir} and ${stage.NAME.run_id} of the "
        "stages before it, wherever a run spec may use placeholders.",
    )
    set: Mapping[DottedKey, Any] = Field(
        default_factory=dict,
        title="Set",
        description="Changes to the spec, each by its path.",
        examples=[{"progress.total": 20}],
    )
    checkpoint: Text | None = Field(
        None,
        title="Checkpoint",
        description="What it hands on, as a path or pattern, with ${run.dir}, ${run.id} and "
        "${attempt.dir}; left out: the checkpoint that the run would be resumed from.",
        examples=["${run.dir}/hf/step-*"],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("deployment") is None and written.get("spec") is None:
            problem = "missing: nothing says what the stage runs"
            yield ("spec",), refused(problem, "write spec: FILE.yaml, or deployment: train/NAME")


class PipelineSpec(Model):
    """Runs that follow each other, each when the one before has completed.

    Raises:
        InvalidSpec: With every fault at once, from the constructor as from `model_validate`.
    """

    name: Annotated[Text, _PIPELINE_NAME] = Field(
        title="Name",
        description="What this pipeline is called; its flow runs' names begin with it.",
        examples=["sft-then-grpo"],
    )
    tags: tuple[Text, ...] = Field(
        (),
        title="Tags",
        description="Labels of the pipeline and of each of its runs.",
        examples=[["demo"]],
    )
    stages: tuple[Stage, ...] = Field(
        title="Stages",
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
            name = stage.get("name") if isinstance(stage, Mapping) else None
            if name is not None and name in seen:
                problem = f"another stage is called {name!r} too"
                yield ("stages", index, "name"), refused(problem, "give each a name of its own")
            seen.append(name)

    @model_validator(mode="wrap")
    @classmethod
    def _in_plain_words(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            faults = faults_of(error, cls.model_json_schema())
        raise InvalidSpec(faults)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def stage(self, name: str) -> Stage:
        """Raises: KeyError."""
        return {stage.name: stage for stage in self.stages}[name]

    def written(self) -> dict[str, Any]:
        """Plain data for YAML or JSON, in order and without what was left out."""
        return self.model_dump(mode="json", exclude_unset=True)
