"""Environment variables that Kubernetes sets for each service of a namespace.

For a service named `prefect-server-api`, Kubernetes sets PREFECT_SERVER_API_PORT to a URL such as
`tcp://10.0.0.1:4200` in each container of the namespace. Prefect has a setting of the same name,
which must be a number. Because of the URL, the import of Prefect fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

#: Matches the value of the variable NAME_PORT that Kubernetes sets for a service.
#: Source: kubernetes/pkg/kubelet/envvars/envvars.go.
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://[^/\s]+:\d+")
#: Prefix of the names of Prefect's settings.
_PREFIX = "PREFECT_"


def drop_service_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove variables of Kubernetes services that Prefect would read as its settings.

    A variable is removed if its name is `PREFECT_..._PORT` and its value is a URL. A setting of
    Prefect with such a name would be a number.
    """
    for name, value in list(environment.items()):
        is_setting = name.startswith(_PREFIX) and name.endswith("_PORT")
        if is_setting and _SERVICE_URL.fullmatch(value):
            del environment[name]


def describe_invalid_setting(
    errors: Collection[Mapping[str, Any]], environment: Mapping[str, str] = os.environ
) -> str:
    """Return a message of one line that lists the invalid settings of Prefect.

    Args:
        errors: The errors that pydantic reports for Prefect's settings.
        environment: The environment variables of this process.
    """
    problems = []
    for error in errors:
        field = str(error["loc"][-1]) if error["loc"] else ""
        value = error.get("input")
        names = [
            name
            for name, text in environment.items()
            if name.startswith(_PREFIX) and text == value and name.lower().endswith(field.lower())
        ]
        setting = names[0] if names else f"Prefect's setting {field}"
        advice = (
            f"correct or unset {names[0]}"
            if names
            else "correct the setting in the profile, prefect.toml or .env"
        )
        problems.append(f"{setting} has the value {value!r}: {error['msg']}; {advice}")
    return ". ".join(problems)
