"""Find the paths to which a Python script saves its checkpoints, and from which it loads them.

`muster init` uses this module. The module reads the source of the script, and does not run it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
#: Matches the names of functions that load a checkpoint, such as `torch.load`.
_LOAD = re.compile(r"load|load_(?:checkpoint|ckpt|state|file|from_checkpoint|training_state)")
#: Matches functions with a name such as `load` that load no checkpoint, such as `json.load`.
_OTHER_LOAD = re.compile(r"(?:json|yaml|toml|tomllib|OmegaConf|pickle|spacy)\.load")
#: Names of arguments with the checkpoint from which a training resumes.
_RESUME_ARGUMENTS = ("ckpt_path", "resume_from_checkpoint")


def find_subfolder(reader: PathReader, option: str) -> str:
    """Return the subfolder, or the folder beside an output folder, with a script's checkpoints.

    Args:
        reader: Reader of the script, and of the project's modules that the script imports.
        option: Attribute of the parsed options that contains the path of the output folder, such as
            `out` for `args.out`.

    Returns:
        Text after the output folder in the path of the checkpoints' folder, such as `/checkpoints`
        for a subfolder, or `-x` for `f"{args.out}-x"`. Empty if the script saves its checkpoints
        directly in the output folder, or if the folder is not clear.
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
    return folders.pop() if len(folders) == 1 else ""


def find_saving_option(reader: PathReader) -> str:
    """Return the option or setting for the folder in which a Python script saves its checkpoints.

    Args:
        reader: Reader of the script, and of the project's modules that the script imports.

    Returns:
        Attribute of the option, such as `out` for `args.out`, key of a setting or name of an
        environment variable. Empty if the script saves checkpoints in several folders, or if
        the path of the folder does not begin with the value of an option or setting.
    """
    # A path such as `f"{args.out}.pt"` is no path in the folder `args.out`.
    options = {path.option if path.parts else "" for path in _list_saved_paths(reader)}
    return options.pop() if len(options) == 1 else ""


def find_constant_folder(reader: PathReader) -> str:
    """Return the folder in which a Python script saves its checkpoints, if no option changes it.

    Args:
        reader: Reader of the script, and of the project's modules that the script imports.

    Returns:
        Path of the folder. Empty if the script saves in its working directory, in several folders,
        or in a folder that is not clear.
    """
    folders = {
        # A folder whose whole name is unknown may be the folder of a run, such as `runs/DATE`.
        None if path.option or "?" in path.parts[:-1] else path.fixed_parts[: len(path.parts) - 1]
        for path in _list_saved_paths(reader)
    }
    return "/".join(folders.pop() or ()) if len(folders) == 1 else ""


def find_loading_options(reader: PathReader) -> frozenset[str]:
    """Return the options with the path of a checkpoint that a Python script loads.

    Args:
        reader: Reader of the script, and of the project's modules that the script imports.

    Returns:
        Attributes of the options, such as `ckpt` for `args.ckpt`. An option with a folder is left
        out, if the script itself adds the name of the checkpoint.
    """
    loaded = set()
    for call, scope in reader.expressions:
        if not isinstance(call, ast.Call):
            continue
        arguments = [each.value for each in call.keywords if each.arg in _RESUME_ARGUMENTS]
        is_load = _LOAD.fullmatch(get_called_name(call)) is not None
        if is_load and not _OTHER_LOAD.fullmatch(ast.unparse(call.func)):
            arguments += call.args[:1]
        paths = (reader.read(argument, scope) for argument in arguments)
        loaded |= {
            path.option for path in paths if path.option and not path.suffix and not path.parts
        }
    return frozenset(loaded)


def _list_saved_paths(reader: PathReader) -> Iterator[ScriptPath]:
    """Yield the paths of the checkpoints that a Python script saves.

    If a path contains the step, such as `step-?.pt`, paths without the step are left out, because
    they may be paths of exported models. If the script passes a folder to a library, the path of
    this folder is yielded with `?` at its end.
    """
    paths = []
    for call, scope in reader.expressions:
        if not isinstance(call, ast.Call):
            continue
        name = get_called_name(call)
        for keyword in call.keywords:
            if _is_library_folder(reader, name, keyword.arg or ""):
                path = reader.read(keyword.value, scope)
                paths.append(replace(path, parts=(*path.parts, "?")))
        if _SAVE.fullmatch(name):
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            saved = [reader.read(argument, scope) for argument in arguments]
            paths += [
                path
                for path in saved
                if (path.suffix or path.parts)
                and not _OTHER_FILE.search((path.suffix, *path.parts)[-1])
            ]
    # Leave out arguments that are no paths, such as `state` in `torch.save(state, path)`.
    paths = [path for path in paths if path.option or path.parts != ("?",)]
    of_steps = [path for path in paths if not all(map(is_fixed, path.parts))]
    yield from of_steps or paths


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathCall:
    """A call with a path in the output folder."""

    call: ast.Call
    path: ScriptPath
    #: Name of the argument that contains the path. Empty if the argument is positional, or if the
    #: called function is a method of the path, such as `path.open()`.
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


def _list_paths(reader: PathReader, option: str) -> Iterator[ScriptPath]:
    """Yield each path that the script builds in the output folder."""
    for expression, scope in reader.expressions:
        if isinstance(expression, ast.Call | ast.BinOp | ast.JoinedStr):
            path = reader.read(expression, scope)
            if path.option == option:
                yield path


def _split_at_folder(path: ScriptPath) -> list[str]:
    """Split a path at the part that is the folder of the checkpoints.

    The first item of the result is the path up to this folder, as `_join` returns it. The other
    items are the parts of the path after this folder. The first item is "" if no part has the name
    of such a folder.
    """
    for index, part in enumerate(path.fixed_parts, start=1):
        if _FOLDER.fullmatch(part):
            return [_join(path, path.parts[:index]), *path.parts[index:]]
    return [""]


def _join(path: ScriptPath, parts: Sequence[str]) -> str:
    """Return the first parts of a path as the text that follows the value of its option."""
    return "".join((path.suffix, *(f"/{part}" for part in parts)))


def _find_saved_folders(calls: Sequence[_PathCall]) -> Iterator[str]:
    """Yield the folders in which functions such as `torch.save` save checkpoints.

    Only files with an unknown value in their names count, such as `step-?.pt`. A file with a fixed
    name may be an exported model.
    """
    for call in calls:
        path = call.path
        is_checkpoint = path.fixed_parts != path.parts and not _OTHER_FILE.search(path.parts[-1])
        if is_checkpoint and _SAVE.fullmatch(get_called_name(call.call)):
            yield _join(path, path.fixed_parts)


def _find_library_folders(reader: PathReader, calls: Sequence[_PathCall]) -> Iterator[str]:
    """Yield the folders in which classes of libraries such as `TrainingArguments` save checkpoints.

    Example: the folder of `TrainingArguments(output_dir=args.out)` is the output folder itself.
    """
    for call in calls:
        is_folder = _is_library_folder(reader, get_called_name(call.call), call.argument)
        if is_folder and call.path.fixed_parts == call.path.parts:
            yield _join(call.path, call.path.parts)


def _is_library_folder(reader: PathReader, called: str, argument: str) -> bool:
    """Return True if an argument is the folder in which a class of a library saves checkpoints.

    Args:
        reader: Reader of the script.
        called: Name of the called function or class, such as `TrainingArguments`.
        argument: Name of the argument, such as `output_dir`.
    """
    is_folder = argument == "dirpath" or find_purpose(argument) is Purpose.CHECKPOINTS
    return (
        is_folder
        and _LIBRARY_CLASS.fullmatch(called) is not None
        and (called not in reader.classes)
    )
