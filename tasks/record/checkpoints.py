"""Choose checkpoints of a run: for the next attempt, for the next pipeline stage, or for removal.

The key `checkpoints` in the run spec names the folder of the checkpoints, or a pattern that matches
them. The module `checkpoint_folder` lists the folder. The module `checkpoint_blame` decides which
checkpoint an attempt could not load.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tasks.record.checkpoint_blame import find_given_up, match_given_up
from tasks.record.checkpoint_claims import Rival, claim_folder, find_rivals, why_of_rival
from tasks.record.checkpoint_folder import (
    Checkpoint,
    Completeness,
    Listing,
    list_checkpoints,
    list_unrecognised,
)
from tasks.record.checkpoint_names import REMOVAL_SUFFIX, is_partial_name, make_pattern
from tasks.record.checkpoint_paths import (
    CheckpointPath,
    find_fixed_folder,
    find_local_path,
    identify_folder,
    identify_path,
    parse_checkpoint_path,
    path_exists,
    remove_path,
)
from tasks.record.checkpoint_pins import read_pinned_paths
from tasks.record.checkpoint_store import StoreStat
from tasks.record.evaluation_rules import list_reasons_to_keep
from tasks.record.evaluations import EvaluationsJson, read_evaluated_checkpoints
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RefusedCheckpoint, ResumeRecord, RunJson
from tasks.spec.checkpoint_urls import is_url
from tasks.spec.component import Component
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.formatting import join_commas
from tasks.spec.placeholders import (
    find_names,
    find_uses,
    has_placeholders,
    mapping_or_empty,
    substitute,
)
from tasks.spec.run import RunSpec
from tasks.spec.start_from import StartFrom

#: If no file of an unfinished checkpoint has changed for this number of seconds, Muster assumes
#: that the trainer no longer writes the checkpoint.
_GROWS_WITHIN_S = 30.0
#: Number of newest complete checkpoints that are never deleted. If the newest checkpoint cannot be
#: loaded, the next attempt starts from the second newest.
_NEVER_REMOVED = 2
#: Largest number of unusable checkpoints that are listed in the record of an attempt.
_REFUSED_AT_MOST = 20
#: Largest number of unrecognised files and folders that a message names.
_UNRECOGNISED_SHOWN = 3
#: Placeholder for the path of the checkpoint from which an attempt starts.
_RESUME_FROM = "attempt.resume_from"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """The checkpoint from which the next attempt should start, and the reasons for this choice."""

    #: Absolute path or URL of the checkpoint. None if the attempt starts without a checkpoint.
    path: CheckpointPath | None = None
    #: Evidence that the checkpoint is complete. If `path` is None, the reason for a start without a
    #: checkpoint.
    rule: str = ""
    #: Checkpoints that are newer than `path`, but from which the attempt should not start. The
    #: newest checkpoint comes first.
    refused: tuple[RefusedCheckpoint, ...] = ()
    #: Remarks for the user about the choice of the checkpoint.
    notes: tuple[str, ...] = ()
    step: int | None = None
    #: Hash of the checkpoint's files, or an empty string if `path` is None.
    signature: str = ""
    #: True if a component gets the path of the checkpoint, because the spec uses the placeholder
    #: `${attempt.resume_from}`.
    is_passed: bool = True
    #: False if no component of the spec has the key `checkpoints`.
    has_folder: bool = True
    #: Text about files that may be checkpoints, as returned by `describe_unrecognised`. The text is
    #: also part of `rule`.
    unrecognised: str = ""

    @property
    def passed(self) -> CheckpointPath | None:
        """Path for `${attempt.resume_from}`, or None if the spec does not use this placeholder."""
        return self.path if self.is_passed else None

    def describe(self) -> str:
        """Return a phrase about the starting point of the next attempt, such as `from PATH`."""
        if self.passed is not None:
            return f"from {self.passed}"
        if self.path is not None:
            return f"from the checkpoint that the trainer itself finds, probably {self.path}"
        if not self.refused:
            return ""
        reasons = "; ".join(f"{Path(one.path).name}: {one.why}" for one in self.refused[:3])
        return f"from the beginning, because no checkpoint is complete ({reasons})"

    def as_record(self) -> ResumeRecord:
        """Return the plan as a `ResumeRecord`, which is stored in the record of the attempt."""
        path = str(self.path) if self.path is not None else None
        return ResumeRecord(
            **{"from": path if self.is_passed else None},
            rule=self.rule,
            refused=self.refused,
            expected=None if self.is_passed else path,
            notes=self.notes,
            step=self.step,
            signature=self.signature,
        )


def plan_resume(
    spec: RunSpec,
    place: RunPlace,
    attempts: Sequence[AttemptRecord],
    foreign: Mapping[str, str] | None = None,
) -> ResumePlan:
    """Choose the checkpoint from which the next attempt starts.

    - Usually, this is the newest complete checkpoint of the run. Checkpoints that an attempt could
      not load or that were saved during an alarm are skipped.
    - If the attempts could load none of the complete checkpoints, the newest is chosen
      nevertheless. An attempt without a checkpoint would overwrite all checkpoints.
    - The spec key `start_from` names a checkpoint that a person has chosen. This checkpoint is used
      if the run has no complete checkpoint, or if the person chose it for this attempt.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        attempts: All attempts of the run.
        foreign: Mapping from the path of each checkpoint of another run to its signature, as
            returned by `find_foreign_checkpoints`.

    Raises:
        OSError: The folder of the checkpoints cannot be read, or the checkpoint of `start_from` is
            missing.
    """
    start = spec.start_from
    named = _checkpoint_component(spec)
    if start is not None and (named is None or start.attempt == len(attempts) + 1):
        return _plan_start(start)
    if named is None:
        return ResumePlan(
            rule="no component of the spec has the key `checkpoints`", has_folder=False
        )
    name, component = named
    written = component.checkpoints or ""
    if not attempts:
        if start is not None:
            return _plan_start(start)
        return ResumePlan(rule="first attempt", is_passed=_is_passed(spec))

    why_unfit = _unfit_checkpoints(spec, attempts)
    refused: list[RefusedCheckpoint] = []
    notes: list[str] = []
    given_up: list[Checkpoint] = []
    for number in reversed(_attempts_with_folders(written, attempts)):
        listing = _checkpoints_of_attempt(place, number, name, spec=spec)
        for path, why in listing.others:
            refused.append(RefusedCheckpoint(path=str(path), why=why))
        why_foreign = _foreign_checkpoints(place, number, name, foreign or {})
        fit: Checkpoint | None = None
        for checkpoint in reversed(listing.checkpoints):
            why = why_foreign(checkpoint) or _why_incomplete(checkpoint)
            if not why and (why := why_unfit(checkpoint)):
                given_up.append(checkpoint)
            if not why:
                fit = checkpoint
                break
            refused.append(RefusedCheckpoint(path=str(checkpoint.path), why=why))
        notes += listing.notes
        if fit is not None:
            return _plan_from(spec, fit, fit.reason, refused, notes)
    loadable = [one for one in given_up if not _is_alarmed(why_unfit(one))]
    if loadable:
        newest = loadable[0]
        others = [one for one in refused if one.path != str(newest.path)]
        rule = (
            f"{why_unfit(newest)}. The checkpoint is tried again nevertheless, because there is no "
            "other complete checkpoint"
        )
        return _plan_from(spec, newest, rule, others, notes)
    if start is not None:
        return _plan_start(start, refused, notes)
    rule = "no complete checkpoint was found" if refused else "no checkpoint was found"
    unrecognised = describe_unrecognised(spec, place, attempts)
    if unrecognised:
        rule += f". {unrecognised}"
    else:
        rule += _describe_searched_folder(spec, place, attempts, name)
    return ResumePlan(
        rule=rule,
        refused=tuple(refused[:_REFUSED_AT_MOST]),
        notes=tuple(notes),
        is_passed=_is_passed(spec),
        unrecognised=unrecognised,
    )


def _describe_searched_folder(
    spec: RunSpec, place: RunPlace, attempts: Sequence[AttemptRecord], name: str
) -> str:
    """Return a text about the folder that was searched, such as ` in /runs/r/checkpoints`.

    If each attempt has a folder of its own, the text names the folder of the last attempt.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        attempts: All attempts of the run.
        name: Name of the component that writes checkpoints.

    Returns:
        An empty string if the folder is unknown.
    """
    root, written = _folder_of_attempt(place, len(attempts), name, spec)
    if not written:
        return ""
    path = parse_checkpoint_path(written, root)
    fixed = find_fixed_folder(written)
    text = f" in {path}" if fixed == written else f" that matches {path}"
    if len(_attempts_with_folders(spec.processes[name].checkpoints or "", attempts)) > 1:
        others = "in the folders" if fixed == written else "the patterns"
        text += f" or {others} of earlier attempts"
    elif fixed == written and (folder := find_local_path(path)) and not folder.exists():
        text += ", which does not exist"
    return text


def explain_lack_of_checkpoints(
    spec: RunSpec,
    place: RunPlace,
    attempts: Sequence[AttemptRecord],
    foreign: Mapping[str, str] | None = None,
) -> str:
    """Return a sentence which says that Muster found no checkpoint of a run.

    The sentence names the folder in which Muster searched for checkpoints, and ends without a full
    stop. Example: `no checkpoint was found in /runs/r/checkpoints`.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        attempts: All attempts of the run.
        foreign: Mapping from the path of each checkpoint of another run to its signature, as
            returned by `find_foreign_checkpoints`.

    Returns:
        The sentence. An empty string if the run has saved a checkpoint, if the spec has no key
        `checkpoints`, or if no attempt has begun.

    Raises:
        OSError: The folder of the checkpoints cannot be read.
    """
    if not attempts or _checkpoint_component(spec) is None:
        return ""
    # Ignore `start_from`: it names a checkpoint that this run has not saved.
    plan = plan_resume(spec.model_copy(update={"start_from": None}), place, attempts, foreign)
    return plan.rule if plan.path is None else ""


def describe_unrecognised(spec: RunSpec, place: RunPlace, attempts: Sequence[AttemptRecord]) -> str:
    """Return two sentences about entries of the checkpoint folder that Muster does not recognise.

    The first sentence names files and folders, and the second names the remedy. The text has no
    full stop at its end.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        attempts: All attempts of the run.

    Returns:
        The sentences. The result is an empty string if Muster found a checkpoint of the run, or if
        no unrecognised file or folder could be a checkpoint.

    Raises:
        OSError: The folder of the checkpoints cannot be read.
    """
    named = _checkpoint_component(spec)
    if named is None:
        return ""
    name, component = named
    written = component.checkpoints or ""
    paths: list[CheckpointPath] = []
    for number in reversed(_attempts_with_folders(written, attempts)):
        if _checkpoints_of_attempt(place, number, name, spec=spec).checkpoints:
            return ""
        root, folder = _folder_of_attempt(place, number, name, spec)
        paths = paths or (list_unrecognised(folder, root) if folder else [])
    if not paths:
        return ""
    names = [path.name for path in paths]
    shown = join_commas(names[:_UNRECOGNISED_SHOWN])
    if more := len(names[_UNRECOGNISED_SHOWN:]):
        shown += f" and {more} more"
    noun = "a checkpoint" if len(paths) == 1 else "checkpoints"
    folder = find_fixed_folder(written).rstrip("/")
    prefix = f"{folder}/" if folder else ""
    sentence = f"Muster does not recognise {shown} in {paths[0].parent} as {noun}"
    for path in paths:
        if path.is_dir() and list_checkpoints(str(path), Path.cwd(), is_running=False).checkpoints:
            return (
                f"{sentence}. To use the checkpoints in {path.name}, write "
                f'`checkpoints: "{prefix}{path.name}"` into the spec'
            )
    subject = "it is a checkpoint" if len(paths) == 1 else "they are checkpoints"
    return (
        f"{sentence}. If {subject}, write a pattern into the spec: "
        f'`checkpoints: "{prefix}{make_pattern(names)}"`'
    )


def _plan_start(
    start: StartFrom,
    refused: Sequence[RefusedCheckpoint] = (),
    notes: Sequence[str] = (),
) -> ResumePlan:
    """Return a plan in which the next attempt starts from a checkpoint that a person has chosen.

    Args:
        start: The key `start_from` of the spec.
        refused: Checkpoints from which the attempt should not start.
        notes: Remarks for the user about the choice.

    Raises:
        FileNotFoundError: The checkpoint is missing.
    """
    path = parse_checkpoint_path(start.checkpoint)
    step = f" of step {start.step}" if start.step is not None else ""
    if not path_exists(path):
        problem = f"the run must start from the checkpoint{step} of {start.run}, which is missing"
        raise FileNotFoundError(errno.ENOENT, problem, str(path))
    rule = f"a person started the run from this checkpoint{step} of {start.run}"
    if start.is_step_back:
        rule = f"a person retried the run from this checkpoint{step}"
    listing = list_checkpoints(str(path.parent), Path.cwd(), is_running=False)
    identity = identify_path(path)
    signatures = [
        one.signature
        for one in listing.checkpoints
        if identity in map(identify_path, (one.path, *one.parts))
    ]
    return ResumePlan(
        path=path,
        rule=rule,
        refused=tuple(refused[:_REFUSED_AT_MOST]),
        notes=tuple(notes),
        step=start.step,
        signature=next(iter(signatures), ""),
    )


def _plan_from(
    spec: RunSpec,
    checkpoint: Checkpoint,
    rule: str,
    refused: Sequence[RefusedCheckpoint],
    notes: Sequence[str],
) -> ResumePlan:
    is_passed = _is_passed(spec)
    if not is_passed:
        notes = (
            *notes,
            "the spec does not use ${attempt.resume_from}, so the trainer itself chooses the "
            "checkpoint from which it starts",
        )
    return ResumePlan(
        path=checkpoint.path,
        rule=rule,
        refused=tuple(refused[:_REFUSED_AT_MOST]),
        notes=tuple(notes),
        step=checkpoint.step,
        signature=checkpoint.signature,
        is_passed=is_passed,
    )


def find_resume_checkpoint(
    spec: RunSpec,
    place: RunPlace,
    attempts: Sequence[AttemptRecord],
    foreign: Mapping[str, str] | None = None,
) -> CheckpointPath | None:
    """Return the checkpoint from which the next attempt should start; see `plan_resume`.

    Return None if there is no such checkpoint.
    """
    return plan_resume(spec, place, attempts, foreign).path


def _is_passed(spec: RunSpec) -> bool:
    """Return True if the spec uses the placeholder `${attempt.resume_from}`."""
    return any(use.name == _RESUME_FROM for use in find_uses(spec.written()))


def _checkpoint_component(spec: RunSpec) -> tuple[str, Component] | None:
    """Return the name and the spec of the component with the key `checkpoints`, or None."""
    for name, component in spec.processes.items():
        if component.checkpoints:
            return name, component
    return None


def _why_incomplete(checkpoint: Checkpoint) -> str:
    return "" if checkpoint.is_complete else checkpoint.reason


def _foreign_checkpoints(
    place: RunPlace, number: int, name: str, foreign: Mapping[str, str]
) -> Callable[[Checkpoint], str]:
    """Return a function that gives the reason why a run must not use a checkpoint.

    The argument of the returned function is the checkpoint. The result is an empty string if the
    run may use the checkpoint.

    Args:
        place: Directory of the run.
        number: Number of the attempt whose folder of checkpoints is listed.
        name: Name of the component that writes checkpoints.
        foreign: Checkpoints that the run must not use, as a mapping from path to signature. See
            `find_foreign_checkpoints`.
    """
    rivals = _rivals_of(place, number, name)
    return lambda checkpoint: (
        _why_foreign(checkpoint, foreign) or why_of_rival(checkpoint, place, rivals)
    )


def _rivals_of(place: RunPlace, number: int, name: str) -> list[Rival]:
    root, written = _folder_of_attempt(place, number, name)
    if not written or _is_own_folder(written, root, place):
        return []
    return find_rivals(identify_folder(written, root), place.run_id)


def describe_rivals(spec: RunSpec, place: RunPlace, number: int) -> list[str]:
    """Return a warning for each other active run that uses the checkpoint folder of this run.

    Args:
        spec: The spec of the run.
        place: Directory of the run.
        number: Number of the current attempt.
    """
    named = _checkpoint_component(spec)
    if named is None:
        return []
    return [
        f"the run {rival.run_id} writes its checkpoints to the same folder, so the two runs may "
        "overwrite each other's checkpoints. Write ${run.id} into the key `checkpoints` of both "
        "specs"
        for rival in _rivals_of(place, number, named[0])
        if rival.is_running
    ]


def _is_own_folder(written: str, root: Path, place: RunPlace) -> bool:
    """Return True if a folder of checkpoints is inside the directory of the run.

    No other run writes to such a folder.
    """
    return _is_in(written, root, place.directory)


def _is_in(written: str, root: Path, parent: Path) -> bool:
    """Return True if a folder of checkpoints is inside another folder, or is that folder."""
    folder = find_local_path(parse_checkpoint_path(written, root))
    return folder is not None and folder.resolve().is_relative_to(parent.resolve())


def list_output_folders(spec: RunSpec, root: Path) -> tuple[str, ...]:
    """Return the folders of a project in which the components of a run save their checkpoints.

    Args:
        spec: The run spec, with or without placeholders.
        root: Root folder of the project.

    Returns:
        Paths relative to the project. A folder outside the project, a URL and a path with
        placeholders are left out. The same holds for a folder with files that the run needs: the
        working directory of a component, and a folder with a file that a command names.
    """
    places = (_find_place_in_project(path, root) for path in _list_used_paths(spec, root))
    used = [place for place in places if place is not None]
    folders = []
    for component in spec.processes.values():
        written = component.checkpoints or ""
        if not written or is_url(written) or has_placeholders(written):
            continue
        path = Path(root, component.cwd or spec.cwd, find_fixed_folder(written))
        folder = _find_place_in_project(path, root)
        if folder is not None and not any(each.is_relative_to(folder) for each in used):
            folders.append(str(folder))
    return tuple(dict.fromkeys(folders))


def _find_place_in_project(path: Path, root: Path) -> Path | None:
    """Return the path of a file or folder relative to a project, or None if it is outside.

    A path may lead into the project through a symbolic link outside the project. Symbolic links
    inside the project are not resolved, because the project contains the links themselves.
    """
    path = Path(os.path.abspath(path))
    real_root = os.path.realpath(root)
    for parent in (*reversed(path.parents), path):
        real_parent = Path(os.path.realpath(parent))
        if real_parent.is_relative_to(real_root):
            return real_parent.relative_to(real_root) / path.relative_to(parent)
    return None


def _list_used_paths(spec: RunSpec, root: Path) -> Iterator[Path]:
    """Yield the paths that the components of a run need in a project.

    These are the root of the project, the working directories of the components, and the existing
    files that are arguments of a command, such as `train.py` or `--config=a.yaml`.
    """
    yield root
    for component in spec.processes.values():
        cwd = Path(root, component.cwd or spec.cwd)
        yield cwd
        for word in component.command:
            for text in {word, word.partition("=")[2]}:
                # An argument may be too long for a path, or contain a null character.
                with suppress(OSError, ValueError):
                    if text and (cwd / text).is_file():
                        yield cwd / text


def _why_foreign(checkpoint: Checkpoint, foreign: Mapping[str, str]) -> str:
    """Return why the run must not use a checkpoint, or an empty string if the run may use it.

    Args:
        checkpoint: The checkpoint.
        foreign: Checkpoints that the run must not use, as a mapping from path to signature. See
            `find_foreign_checkpoints`.
    """
    known = foreign.get(str(checkpoint.path))
    if known is None:
        return ""
    signature, newest_change_ns, set_aside_at = [*known.split(":"), "", ""][:3]
    is_unchanged = signature == checkpoint.signature
    is_partly_old = newest_change_ns.isdecimal() and checkpoint.inode_changes_ns[0] <= int(
        newest_change_ns
    )
    if set_aside_at and (is_unchanged or is_partly_old):
        return (
            f"a person retried the run from step {set_aside_at}, so later checkpoints are not used"
        )
    if is_unchanged:
        return "the checkpoint existed before this run started, so it belongs to another run"
    if is_partly_old:
        return "some files of the checkpoint existed before this run started"
    return ""


def find_foreign_checkpoints(
    spec: RunSpec, resolved: RunSpec, place: RunPlace, number: int
) -> dict[str, str]:
    """Return the checkpoints that the run must not use, as a mapping from path to signature.

    A signature identifies the content of a checkpoint. The signature changes if the checkpoint is
    saved again.

    - Usually, the result contains the checkpoints of other runs in the folder of the attempt.
    - If a person has retried the run from an earlier step, the result contains the run's own
      checkpoints after that step.

    Call this function before the attempt starts. The function also records that the run uses the
    folder; see `claim_folder`. If all attempts share one folder, the result is empty for every
    attempt after the first, because the folder then also contains checkpoints of this run.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        resolved: The spec in which the placeholders are replaced by the values of the attempt.
        place: Directory of the run. All files in this directory belong to the run.
        number: Number of the attempt.

    Raises:
        OSError: The folder of the checkpoints cannot be read, or the use of the folder cannot be
            recorded.
    """
    named = _checkpoint_component(resolved)
    if named is None:
        return {}
    name, component = named
    written = component.checkpoints or ""
    if spec.start_from is not None and spec.start_from.attempt == number:
        return _set_aside_checkpoints(spec, place, number, name, spec.start_from)
    if number > 1 and not _is_per_attempt(spec.processes[name].checkpoints or ""):
        return {}
    root = Path.cwd() / (component.cwd or resolved.cwd)
    if not _is_own_folder(written, root, place):
        claim_folder(identify_folder(written, root), place.run_id)
    elif not _is_in(written, root, place.code):
        return {}
    # The copy of the project may contain checkpoints of other runs, too.
    listing = list_checkpoints(written, root, is_running=True)
    return {str(checkpoint.path): _sign(checkpoint) for checkpoint in listing.checkpoints}


def _set_aside_checkpoints(
    spec: RunSpec, place: RunPlace, number: int, name: str, start: StartFrom
) -> dict[str, str]:
    """Return the checkpoints of a run that must not be used after a retry from an earlier step.

    A person has requested this retry. A checkpoint after the earlier step may be used only if an
    attempt saves the checkpoint again.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        number: Number of the attempt that starts from the earlier step.
        name: Name of the component that writes checkpoints.
        start: The key `start_from` of the spec.

    Returns:
        Mapping from the path of each checkpoint to its signature. The signature changes if the
        checkpoint is saved again.

    Raises:
        OSError: A folder of checkpoints cannot be read.
    """
    earlier = range(1, number)
    is_per_attempt = _is_per_attempt(spec.processes[name].checkpoints or "")
    return {
        str(checkpoint.path): f"{_sign(checkpoint)}:{start.step}"
        for attempt in (earlier if is_per_attempt else earlier[-1:])
        for checkpoint in _checkpoints_of_attempt(place, attempt, name, spec=spec).checkpoints
        if str(checkpoint.path) != start.checkpoint
        if checkpoint.step is None or start.step is None or checkpoint.step > start.step
    }


def _sign(checkpoint: Checkpoint) -> str:
    """Return a text `SIGNATURE:TIME` that identifies the content of a checkpoint.

    TIME is the latest inode change time (ctime) of the checkpoint's files, in nanoseconds since the
    epoch.
    """
    return f"{checkpoint.signature}:{checkpoint.inode_changes_ns[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCheckpoint:
    """A checkpoint of a run, with the reasons to use it, to skip it and to keep it."""

    checkpoint: Checkpoint
    #: Reason why the run must not use the checkpoint, or an empty string. Either another run wrote
    #: the checkpoint, or a person retried the run from a step before the checkpoint.
    why_foreign: str
    #: Reason why no attempt should start from the checkpoint, or an empty string. Either an attempt
    #: could not load the checkpoint, or the checkpoint was saved during an alarm.
    why_unfit: str
    #: Reasons why the checkpoint is kept although the spec key `keep` limits the number of
    #: checkpoints. Empty if the checkpoint may be deleted.
    why_kept: tuple[str, ...] = ()

    @property
    def is_fit(self) -> bool:
        """True if the checkpoint is complete, and an attempt of this run may start from it."""
        return self.checkpoint.is_complete and not (self.why_foreign or self.why_unfit)


def judge_checkpoints(
    spec: RunSpec,
    place: RunPlace,
    attempts: Sequence[AttemptRecord],
    foreign: Mapping[str, str] | None = None,
    *,
    is_running: bool = True,
) -> list[JudgedCheckpoint]:
    """Return all checkpoints in the folders of a run, oldest first, with the reasons to keep them.

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        attempts: All attempts of the run.
        foreign: Checkpoints that the run must not use, as a mapping from path to signature. See
            `find_foreign_checkpoints`.
        is_running: True if the trainer may still be writing checkpoints.

    Raises:
        OSError: A file cannot be read: the folder of the checkpoints, the list of checkpoints from
            which another run was started, or the record of the evaluations.
        ValueError: The list or the record is not valid.
    """
    named = _checkpoint_component(spec)
    if named is None:
        return []
    name, component = named
    why_unfit = _unfit_checkpoints(spec, attempts)
    judged: list[JudgedCheckpoint] = []
    for number in _attempts_with_folders(component.checkpoints or "", attempts):
        why_foreign = _foreign_checkpoints(place, number, name, foreign or {})
        judged += [
            JudgedCheckpoint(
                checkpoint=checkpoint,
                why_foreign=why_foreign(checkpoint),
                why_unfit=why_unfit(checkpoint) if checkpoint.is_complete else "",
            )
            for checkpoint in _checkpoints_of_attempt(
                place, number, name, is_running=is_running, spec=spec
            ).checkpoints
        ]
    newest_first = [one.checkpoint.path for one in reversed(judged) if one.is_fit]
    in_use = {
        identify_path(parse_checkpoint_path(attempt.checkpoint or "")) for attempt in attempts[-1:]
    }
    linked = {
        identify_path(entry)
        for folder in {one.checkpoint.path.parent for one in judged}
        for entry in folder.iterdir()
        if entry.is_symlink()
    }
    pinned = read_pinned_paths()
    why_evaluated = _evaluated_checkpoints(spec, place)

    def list_reasons(one: JudgedCheckpoint) -> Iterator[str]:
        checkpoint = one.checkpoint
        paths = {identify_path(path) for path in (checkpoint.path, *checkpoint.parts)}
        if component.keep is None:
            yield "the spec has no `keep`"
        if not checkpoint.is_complete:
            yield "the checkpoint is not known to be complete"
        if one.why_foreign:
            yield "this run did not save the checkpoint"
        if one.why_unfit:
            yield "no attempt starts from the checkpoint"
        if one.is_fit:
            position = newest_first.index(checkpoint.path)
            if position < _NEVER_REMOVED:
                yield ("the newest complete checkpoint", "the second newest complete checkpoint")[
                    position
                ]
            elif component.keep is not None and position < component.keep:
                yield f"keep: {component.keep}"
        if paths & in_use:
            yield "the last attempt started from the checkpoint"
        if paths & pinned:
            yield "another run was started from the checkpoint"
        if paths & linked:
            yield "a symbolic link in the folder points to the checkpoint"
        yield from why_evaluated(str(checkpoint.path))

    return [replace(one, why_kept=tuple(list_reasons(one))) for one in judged]


def _evaluated_checkpoints(spec: RunSpec, place: RunPlace) -> Callable[[str], list[str]]:
    """Return a function that says why a checkpoint must be kept for evaluations.

    The argument of the returned function is the path of a checkpoint. The result is a list of
    reasons, or an empty list if no evaluation needs the checkpoint.

    Raises:
        OSError, ValueError: The record of the evaluations cannot be read, so it is unknown which
            checkpoints are needed.
    """
    if not spec.evals or not place.evaluations.exists():
        # The run has no evaluations, or no evaluation has started yet.
        return lambda path: []
    content = EvaluationsJson.read(place)
    evaluated = read_evaluated_checkpoints(place, content)
    reasons: dict[str, list[str]] = {one.path: [] for one in content.checkpoints}
    for path, why in list_reasons_to_keep(spec.evals, spec.keep_best, content, evaluated):
        reasons[path].append(why)
    undecided = ["Muster has not decided yet which evaluations this checkpoint needs"]
    return lambda path: reasons.get(path, undecided)


def find_superfluous_checkpoints(
    spec: RunSpec,
    place: RunPlace,
    attempts: Sequence[AttemptRecord],
    foreign: Mapping[str, str] | None = None,
) -> list[CheckpointPath]:
    """Return the paths of the checkpoints that may be deleted, oldest first.

    The spec key `keep` says how many complete checkpoints are kept. The result never contains:

    - the two newest complete checkpoints
    - checkpoints of other runs, and checkpoints that may be incomplete
    - the checkpoint from which the current attempt started
    - checkpoints from which another run was started
    - checkpoints that an attempt could not load
    - targets of symbolic links in the same folder
    - the best checkpoint according to the spec key `keep_best`
    - checkpoints that an evaluation uses or will use

    Args:
        spec: The spec of the run, in which placeholders are not replaced yet.
        place: Directory of the run.
        attempts: All attempts of the run.
        foreign: Checkpoints that the run must not use, as a mapping from path to signature. See
            `find_foreign_checkpoints`.

    Raises:
        OSError: A file cannot be read: the folder of the checkpoints, the list of checkpoints from
            which another run was started, or the record of the evaluations.
        ValueError: The list or the record is not valid.
    """
    named = _checkpoint_component(spec)
    if named is None or named[1].keep is None:
        return []
    return [
        part
        for one in judge_checkpoints(spec, place, attempts, foreign)
        if not one.why_kept
        for part in one.checkpoint.parts
        if not part.is_symlink()
    ]


def remove_checkpoint(path: CheckpointPath) -> None:
    """Delete a checkpoint in such a way that no program can load a partly deleted checkpoint.

    If a person starts another run from the checkpoint at the same moment, the checkpoint is kept.

    Raises:
        OSError: The checkpoint cannot be deleted.
        ValueError: The list of the checkpoints from which another run was started is not valid.
    """
    identity = identify_path(path)
    remove_path(path, lambda: identity in read_pinned_paths())


def read_attempt_spec(place: RunPlace, number: int) -> Mapping[str, Any]:
    """Return the spec that an attempt stored in its directory, as plain data.

    The placeholders in the spec are replaced, and each `cwd` is an absolute path. If the file
    cannot be read, the result is empty.
    """
    with suppress(OSError, yaml.YAMLError):
        return mapping_or_empty(
            yaml.safe_load(place.attempt(number).spec.read_text(encoding="utf-8"))
        )
    return {}


def find_latest_checkpoint(written: str, root: Path) -> CheckpointPath | None:
    """Return the newest complete checkpoint, or None if there is none yet.

    Args:
        written: Folder of the checkpoints, or a pattern (`*`, `?`, `[...]`) that matches them.
        root: Directory from which a relative path starts.

    Returns:
        The absolute path or the URL of the checkpoint.

    Raises:
        OSError: The folder cannot be read.
    """
    complete = list_checkpoints(written, root, is_running=False).complete
    return complete[-1].path if complete else None


def find_newest_step(
    written: str, root: Path, foreign: Mapping[str, str]
) -> tuple[int | None, float] | None:
    """Return the step of the newest complete checkpoint, or None if there is no such checkpoint.

    Args:
        written: Folder of the checkpoints.
        root: Directory from which a relative path starts.
        foreign: Mapping from the path of each checkpoint of another run to its signature, as
            returned by `find_foreign_checkpoints`.

    Returns:
        The training step, and the time of the checkpoint's last change in UTC epoch seconds. The
        step is None if it is unknown.

    Raises:
        OSError: The folder cannot be read.
    """
    complete = [
        checkpoint
        for checkpoint in list_checkpoints(written, root, is_running=False).complete
        if not _why_foreign(checkpoint, foreign)
    ]
    return (complete[-1].step, complete[-1].changed_at) if complete else None


def is_writing_checkpoint(written: str, root: Path) -> bool:
    """Return True if a trainer is writing a checkpoint to a folder at the moment.

    Args:
        written: Folder of the checkpoints.
        root: Directory from which a relative path starts.
    """
    changed_after = time.time() - _GROWS_WITHIN_S
    with suppress(OSError):
        return any(
            stat.st_mtime > changed_after
            for _, stat in _list_unfinished_files(written, root, with_unknown_files=False)
        )
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileState:
    """State of a file of an unfinished checkpoint at the time of the last check."""

    #: Size in bytes.
    size: int
    #: Time of the last change in UTC epoch seconds.
    changed_at: float
    #: Number of blocks of 512 bytes that the file occupies on the disk.
    disk_blocks: int


class CheckpointGrowth:
    """Finds the time at which a trainer last wrote to a checkpoint.

    Each call of `seconds_since_growth` compares the files with their state at the previous call.
    The previous call may be hours ago.
    """

    def __init__(self, written: str, root: Path, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            written: Path or URL of the folder of the checkpoints, as written in the run spec.
            root: Directory from which a relative path in `written` starts.
            clock: Function that returns the current time in UTC epoch seconds.
        """
        self._written = written
        self._root = root
        self._clock = clock
        #: State of each file when the files were last listed. Empty before the first listing.
        self._states: dict[CheckpointPath, _FileState] = {}
        #: Time at which the files were last listed. Minus infinity before the first listing.
        self._read_at = -math.inf

    def seconds_since_growth(self) -> float | None:
        """Return how many seconds ago a file of an unfinished checkpoint last changed.

        Only changes since the previous call of this method count. At the first call, each existing
        file counts as changed.

        Returns:
            None if no file has changed, or if the files cannot be listed.
        """
        now = self._clock()
        states = self._read()
        if states is None:
            return None
        changed_at = [
            state.changed_at for path, state in states.items() if self._states.get(path) != state
        ]
        last_read_at = self._read_at
        self._states = states
        self._read_at = now
        if not changed_at:
            return None
        # A file has changed between the last call of this method and now. If the time of the change
        # is not in this period, the clock of a file server is wrong. So use the nearest time in the
        # period.
        return now - min(max(*changed_at, last_read_at), now)

    def _read(self) -> dict[CheckpointPath, _FileState] | None:
        """Return the state of each file that may belong to an unfinished checkpoint.

        Returns:
            Mapping from the path of a file to its state, or None if the files cannot be listed.
        """
        with suppress(OSError):
            return {
                path: _FileState(
                    size=stat.st_size,
                    changed_at=stat.st_mtime_ns / 1e9,
                    disk_blocks=stat.st_blocks,
                )
                for path, stat in _list_unfinished_files(
                    self._written, self._root, with_unknown_files=True
                )
            }
        return None


def _list_unfinished_files(
    written: str, root: Path, *, with_unknown_files: bool
) -> Iterator[tuple[CheckpointPath, os.stat_result | StoreStat]]:
    """Yield the path and the status of each file that may belong to an unfinished checkpoint.

    These are temporary files, and the files of checkpoints that may be incomplete.

    Args:
        written: Folder of the checkpoints.
        root: Directory from which a relative path starts.
        with_unknown_files: True to include two kinds of checkpoints that are probably complete: a
            single file of an unknown format, and a folder that was renamed after its last change.
    """
    folder = parse_checkpoint_path(written, root)
    listing = list_checkpoints(written, root, is_running=True)
    complete = {path for checkpoint in listing.complete for path in checkpoint.parts}
    newest = max((one.order for one in listing.checkpoints if one.is_complete), default=None)
    unfinished = [
        part
        for checkpoint in listing.checkpoints
        if not checkpoint.is_complete and (newest is None or checkpoint.order > newest)
        if with_unknown_files
        or checkpoint.path.is_dir()
        or checkpoint.completeness is Completeness.INCOMPLETE
        for part in checkpoint.parts
        if with_unknown_files or not _was_renamed_when_finished(part)
    ]
    if folder.is_dir():
        unfinished += [
            entry
            for entry in folder.iterdir()
            if is_partial_name(entry.name)
            and not entry.name.endswith(REMOVAL_SUFFIX)
            and entry not in complete
        ]
    for entry in unfinished:
        for path in (entry, *(entry.rglob("*") if entry.is_dir() else ())):
            with suppress(FileNotFoundError):
                yield path, path.stat()


def _was_renamed_when_finished(path: CheckpointPath) -> bool:
    """Return True if a folder was renamed after the last change of its content.

    Many trainers write a checkpoint under a temporary name, and rename the folder when the
    checkpoint is complete. A rename changes the folder's ctime (time of its last status change),
    but not its mtime (time of the last change of its list of files).
    """
    if not isinstance(path, Path) or not path.is_dir():
        return False
    with suppress(FileNotFoundError):
        status = path.stat()
        if status.st_ctime_ns <= status.st_mtime_ns:
            return False
        inner = (inner_path.lstat() for inner_path in path.rglob("*"))
        return all(max(file.st_mtime_ns, file.st_ctime_ns) <= status.st_ctime_ns for file in inner)
    return False


def find_stage_checkpoint(
    checkpoint: str | None, spec: RunSpec, place: RunPlace
) -> CheckpointPath | None:
    """Return the checkpoint that a completed stage of a pipeline passes to the next stage.

    Args:
        checkpoint: Value of the stage's key `checkpoint`: a path or a pattern. If None, use the
            checkpoint from which the run would resume.
        spec: The spec of the stage's run, in which placeholders are not replaced yet.
        place: Directory of the stage's run.

    Returns:
        The absolute path or the URL, or None if there is no complete checkpoint.

    Raises:
        OSError: The folder of the checkpoints cannot be read.
    """
    attempts, foreign = _read_attempts(place)
    if checkpoint is None:
        return find_resume_checkpoint(spec, place, attempts, foreign)
    values = _values_of_attempt(place, len(attempts))
    root = Path(read_attempt_spec(place, len(attempts)).get("cwd") or spec.cwd)
    return find_latest_checkpoint(substitute(checkpoint, values.__getitem__), root)


def describe_stage_unrecognised(checkpoint: str | None, spec: RunSpec, place: RunPlace) -> str:
    """Return a text about files of a pipeline stage that may be checkpoints.

    See `describe_unrecognised`. The text is empty if the stage has the key `checkpoint`, or if the
    folder of the checkpoints cannot be read.
    """
    if checkpoint is not None:
        return ""
    with suppress(OSError):
        return describe_unrecognised(spec, place, _read_attempts(place)[0])
    return ""


def _read_attempts(place: RunPlace) -> tuple[tuple[AttemptRecord, ...], Mapping[str, str]]:
    """Return the attempts of a run, and the signatures of the checkpoints of other runs.

    Both are empty if the record of the run cannot be read.
    """
    with suppress(OSError, ValueError):
        record = RunJson.read(place.record)
        return record.attempts, record.foreign_checkpoints
    return (), {}


#: Beginning of the text that says why a checkpoint from the time of an alarm is not used. An alarm
#: is raised if a training metric breaks a rule in the run spec.
_ALARMED = "the checkpoint was saved during or after the alarm"


def _is_alarmed(why: str) -> bool:
    return why.startswith(_ALARMED)


def _unfit_checkpoints(
    spec: RunSpec, attempts: Sequence[AttemptRecord]
) -> Callable[[Checkpoint], str]:
    """Return a function that checks whether an attempt may start from a given checkpoint.

    The argument of the returned function is a complete checkpoint. The result is the reason why no
    attempt should start from this checkpoint, or an empty string. There are two possible reasons:

    - An attempt could not load the checkpoint.
    - The checkpoint was saved during an alarm that ended an attempt.

    If the checkpoint was saved again later, an attempt may start from it.
    """
    given_up = find_given_up(spec, attempts)
    best_later_steps: dict[int, float] = {}
    #: Alarms that ended an attempt. Each entry contains the training step at which the alarm's
    #: condition became true, and the attempt.
    alarms: list[tuple[float, AttemptRecord]] = []
    best_step = float("-inf")
    for attempt in reversed(attempts):
        best_later_steps[attempt.number] = best_step
        if attempt.failure and attempt.failure.kind is FailureKind.ALARM and attempt.alarms:
            since_by_rule = {f"watch-{alarm.rule}": alarm.since for alarm in attempt.alarms}
            since = since_by_rule.get(attempt.failure.rule, attempt.alarms[-1].since)
            alarms.append((since, attempt))
        if attempt.highest_step is not None:
            best_step = max(best_step, attempt.highest_step)

    def why_unfit(checkpoint: Checkpoint) -> str:
        entry = match_given_up(given_up, checkpoint.path, checkpoint.signature, best_later_steps)
        if entry is not None:
            return entry.why
        for since, attempt in alarms:
            if (checkpoint.step or 0) < since:
                continue
            was_saved_before = since > best_later_steps[attempt.number]
            if attempt.ended_at is not None:
                was_saved_before = checkpoint.changed_at <= attempt.ended_at
            if was_saved_before:
                return f"{_ALARMED} that ended attempt {attempt.number}"
        return ""

    return why_unfit


def _attempts_with_folders(written: str, attempts: Sequence[AttemptRecord]) -> range:
    """Return the numbers of the attempts whose checkpoint folders must be searched.

    If all attempts share one folder, the result contains only the number of the last attempt.

    Args:
        written: Value of the spec key `checkpoints`, in which placeholders are not replaced.
        attempts: All attempts of the run.
    """
    numbers = range(1, len(attempts) + 1)
    return numbers if _is_per_attempt(written) else numbers[-1:]


def _is_per_attempt(written: str) -> bool:
    """Return True if each attempt writes its checkpoints to a folder of its own.

    This is the case if `written`, the value of the spec key `checkpoints`, contains a placeholder
    such as `${attempt.dir}`.
    """
    return any((name or "").startswith("attempt.") for name in find_names(written))


def _checkpoints_of_attempt(
    place: RunPlace,
    number: int,
    component_name: str,
    *,
    is_running: bool = False,
    spec: RunSpec | None = None,
) -> Listing:
    """Return the checkpoints in the folder of an attempt.

    Args:
        place: Directory of the run.
        number: Number of the attempt.
        component_name: Name of the component that writes checkpoints.
        is_running: True if the trainer may still be writing checkpoints.
        spec: The spec of the run; see `_folder_of_attempt`.

    Raises:
        OSError: The folder cannot be read.
    """
    root, written = _folder_of_attempt(place, number, component_name, spec)
    return list_checkpoints(written, root, is_running=is_running) if written else Listing()


def _folder_of_attempt(
    place: RunPlace, number: int, component_name: str, spec: RunSpec | None = None
) -> tuple[Path, str]:
    """Return the folder in which an attempt stores its checkpoints.

    Args:
        place: Directory of the run.
        number: Number of the attempt.
        component_name: Name of the component that writes checkpoints.
        spec: The spec of the run, in which placeholders are not replaced yet. Used if this
            host has no spec file of the attempt, because the attempt ran on another host.

    Returns:
        - The directory from which a relative path starts.
        - The value of the key `checkpoints`, or an empty string if the spec of the attempt cannot
          be read.
    """
    attempt_spec = read_attempt_spec(place, number)
    if not attempt_spec and spec is not None:
        values = _values_of_attempt(place, number)
        component = spec.processes[component_name]
        folder = component.checkpoints or ""
        if set(find_names(folder)) <= values.keys():
            root = Path.cwd() / (component.cwd or spec.cwd)
            return root, substitute(folder, values.__getitem__)
    written = mapping_or_empty(mapping_or_empty(attempt_spec.get("components")).get(component_name))
    # Earlier versions of Muster stored a relative `cwd` or no `cwd`. A relative path starts at the
    # working directory of this process.
    root = Path.cwd() / (written.get("cwd") or attempt_spec.get("cwd") or ".")
    return root, str(written.get("checkpoints") or "")


def _values_of_attempt(place: RunPlace, number: int) -> dict[str, str]:
    """Return a mapping from the names of placeholders, such as `run.dir`, to their values.

    The placeholders are those that may occur in the paths of an attempt.
    """
    return {
        "run.id": place.run_id,
        "run.dir": str(place.directory),
        "attempt.number": str(number),
        "attempt.dir": str(place.attempt(number).directory),
    }
