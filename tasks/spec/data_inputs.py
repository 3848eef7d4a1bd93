"""The data from which a run is made: the spec key `inputs`, and paths in the results of steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator

from tasks.spec.checkpoint_urls import find_url_fault, is_url
from tasks.spec.secrets import looks_secret
from tasks.spec.values import Text, make_refusal

#: Largest number of paths that `list_paths` returns for one value, such as the result of a step.
_MAX_PATHS = 50
#: Largest length of a path or URI, in characters.
_MAX_LENGTH = 1000
#: Matches names of query parameters that occur in signed URLs, such as `X-Amz-Signature`. A signed
#: URL gives access to the data.
_SIGNING = re.compile(r"(?:^|[-_])sig(?:nature)?$|credential", re.IGNORECASE)
_CREDENTIALS_REMEDY = "write the URI without credentials, and set them in the environment"


def _check_data_input(text: str) -> str:
    if len(text) > _MAX_LENGTH:
        raise make_refusal(
            f"must have at most {_MAX_LENGTH} characters, found {len(text)}",
            "write the path or the URI of the data",
        )
    if re.search(r"[\x00-\x1f\x7f]", text) or text != text.strip():
        raise make_refusal(
            "must be a single path or URI, without line breaks and without spaces at the start or "
            f"end, found {text!r}",
            "write each path as an item of the list",
        )
    if not is_url(text):
        # The text is a path, or a mistyped URL such as `s3:/bucket`. `find_url_fault` finds such
        # mistakes.
        if fault := find_url_fault(text):
            raise make_refusal(fault.problem, fault.remedy)
        return text
    if _has_credentials(text):
        problem = "this URI must contain no credentials, because records show the URI"
        raise make_refusal(problem, _CREDENTIALS_REMEDY)
    return text


def _has_credentials(uri: str) -> bool:
    """Return True if a URI contains a password or a query parameter with credentials."""
    try:
        parts = urlsplit(uri)
        has_password = bool(parts.password)
    except ValueError:
        # `urlsplit` rejects the text, because the part after `://` is not a valid network address.
        # Text before an `@` may still be a password.
        return "@" in uri
    is_store = parts.scheme in ("s3", "s3a", "gs", "gcs")
    if has_password or (is_store and "@" in parts.netloc):
        return True
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    return any(looks_secret(name) or _SIGNING.search(name) for name in names)


#: Type of an item of the spec key `inputs`: a path, or a URI without credentials.
DataInput = Annotated[Text, AfterValidator(_check_data_input)]


def make_result_uri(run_id: str) -> str:
    """Return the URI of the JSON result of a pipeline step's run."""
    return f"muster://runs/{run_id}/result"


def list_paths(value: Any) -> list[str]:
    """Return the absolute paths and URIs among the strings of JSON data, each only once.

    URIs with credentials are left out. At most 50 paths are returned.

    Args:
        value: The JSON data, for example the result of a step.
    """
    paths: dict[str, None] = {}
    for text in _list_texts(value):
        if is_data_path(text):
            paths[text] = None
        if len(paths) == _MAX_PATHS:
            break
    return [*paths]


def is_data_path(text: str) -> bool:
    """Return True if a text is an absolute path or a URI that the key `inputs` accepts."""
    is_absolute = text.startswith("/") and text != "/"
    return (is_absolute or is_url(text)) and is_data_input(text)


def is_data_input(text: str) -> bool:
    """Return True if `text` is a valid item of the list `inputs` in the run spec."""
    try:
        _check_data_input(text)
    except ValueError:
        return False
    return text != ""


def drop_invalid_inputs(spec: dict[str, Any]) -> None:
    """Remove invalid items of the key `inputs`, after placeholders were replaced.

    For example, an item is invalid if its placeholder had an empty value. No error is raised,
    because the run can start without these items.

    Args:
        spec: A run spec as plain data. It is changed.
    """
    if spec.get("inputs"):
        spec["inputs"] = [text for text in spec["inputs"] if is_data_input(text)]


def _list_texts(value: Any) -> Iterator[str]:
    """Yield all texts in JSON data, except the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _list_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _list_texts(item)
