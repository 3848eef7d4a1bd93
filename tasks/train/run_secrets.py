"""The secret values that a run knows, and their replacement in texts that are written or shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tasks.spec import secrets
from tasks.spec.run import RunSpec


class RunSecrets:
    """All secret values that the components of one run may have."""

    def __init__(self, spec: RunSpec) -> None:
        """Collect the secrets in the environment variables of this process and in the run spec."""
        environ = dict(os.environ)
        with suppress(OSError, ValueError):
            # The environment variable contains only the path of the file with Ray's token. The
            # token is a secret, too, so read the file.
            token = Path(environ.get("RAY_AUTH_TOKEN_PATH", "")).read_text(encoding="utf-8")
            environ["RAY_AUTH_TOKEN"] = token.strip()
        #: Secret values that `mask` replaces.
        self.values: frozenset[str] = secrets.find_env_secrets(environ) | spec.secrets
        #: Mapping from the names of the run's Prefect Secret blocks to their values.
        self.block_values: Mapping[str, str] = {}

    def add(self, values: Iterable[str]) -> None:
        """Add values to the secrets that `mask` replaces."""
        self.values |= frozenset(values)

    def set_blocks(self, block_values: Mapping[str, str]) -> None:
        """Set the values of the run's Prefect Secret blocks, and mask these values.

        Args:
            block_values: Mapping from the names of the blocks to their values.
        """
        self.block_values = block_values
        self.add(secrets.drop_common_values(block_values.values()))

    def mask(self, text: str) -> str:
        """Return the text in which each secret value is replaced by `***`."""
        return secrets.mask_text(text, self.values)
