"""Create Prefect Secret blocks, and list their names."""

from __future__ import annotations

import re

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentCreate, BlockDocumentUpdate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from tasks.spec.errors import BadArgument, MusterError

#: Slug (identifier) of Prefect's block type for secrets.
_TYPE = "secret"
#: Matches the names that Prefect accepts for a block.
_NAME = re.compile(r"[a-z0-9-]+")


def save_secret(
    client: SyncPrefectClient, name: str, value: str, *, overwrite: bool = False
) -> bool:
    """Store a text as a Prefect Secret block.

    Args:
        client: Client of the Prefect server.
        name: Name of the block.
        value: The secret.
        overwrite: True to replace the value of an existing block.

    Returns:
        True if a new block was created. False if the value of an existing block was replaced.

    Raises:
        BadArgument: The name or the value is not valid, or the block exists already.
        MusterError: The server has no block type for secrets.
    """
    check_name(name)
    # An environment variable cannot contain a zero byte.
    if not value or "\0" in value:
        raise BadArgument(f"the value for the secret {name} is empty or contains a zero byte")
    try:
        block_type = client.read_block_type_by_slug(_TYPE)
    except ObjectNotFound as error:
        raise MusterError(
            f"the Prefect server {client.api_url} has no block type `secret`. Restart the server: "
            "it creates the block type when it starts"
        ) from error
    schema = client.get_most_recent_block_schema_for_block_type(block_type.id)
    if schema is None:
        raise MusterError(
            f"the Prefect server {client.api_url} has an incomplete block type `secret` (without a "
            "schema): restart the server"
        )
    data = {"value": value}
    try:
        client.create_block_document(
            BlockDocumentCreate(
                name=name, data=data, block_type_id=block_type.id, block_schema_id=schema.id
            )
        )
    except ObjectAlreadyExists:
        if not overwrite:
            raise BadArgument(
                f"the secret {name} already exists. To replace its value, add --overwrite"
            ) from None
        block = client.read_block_document_by_name(name, _TYPE)
        client.update_block_document(
            block.id, BlockDocumentUpdate(data=data, block_schema_id=schema.id)
        )
        return False
    return True


def check_name(name: str) -> None:
    """Check the name of a Secret block.

    Raises:
        BadArgument: Prefect does not accept the name.
    """
    if not _NAME.fullmatch(name):
        raise BadArgument(
            "the name of a secret may contain only lower-case letters, digits and dashes, but the "
            f"name is {name!r}"
        )


def list_secret_names(client: SyncPrefectClient) -> list[str]:
    """Return the names of the Prefect Secret blocks, sorted. No value is read."""
    blocks = client.read_block_documents_by_type(_TYPE, include_secrets=False)
    return sorted(block.name for block in blocks if block.name)
