"""Find the spec files of runs among the files of the stored code, for `muster show --diff`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import yaml

from tasks.record.code_store import NoCode, read_files
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import dump_spec, parse_spec, parse_yaml
from tasks.spec.run import RunSpec

#: Suffixes of the names of spec files.
_SUFFIXES = (".yaml", ".yml")
#: A larger file is no spec file. PyYAML needs about a second for a file of this size, in bytes.
_SIZE_AT_MOST = 65_536
#: Keys that Muster adds to the spec of a run. A file with another value can be the run's spec file.
_ADDED_KEYS = ("code", "run_id", "start_order")


def find_spec_files(
    provenance: Mapping[str, object], spec: object, names: Collection[str]
) -> set[str]:
    """Return the names of the spec files of a run.

    `muster train` records the path of the spec file. For other runs, the result contains each file
    that is a valid run spec and has only values of the run's spec. So a file is not found if an
    option `--set` has changed one of its values.

    Args:
        provenance: Recorded origin of the run: the name of the stored code, the path of the
            project, and perhaps the path of the spec file.
        spec: The run's spec as plain data, in which placeholders are not replaced and secrets are
            masked. None if unknown.
        names: Relative paths of the files in the stored code that are searched.
    """
    file = provenance.get("spec_file")
    project = provenance.get("project")
    if file and project:
        # The path of the project has no symbolic links, so follow the links to the folder.
        path = Path(str(file)).parent.resolve() / Path(str(file)).name
        if path.is_relative_to(str(project)):
            return {path.relative_to(str(project)).as_posix()}.intersection(names)
        return set()

    candidates = [name for name in names if name.endswith(_SUFFIXES)]
    if not candidates or not isinstance(spec, Mapping):
        return set()
    with suppress(NoCode, OSError):
        files = read_files(str(provenance.get("tree")))
        return {
            name
            for name in candidates
            if name in files and _has_only_values_of(spec, files[name][1])
        }
    return set()


def to_plain_data(spec: RunSpec) -> object:
    """Return a run spec as plain data, with masked secrets."""
    return yaml.safe_load(dump_spec(spec))


def _has_only_values_of(spec: Mapping[str, object], content: bytes) -> bool:
    """Return True if a file is a valid run spec, and all its values are in the spec of a run.

    Args:
        spec: The run's spec as plain data, with masked secrets.
        content: Content of the file.
    """
    if len(content) > _SIZE_AT_MOST:
        return False
    try:
        written = to_plain_data(parse_spec(parse_yaml(content.decode("utf-8-sig"), "")))
    except (UnicodeDecodeError, InvalidSpec):
        return False
    assert isinstance(written, dict)
    values = {key: value for key, value in written.items() if key not in _ADDED_KEYS}
    return _contains(spec, values)


def _contains(whole: object, part: object) -> bool:
    """Return True if each value of the nested mapping `part` is also in the mapping `whole`."""
    if isinstance(whole, Mapping) and isinstance(part, Mapping):
        return all(key in whole and _contains(whole[key], value) for key, value in part.items())
    return whole == part
