"""Find the paths to which a training saves its files, in the training's configuration file.

`muster init` uses this module for a script that reads a folder from a file in YAML, JSON or TOML,
and not from its command line. Example: the script has the option `--config` with the default
`configs/tiny.yaml`, and this file has the key `output_dir`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tasks.spec.script_options import Purpose, ScriptOption, find_purpose

#: Suffixes of configuration files that are read.
_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
#: Largest size in bytes of a configuration file that is read.
_MAX_BYTES = 1 << 20
#: Number of levels of nested mappings that are searched in a configuration file.
_MAX_LEVELS = 3
#: Matches keys for the folder in which a training saves files, such as `output_dir`.
_SAVE_KEYS = re.compile(
    r"(?:(?:model|train|training|ckpts?|checkpoints?)_)?(?:out|output|save)_?"
    r"(?:(?:model|ckpts?|checkpoints?)_?)?(?:dir|directory|path|folder)"
)
#: Matches keys for the folder of the checkpoints, such as `ckpt_dir`. The key `ckpt_path` does not
#: match, because it usually names a checkpoint that the training loads.
_CHECKPOINT_KEYS = re.compile(
    r"ckpts?_?(?:dir|directory|folder)|checkpoints?_?(?:dir|directory|path|folder)"
    r"|default_(?:root|local)_dir"
)
#: Matches the names of mappings that do not configure how the training saves checkpoints, such as
#: `model` or `eval`. In such a mapping, the key `checkpoint_path` names a checkpoint to load. Only
#: whole words of a name match, so `refine` does not match because of `ref`.
_OTHER_MAPPINGS = re.compile(
    r"(?:^|[._-])(?:base|critic|data(?:set|sets|loader)?|eval(?:uation|uator)?|init(?:ial)?"
    r"|load(?:er|ing)?|log(?:s|ger|gers|ging)?|models?|pretrain(?:ed|ing)?|ref(?:erence)?"
    r"|restore|resume|rewards?|teacher|tests?|testing|token(?:s|izer|izers)?)(?=$|[._-])"
)
#: Matches the places in a name at which a word begins with a capital letter, such as in `refModel`.
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: Matches keys for folders of logs and experiments. A script may save its checkpoints in such a
#: folder, or in a subfolder.
_VAGUE_KEYS = re.compile(r"(?:log|logging|work|run|exp|experiment)_?dir")
#: Matches characters that only occur in patterns and in placeholders, such as `${now}`.
_VARIABLE_CHARACTERS = re.compile(r"[*?\[\]${}~%<>\n]")
#: Matches names of files. A path with such a name is no folder.
_FILE_NAME = re.compile(
    r"\.(?:pth?|ckpt|bin|safetensors|npz?|pkl|pickle|h5|ya?ml|json|jsonl|toml|txt|csv|tar|gz)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPath:
    """A path that a script reads from a configuration file."""

    #: Path of the configuration file, as the script names it.
    file: str
    #: Dotted name of the key in the configuration file, such as `train.output_dir`.
    key: str
    #: Value of the key: the path, as the configuration file names it.
    path: str
    #: True if the key shows that the script uses this path unchanged. False if the path contains a
    #: placeholder, or if the key is vague, such as `log_dir` or `eval.output_dir`.
    is_fixed: bool


def find_config_path(
    options: Iterable[ScriptOption], folders: Iterable[Path], purpose: Purpose
) -> ConfigPath | None:
    """Return a path that a script reads from a configuration file, or None.

    The configuration file is the default value of an option, such as `--config`.

    Args:
        options: The options of the script.
        folders: Folders in which the configuration file is searched if its path is relative. The
            first folder that contains the file is used.
        purpose: Purpose of the path: the folder of the checkpoints or the metrics file.
    """
    folders = [*folders]
    for option in options:
        if not option.default_text.endswith(_SUFFIXES):
            continue
        file = next((f for f in (at / option.default_text for at in folders) if f.is_file()), None)
        if file is None:
            continue
        paths = [*_list_paths(_read_config(file), option.default_text, purpose)]
        if paths:
            # Prefer a path that is certain, and a key that is not nested.
            return min(paths, key=lambda path: (not path.is_fixed, path.key.count(".")))
    return None


def _read_config(file: Path) -> object:
    """Return the content of a configuration file, or None if it is too large or malformed."""
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        if file.stat().st_size > _MAX_BYTES:
            return None
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            return json.loads(text)
        if file.suffix == ".toml":
            return tomllib.loads(text)
        return yaml.safe_load(text)
    return None


def _list_paths(
    content: object, file: str, purpose: Purpose, prefix: str = "", level: int = 1
) -> Iterator[ConfigPath]:
    """Yield the paths for a purpose in the content of a configuration file.

    Args:
        content: Content of the file, or of a mapping in the file.
        file: Path of the file for `ConfigPath.file`.
        purpose: Purpose of the paths.
        prefix: Dotted name of the mapping, with a dot at its end, or "".
        level: Number of the level of `content`, from 1.
    """
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if not isinstance(key, str):
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and level < _MAX_LEVELS:
            yield from _list_paths(value, file, purpose, f"{name}.", level + 1)
        if not isinstance(value, str) or not _may_be_path(value, purpose):
            continue
        is_certain = _is_certain(key, prefix, purpose)
        if is_certain is not None:
            is_fixed = is_certain and _VARIABLE_CHARACTERS.search(value) is None
            yield ConfigPath(file=file, key=name, path=value, is_fixed=is_fixed)


def _is_certain(key: str, prefix: str, purpose: Purpose) -> bool | None:
    """Return True if a key certainly names the path for a purpose, and False if the key is vague.

    For the folder of the checkpoints, this function does not use `Purpose.CHECKPOINTS`, which is
    the pattern for options. In a configuration file, a key such as `checkpoint`, `save` or `output`
    may name a model to load, a rule or a format. So only keys that end with `dir`, `directory`,
    `path` or `folder` count.

    Args:
        key: The key, without the names of the mappings that contain the key.
        prefix: Dotted name of the mapping that contains the key, or "".
        purpose: The purpose.

    Returns:
        None if the key has another purpose.
    """
    if purpose is not Purpose.CHECKPOINTS:
        return True if find_purpose(key) is purpose else None
    plain_key = key.replace("-", "_").lower()
    is_elsewhere = _OTHER_MAPPINGS.search(_WORD_START.sub("_", prefix).lower()) is not None
    if _SAVE_KEYS.fullmatch(plain_key):
        return not is_elsewhere
    if _CHECKPOINT_KEYS.fullmatch(plain_key):
        return None if is_elsewhere else True
    return False if _VAGUE_KEYS.fullmatch(plain_key) else None


def _may_be_path(text: str, purpose: Purpose) -> bool:
    """Return True if a text may be the path of a folder, or of a metrics file with JSON lines."""
    if purpose is Purpose.METRICS:
        return text.endswith(".jsonl")
    return text.strip("./ ") != "" and _FILE_NAME.search(text) is None
