"""Find and mask secrets in records and logs.

A value counts as a secret if the name of its environment variable or command-line option looks
secret, or if it is a password in a URL.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import quote

MASK = "***"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Words that make a name secret at any position.
_SECRET = _words(
    "SECRETS PASSWORDS PASSPHRASE PWD CREDENTIAL CREDENTIALS AUTH AUTHORIZATION BEARER JWT COOKIE "
    "COOKIES WEBHOOK PAT"
)
#: Endings of a word that make a name secret, because the words may be run together: PGPASSWORD.
_SECRET_ENDS = (
    "PASSWORD",
    "PASSWD",
    "SECRET",
    "APIKEY",
    "ACCESSKEY",
    "SECRETKEY",
    "PRIVATEKEY",
    "APITOKEN",
    "AUTHTOKEN",
    "ACCESSTOKEN",
)
#: Words that make a name secret as its last word, not counting a number: SSH_KEY, API_KEY_2,
#: DB_PASS. At another position they do not: KEY_COUNT, PASS_RATE.
_SECRET_LAST = _words("KEY KEYS PASS")
#: Words before KEY that make the name secret at any position: AWS_ACCESS_KEY_ID.
_SECRET_KEY_PREFIXES = _words("API ACCESS PRIVATE SECRET SIGNING ENCRYPTION MASTER ACCOUNT")
#: Words before KEY that make the name harmless: PUBLIC_KEY.
_OPEN_KEY_PREFIXES = _words("PUBLIC PRIMARY FOREIGN SORT PARTITION CACHE GROUP STEP METRIC")
#: Words before TOKEN that show a token of a language model, not a credential: EOS_TOKEN.
_MODEL_TOKEN_PREFIXES = _words("EOS BOS PAD UNK SEP CLS MASK STOP IMAGE SPECIAL PER MAX MIN NUM")
#: Words after TOKEN that show a token of a language model: TOKEN_COUNT.
_MODEL_TOKEN_SUFFIXES = _words("ID IDS LEN LENGTH LIMIT COUNT BUDGET LEVEL MEAN SIZE RATE")
#: Last words of a name that only describes the place or the use of a secret: SSH_KEY_FILE.
_DESCRIPTIVE_LAST = _words("FILE PATH DIR SOCK PORT HOST TIMEOUT TTL ENABLED TYPE MODE")
#: Names of shell variables that contain directories, although PWD looks like a password.
_NEVER_SECRET = frozenset({"PWD", "OLDPWD"})

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: Matches `--api-key`, `--api-key=VALUE`, `HF_TOKEN=VALUE` and Hydra's `+a.b=VALUE`.
_OPTION = re.compile(
    r"(?P<dashes>--?)?(?P<name>[+~]*[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL
)
_ASSIGNED = re.compile(
    r"""([A-Za-z][\w.-]*)["']?\s*[:=]\s*(["']?)([^\s"'(\[,;)}]{8,})(?=["'\s,;)}]|$)"""
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*:)([^/@\s]+)(?=@)")

#: Words that are never masked in a text, because they occur too often for other reasons.
_COMMON_WORDS = frozenset({"true", "false", "none", "null", "auto", "default"})


def looks_secret(name: str) -> bool:
    """Return True if an environment variable of this name probably contains a secret.

    The words of the name decide. HF_TOKEN, db_password and GitHubToken look secret.
    TOKENIZERS_PARALLELISM, MAX_TOKENS, AUTHOR, MONKEY and SSH_KEY_FILE do not. Ambiguous names
    count as secret: a masked setting can be read in the spec, but a leaked key is a security
    incident.
    """
    if name.upper() in _NEVER_SECRET:
        return False
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or words[-1] in _DESCRIPTIVE_LAST:
        return False
    if any(word in _SECRET or word.endswith(_SECRET_ENDS) for word in words):
        return True

    preceding_words = ["", *words[:-1]]
    following_words = [*words[1:], ""]
    return any(map(_is_secret_word, preceding_words, words, following_words))


def _is_secret_word(preceding: str, word: str, following: str) -> bool:
    if word == "TOKEN":
        is_of_model = preceding in _MODEL_TOKEN_PREFIXES or following in _MODEL_TOKEN_SUFFIXES
        return not is_of_model
    if word == "KEY" and preceding in _SECRET_KEY_PREFIXES:
        return True
    return word in _SECRET_LAST and not following and preceding not in _OPEN_KEY_PREFIXES


def mask_env(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of environment variables in which secrets are masked.

    A value is masked if its name looks secret. A password in a URL
    (`http://user:password@proxy`) is masked for any name. Values that are not text, such as
    references to a Secret block, stay unchanged.
    """

    def mask_value(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        is_secret = bool(value) and looks_secret(name)
        return MASK if is_secret else _URL_PASSWORD.sub(rf"\1{MASK}", value)

    return {name: mask_value(name, value) for name, value in env.items()}


def find_env_secrets(env: Mapping[str, object]) -> frozenset[str]:
    """Return the secrets in environment variables, without values that are too common to mask."""
    texts = {name: value for name, value in env.items() if isinstance(value, str)}
    values = {value for name, value in texts.items() if looks_secret(name)}
    for value in texts.values():
        values |= _find_url_passwords(value)
    return drop_common_values(values)


def find_argument_secrets(words: Sequence[str]) -> frozenset[str]:
    """Return the secrets in the arguments of a program.

    The name of the option decides: `--api-key VALUE`, `--api-key=VALUE`, `HF_TOKEN=VALUE`. In
    trainings, most options with KEY name a column of a data set, such as `--label-key` or
    `data.prompt_key=prompt`. They count as secret only after a word such as API or PRIVATE.
    """
    values = set[str]()
    for word, next_word in pairwise([*words, ""]):
        values |= _find_url_passwords(word)
        option = _OPTION.fullmatch(word)
        if option is None or not _is_secret_option(option["name"]):
            continue
        if option["value"]:
            values.add(option["value"].strip("\"'"))
        elif option["dashes"] and option["value"] is None and not next_word.startswith("-"):
            values.add(next_word)
    return drop_common_values(values)


def find_code_secrets(text: str) -> frozenset[str]:
    """Return the secrets in source code or settings, such as `export HF_TOKEN=VALUE`."""
    return drop_common_values(
        value for name, _, value in _ASSIGNED.findall(text) if _is_secret_option(name)
    )


def _is_secret_option(name: str) -> bool:
    words = [word.upper() for word in _WORD.findall(name)]
    has_secret_prefix = len(words) > 1 and words[-2] in _SECRET_KEY_PREFIXES
    names_column = words[-1] in _SECRET_LAST and not has_secret_prefix
    return looks_secret(name) and not names_column


def _find_url_passwords(text: str) -> set[str]:
    return {password for _user, password in _URL_PASSWORD.findall(text)}


def drop_common_values(values: Iterable[str]) -> frozenset[str]:
    """Return the values without those that are too common to mask.

    These are values of fewer than four characters, numbers of fewer than six digits, and words such
    as `true`. Masking them would make logs unreadable and hide no secret.
    """
    return frozenset(
        value
        for value in values
        if len(value) >= 4
        and value.strip().lower() not in _COMMON_WORDS
        and not (value.isdecimal() and len(value) < 6)
    )


def mask_text(text: str, secret_values: Iterable[str]) -> str:
    """Replace the secrets in a text by `***`, in every spelling that is likely in a log.

    The spellings are those of plain text, Python, JSON, the shell and URLs. If a secret has several
    lines, such as a PEM key, each of its lines is masked, too.
    """
    for spelling in _all_spellings(frozenset(secret_values)):
        text = text.replace(spelling, MASK)
    return text


def mask_nested(value: Any, mask: Callable[[str], str]) -> Any:
    """Return a copy of plain data in which `mask` was applied to every string.

    Objects of other types, such as exceptions and paths, become strings.
    """
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: mask_nested(item, mask) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [mask_nested(item, mask) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return mask(str(value))


@contextmanager
def mask_logs(mask: Callable[[str], str]) -> Iterator[None]:
    """Apply `mask` to all log records of this process, and to their tracebacks, while open."""
    original_factory = logging.getLogRecordFactory()

    def create_masked_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = original_factory(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # The logging handlers report a record that cannot be formatted.
            return record

        masked_message = mask(message)
        if masked_message != message:
            record.msg = masked_message
            record.args = None

        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            masked_trace = mask(trace)
            if masked_trace != trace:
                record.exc_info = None
                record.exc_text = masked_trace
        return record

    logging.setLogRecordFactory(create_masked_record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(original_factory)


@lru_cache(maxsize=32)
def _all_spellings(values: frozenset[str]) -> tuple[str, ...]:
    """Return the spellings of all values, longest first, because a secret may contain another."""
    spellings = {spelling for value in values for spelling in _spellings(value)}
    return tuple(sorted(spellings, key=len, reverse=True))


def _spellings(value: str) -> set[str]:
    as_json = json.dumps(value)[1:-1]
    spellings = {
        value,
        # JSON, JSON with non-ASCII characters, and JSON within JSON.
        as_json,
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(as_json)[1:-1],
        # Python, in single quotes, in ASCII, and with both quotes escaped.
        repr(value)[1:-1],
        ascii(value)[1:-1],
        repr(f"{value}'\"")[1:-4],
        # URLs, and the shell within single quotes.
        quote(value, safe=""),
        quote(value),
        value.replace("'", "'\"'\"'"),
    }
    lines = [line.strip() for line in value.splitlines()]
    if len(lines) > 1:
        spellings |= {line for line in lines if len(line) >= 8}
    return {spelling for spelling in spellings if spelling}
