"""Print which project, code and Python interpreters a run uses, and which files it lacks."""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.interpreters import describe_interpreters, find_missing_files
from tasks.train.missing_modules import describe_missing_modules


def print_project(spec: RunSpec, root: Path) -> None:
    """Print on stderr the folder of a run's project, the version of its code, and missing files.

    Missing programs, scripts and Python modules count as missing files.

    Args:
        spec: The run spec, with the version of the submitted code.
        root: Root folder of the project.
    """
    code = (
        "files used in place"
        if spec.code == LIVE_CODE
        else f"files copied as {str(spec.code)[:12]}"
    )
    interpreters = describe_interpreters(spec, root)
    print(f"  project {root}, {code}, python {interpreters}", file=sys.stderr)
    # Only print the faults, because the run may start on another host that has the files.
    for fault in find_missing_files(spec, root):
        print(
            "  this machine does not have a file that the run needs. Check that the host of the "
            f"Prefect worker has the file: {fault}",
            file=sys.stderr,
        )
    for warning in describe_missing_modules(spec, root):
        print(f"  warning: {warning}", file=sys.stderr)
