"""URLs of checkpoint folders in object stores, such as `s3://bucket/runs/7/checkpoints`."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Mapping from the protocol of a URL to the extra of the Python package `muster` that installs the
#: client library of the object store. An empty string means that no extra is needed.
EXTRAS = {"s3": "s3", "gs": "gcs", "file": ""}
#: Mapping from the unusual protocol names of some trainers to the usual protocol names.
_ALIASES = {"s3a": "s3", "gcs": "gs"}
#: Matches the beginning of a URL. A local path never matches.
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
#: Matches a URL in which a slash or colon after the protocol is missing or is written twice.
_MISTYPED = re.compile(r"(?i)(s3a?|gcs|gs|file)(?::/(?!/)|//|:(?!/))")
_EXAMPLE = "s3://BUCKET/FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlFault:
    """A mistake in the URL of a checkpoint folder."""

    problem: str
    #: The correct form of the URL, as advice to the user.
    remedy: str


def is_url(written: str) -> bool:
    """Return True if the value of the key `checkpoints` is a URL instead of a path."""
    return _PROTOCOL.match(written) is not None


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into its protocol and its path. Slashes at the end of the path are removed.

    For `s3://bucket/a/`, the result is `("s3", "bucket/a")`. For `file:///data`, the result is
    `("file", "/data")`. The protocol `s3a` is replaced by `s3`, and `gcs` by `gs`.

    Raises:
        ValueError: The text is no URL.
    """
    match = _PROTOCOL.match(url)
    if match is None:
        raise ValueError(f"no URL: {url!r}")
    protocol = _ALIASES.get(match[1], match[1])
    return protocol, re.sub(r"(?<!^)/+$", "", url[match.end() :])


def find_url_fault(written: str) -> UrlFault | None:
    """Return the mistake in the URL of a checkpoint folder, or None if the URL is valid.

    Args:
        written: Value of the key `checkpoints`, which may contain placeholders. For a local path,
            the result is None.
    """
    if not is_url(written):
        if _MISTYPED.match(written):
            return UrlFault(
                problem=f"{written!r} looks like a URL, but has no :// after its protocol",
                remedy=f"write {_EXAMPLE}, or ./{written} for a folder with this name",
            )
        return None
    protocol, path = split_url(written)
    if protocol not in EXTRAS:
        return UrlFault(
            problem=f"Muster cannot read checkpoints with the protocol {protocol}://",
            remedy="write a URL with s3://, gs:// or file://, or a path",
        )
    if protocol == "file":
        if not path.startswith(("/", "${")):
            return UrlFault(
                problem=f"{written!r} contains no absolute path",
                remedy="write file:///FOLDER, with three slashes",
            )
        return None
    bucket, _, folder = path.partition("/")
    if "@" in bucket:
        return UrlFault(
            problem="this URL must contain no credentials, because records show the URL",
            remedy=f"write {protocol}://BUCKET/FOLDER, and set the credentials in the environment "
            "of Muster",
        )
    if not bucket:
        return UrlFault(
            problem=f"{written!r} names no bucket",
            remedy=f"write {protocol}://BUCKET/FOLDER",
        )
    if re.search(r"[*?\[\]]", re.sub(r"\$\{[^}]*\}", "", bucket)):
        return UrlFault(
            problem=f"the bucket of {written!r} must be a name without * ? [ ]",
            remedy=f"write {protocol}://BUCKET/FOLDER",
        )
    if any(part in ("", ".", "..") for part in folder.split("/")) and folder:
        return UrlFault(
            problem=f"{written!r} contains an empty folder name, '.' or '..'",
            remedy="write only folder names, with one slash between two of them",
        )
    return None
