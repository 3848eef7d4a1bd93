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
#: Largest size of a spec file in bytes. Larger files are ignored, because PyYAML needs about a
#: second to read a file of this size.
_SIZE_AT_MOST = 65_536
#: Keys that Muster adds to the spec of a run. These keys are not compared, because the spec file of
#: the run may have other values for them.
_ADDED_KEYS = ("code", "run_id", "start_order")


def find_spec_files(
    provenance: Mapping[str, object], spec: object, names: Collection[str]
) -> set[str]:
    """Return the names of the spec files of a run.

    If `muster train` recorded the path of the spec file, return only this path. For other runs, the
    result contains each file that is a valid run spec and whose values are all in the run's spec.
    If the option `--set` changed a value, the spec file is not found.

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
        # The path of the project is resolved. So also resolve the folder of the file, but not the
        # file itself, which may be a symbolic link.
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
    """Return True if `whole` contains all values of `part` under the same keys.

    Nested mappings are compared in the same way. Other values must be equal."""
    if isinstance(whole, Mapping) and isinstance(part, Mapping):
        return all(key in whole and _contains(whole[key], value) for key, value in part.items())
    return whole == part
