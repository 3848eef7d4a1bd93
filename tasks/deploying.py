"""What `prefect deploy` calls: the run spec of a file as the parameter of its deployment."""

from __future__ import annotations

from typing import Any

from tasks.run.layout import project_root
from tasks.run.loading import load_spec


def load_run_spec(path: str) -> dict[str, Any]:
    """A build step of prefect.yaml: `{{ ID.spec }}` then stands for the content of a spec file.

    A faulty file fails the deploy here, with every fault, and not the first scheduled run.

    Args:
        path: The file, relative to the project's root.

    Returns: `{"spec": ...}`, plain data in the order of the file.

    Raises:
        InvalidSpec: With every fault of the file.
    """
    return {"spec": load_spec(project_root() / path).written()}
