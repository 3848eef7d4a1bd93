"""Read from the source of a Python script in which subfolder the script saves its checkpoints.

`muster init` uses this module for a script that has an option for its output folder, and saves its
checkpoints in a subfolder of that folder. The script is not run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.spec.script_options import Purpose, find_purpose
from tasks.spec.script_paths import PathReader, ScriptPath, get_called_name, is_fixed

#: Matches the names of folders that contain several checkpoints.
_FOLDER_OF_SEVERAL = re.compile(
    r"(?i)(?:(?:model|train|training|saved?)[_-])?(?:checkpoint|ckpt|chkpt|snapshot)s"
)
#: Matches the names of folders that contain several checkpoints, or that are one checkpoint.
_FOLDER = re.compile(rf"{_FOLDER_OF_SEVERAL.pattern}?")
#: Matches the names of functions that save a checkpoint, such as `torch.save`.
_SAVE = re.compile(r"save(?!fig|txt|_?(?:image|img|plot|config|args|metrics|samples))\w*")
#: Matches the names of files that are no checkpoints.
_OTHER_FILE = re.compile(
    r"(?i)\.(?:png|jpe?g|svg|pdf|gif|mp4|wav|jsonl?|csv|txt|log|html|ya?ml|parquet)$"
)
#: Matches the names of classes of libraries that save checkpoints directly in a given folder.
_LIBRARY_CLASS = re.compile(r"\w*TrainingArguments|[A-Z]{3,5}Config|RewardConfig|ModelCheckpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """A subfolder of a script's output folder that contains the checkpoints of the script."""

    #: Path of the subfolder, relative to the output folder, such as `checkpoints`.
    subfolder: str
    #: True if the script removes the output folder, or fails if the output folder exists. Such a
    #: script must not get a folder that contains files of Muster.
    owns_output_folder: bool


def find_checkpoint_folder(reader: PathReader, option: str) -> CheckpointFolder | None:
    """Return the subfolder of an output folder in which a Python script saves its checkpoints.

    Args:
        reader: Reader of the script, and of the project's modules that the script imports.
        option: Attribute with the output folder in the parsed options of the script, such as `out`
            for `args.out`.

    Returns:
        None if the script saves its checkpoints directly in the output folder, or if the subfolder
        is not clear.
    """
    calls = [*_list_calls(reader, option)]
    of_libraries = set(_find_library_folders(reader, calls))
    saved = set(_find_saved_folders(calls))
    named: set[str] = set()
    mentioned: set[str] = set()
    for path in _list_paths(reader, option):
        folder, *inside = _split_at_folder(path)
        if folder and not all(map(is_fixed, inside)):
            named.add(folder)
        elif folder and _FOLDER_OF_SEVERAL.fullmatch(folder.rpartition("/")[2]):
            mentioned.add(folder)

    # The most reliable facts come first. The text "" stands for the output folder itself.
    groups = (of_libraries, named & saved, named, saved | mentioned)
    folders = next(filter(None, groups), {""})
    subfolder = folders.pop() if len(folders) == 1 else ""
    if not subfolder:
        return None
    return CheckpointFolder(
        subfolder=subfolder, owns_output_folder=_owns_output_folder(reader, calls)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathCall:
    """A call with a path in the output folder."""

    call: ast.Call
    path: ScriptPath
    #: Name of the argument with the path. Empty if the call gives the argument by its position, or
    #: if the call is that of a method of the path.
    argument: str


def _list_calls(reader: PathReader, option: str) -> Iterator[_PathCall]:
    for call, scope in reader.expressions:
        if not isinstance(call, ast.Call):
            continue
        arguments = [("", argument) for argument in call.args]
        arguments += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
        if isinstance(call.func, ast.Attribute):
            arguments.append(("", call.func.value))
        for name, argument in arguments:
            path = reader.read(argument, scope)
            if path.option == option:
                yield _PathCall(call=call, path=path, argument=name)


def _owns_output_folder(reader: PathReader, calls: Sequence[_PathCall]) -> bool:
    """Return True if a call removes the output folder, or fails if the output folder exists.

    A call in `if not os.path.exists(args.out):` does not fail.
    """
    own_calls = [call.call for call in calls if not call.path.parts]
    tests = {
        expression.operand
        for expression, _ in reader.expressions
        if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not)
    }
    is_tested = any(
        get_called_name(call) in ("exists", "isdir", "is_dir") and call in tests
        for call in own_calls
    )
    for call in own_calls:
        name = get_called_name(call)
        allows_existing = any(keyword.arg == "exist_ok" for keyword in call.keywords)
        is_refused = name in ("mkdir", "makedirs") and not allows_existing and not is_tested
        if name == "rmtree" or is_refused:
            return True
    return False


def _list_paths(reader: PathReader, option: str) -> Iterator[ScriptPath]:
    """Yield the paths in the output folder that the script builds."""
    for expression, scope in reader.expressions:
        if isinstance(expression, ast.Call | ast.BinOp | ast.JoinedStr):
            path = reader.read(expression, scope)
            if path.option == option:
                yield path


def _split_at_folder(path: ScriptPath) -> list[str]:
    """Return the folder of the checkpoints in a path, and the parts of the path in this folder.

    The first item is "" if no part of the path has the name of such a folder.
    """
    for index, part in enumerate(path.fixed_parts, start=1):
        if _FOLDER.fullmatch(part):
            return ["/".join(path.parts[:index]), *path.parts[index:]]
    return [""]


def _find_saved_folders(calls: Sequence[_PathCall]) -> Iterator[str]:
    """Yield the folders in which functions such as `torch.save` save checkpoints.

    Only names with an unknown value count, such as `step-?.pt`, because a name without a value may
    be that of an exported model.
    """
    for call in calls:
        path = call.path
        is_checkpoint = path.fixed_parts != path.parts and not _OTHER_FILE.search(path.parts[-1])
        if is_checkpoint and _SAVE.fullmatch(get_called_name(call.call)):
            yield "/".join(path.fixed_parts)


def _find_library_folders(reader: PathReader, calls: Sequence[_PathCall]) -> Iterator[str]:
    """Yield the folders in which classes of libraries such as `TrainingArguments` save checkpoints.

    Example: the folder of `TrainingArguments(output_dir=args.out)` is the output folder itself.
    """
    for call in calls:
        name = get_called_name(call.call)
        is_folder = call.argument == "dirpath" or (
            find_purpose(call.argument) is Purpose.CHECKPOINTS
        )
        is_library = _LIBRARY_CLASS.fullmatch(name) is not None and name not in reader.classes
        if is_folder and is_library and call.path.fixed_parts == call.path.parts:
            yield "/".join(call.path.parts)
