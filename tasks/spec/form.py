"""What the form in the Prefect UI is drawn from: the JSON schema of a spec, as that UI reads it.

It draws `X | None` as a choice of two and preselects None, also for a plain text; a field without
that choice as an empty box, and what is left empty there is not sent. It follows `position`, since
a Prefect server on PostgreSQL keeps no order of keys.
"""

from __future__ import annotations

from typing import Any

#: How the choice is called between a part of the spec and none.
GIVEN, LEFT_OUT = "Given", "Left out"
#: The position of what takes pages.
LAST = 1000


def drawn(properties: dict[str, Any]) -> dict[str, Any]:
    """The properties of an object, ready to be drawn; what they allow stays, null excepted."""
    return {
        key: {"position": position, **_field(schema)}
        for position, (key, schema) in enumerate(properties.items())
    }


def _field(schema: dict[str, Any]) -> dict[str, Any]:
    ways = [way for way in schema.get("anyOf", ()) if way.get("type") != "null"]
    if len(ways) != 1:
        return schema
    [way] = ways
    if "$ref" in way:
        # Without the choice the form would send the defaults of a part that nobody asked for.
        named = [{**way, "title": GIVEN}, {"type": "null", "title": LEFT_OUT}]
        return {**schema, "anyOf": named}
    return {key: one for key, one in {**way, **schema}.items() if key not in ("anyOf", "default")}
