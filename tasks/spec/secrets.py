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

#: Text that replaces a secret in messages, logs and files.
MASK = "***"


#: A variable is probably secret if one of these words is at any position in its name. Examples for
#: PWD: DB_PWD, PWD_OLD.
_SECRET = frozenset(
    {
        "SECRETS",
        "PASSWORDS",
        "PASSPHRASE",
        "PWD",
        "CREDENTIAL",
        "CREDENTIALS",
        "AUTH",
        "AUTHORIZATION",
        "BEARER",
        "JWT",
        "COOKIE",
        "COOKIES",
        "WEBHOOK",
        "PAT",
    }
)
#: A variable is probably secret if a word in its name ends with one of these texts. The word may be
#: longer than the text, as in PGPASSWORD.
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
#: A variable is probably secret if the last word in its name is one of these words, as in SSH_KEY
#: and DB_PASS. A number can follow, as in API_KEY_2. At other positions, these words are harmless,
#: as in KEY_COUNT.
_SECRET_LAST = frozenset({"KEY", "KEYS", "PASS"})
#: A variable is probably secret if its name contains one of these words directly before KEY:
#: AWS_ACCESS_KEY_ID.
_SECRET_KEY_PREFIXES = frozenset(
    {"API", "ACCESS", "PRIVATE", "SECRET", "SIGNING", "ENCRYPTION", "MASTER", "ACCOUNT"}
)
#: If the name of a variable ends with one of these words and KEY, as in PUBLIC_KEY, the word KEY
#: does not make the variable secret.
_OPEN_KEY_PREFIXES = frozenset(
    {"PUBLIC", "PRIMARY", "FOREIGN", "SORT", "PARTITION", "CACHE", "GROUP", "STEP", "METRIC"}
)
#: If one of these words precedes TOKEN, as in EOS_TOKEN, the variable contains a token of a
#: language model. The value is not secret.
_MODEL_TOKEN_PREFIXES = frozenset(
    {
        "EOS",
        "BOS",
        "PAD",
        "UNK",
        "SEP",
        "CLS",
        "MASK",
        "STOP",
        "IMAGE",
        "SPECIAL",
        "PER",
        "MAX",
        "MIN",
        "NUM",
    }
)
#: If one of these words follows TOKEN, as in TOKEN_COUNT, the name means tokens of a language
#: model. The value is not secret.
_MODEL_TOKEN_SUFFIXES = frozenset(
    {"ID", "IDS", "LEN", "LENGTH", "LIMIT", "COUNT", "BUDGET", "LEVEL", "MEAN", "SIZE", "RATE"}
)
#: A variable is not secret if the last word in its name is one of these words. Such a variable only
#: describes the place or the use of a secret: SSH_KEY_FILE.
_DESCRIPTIVE_LAST = frozenset(
    {"FILE", "PATH", "DIR", "SOCK", "PORT", "HOST", "TIMEOUT", "TTL", "ENABLED", "TYPE", "MODE"}
)
#: Names of shell variables that contain directories. PWD must not be mistaken for a password.
_NEVER_SECRET = frozenset({"PWD", "OLDPWD"})

#: Matches one word in the name of a variable. Examples: HF and TOKEN in HF_TOKEN; Git, Hub and
#: Token in GitHubToken.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: Matches a command-line argument with a name, such as `--api-key`, `--api-key=VALUE` and
#: `HF_TOKEN=VALUE`, and `+a.b=VALUE` of Hydra.
_OPTION = re.compile(
    r"(?P<dashes>--?)?(?P<name>[+~]*[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL
)
#: Matches an assignment in source code or settings, such as `HF_TOKEN=VALUE` or `"api_key":
#: "VALUE"`.
_ASSIGNED = re.compile(
    r"""([A-Za-z][\w.-]*)["']?\s*[:=]\s*(["']?)([^\s"'(\[,;)}]{8,})(?=["'\s,;)}]|$)"""
)
#: Matches user and password in a URL, such as `user:` and `password` in
#: `http://user:password@proxy`.
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*:)([^/@\s]+)(?=@)")

#: Values that are never masked, because they often occur in logs without being secret.
_COMMON_WORDS = frozenset({"true", "false", "none", "null", "auto", "default"})


def looks_secret(name: str) -> bool:
    """Return True if an environment variable with this name probably contains a secret.

    The words in the name decide. HF_TOKEN, db_password and GitHubToken look secret.
    TOKENIZERS_PARALLELISM, MAX_TOKENS, AUTHOR, MONKEY and SSH_KEY_FILE do not.

    In case of doubt, the result is True. Then a harmless value may be hidden, which the user can
    still read in the spec file. The opposite mistake would show a secret to other people.
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
    """Return True if a word in a name makes the name look secret.

    Args:
        preceding: Previous word in the name, or an empty string.
        word: Word in the name, in upper case.
        following: Next word in the name, or an empty string.
    """
    if word == "TOKEN":
        is_of_model = preceding in _MODEL_TOKEN_PREFIXES or following in _MODEL_TOKEN_SUFFIXES
        return not is_of_model
    if word == "KEY" and preceding in _SECRET_KEY_PREFIXES:
        return True
    return word in _SECRET_LAST and not following and preceding not in _OPEN_KEY_PREFIXES


def mask_env(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of environment variables in which secrets are masked.

    A value is masked if its name looks secret. In all other values, only passwords in URLs are
    masked, as in `http://user:password@proxy`. Values that are not text, such as references to a
    Secret block, stay unchanged.
    """

    def mask_value(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        is_secret = bool(value) and looks_secret(name)
        return MASK if is_secret else _URL_PASSWORD.sub(rf"\1{MASK}", value)

    return {name: mask_value(name, value) for name, value in env.items()}


def find_env_secrets(env: Mapping[str, object]) -> frozenset[str]:
    """Return the secrets in environment variables: whole secret values, and passwords in URLs.

    Values that are too common to be masked are left out.
    """
    texts = {name: value for name, value in env.items() if isinstance(value, str)}
    values = {value for name, value in texts.items() if looks_secret(name)}
    for value in texts.values():
        values |= _find_url_passwords(value)
    return drop_common_values(values)


def find_argument_secrets(words: Sequence[str]) -> frozenset[str]:
    """Return the secret values in the command-line arguments of a program.

    A value is secret if the name of its option looks secret. The forms `--api-key VALUE`,
    `--api-key=VALUE` and `HF_TOKEN=VALUE` are recognised.

    In trainings, an option with KEY in its name usually contains the name of a data column, such as
    `--label-key`. So KEY makes an option secret only after a word such as API or PRIVATE.
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
    """Return the secret values in the text of a program or a settings file.

    A value is secret if it is assigned to a name that looks secret: `export HF_TOKEN=VALUE`.
    """
    return drop_common_values(
        value for name, _, value in _ASSIGNED.findall(text) if _is_secret_option(name)
    )


def _is_secret_option(name: str) -> bool:
    """Return True if the value of a command-line option with this name is probably secret."""
    words = [word.upper() for word in _WORD.findall(name)]
    has_secret_prefix = len(words) > 1 and words[-2] in _SECRET_KEY_PREFIXES
    names_column = words[-1] in _SECRET_LAST and not has_secret_prefix
    return looks_secret(name) and not names_column


def _find_url_passwords(text: str) -> set[str]:
    """Return the passwords in the URLs of a text."""
    return {password for _user, password in _URL_PASSWORD.findall(text)}


def drop_common_values(values: Iterable[str]) -> frozenset[str]:
    """Return the secret values, except those that are too common to be masked.

    Values with fewer than four characters, numbers with fewer than six digits, and words such as
    `true` are too common. Masking these values would make logs unreadable.
    """
    return frozenset(
        value
        for value in values
        if len(value) >= 4
        and value.strip().lower() not in _COMMON_WORDS
        and not (value.isdecimal() and len(value) < 6)
    )


def mask_text(text: str, secret_values: Iterable[str]) -> str:
    """Return a text in which each secret is replaced by `***`.

    All spellings that are likely in a log are replaced: plain text, and the spellings of Python,
    JSON, the shell and URLs. Each line of a secret with several lines, such as a PEM key, is also
    replaced.
    """
    for spelling in _list_all_spellings(frozenset(secret_values)):
        text = text.replace(spelling, MASK)
    return text


def mask_nested(value: Any, mask: Callable[[str], str]) -> Any:
    """Return a copy of nested lists and mappings in which `mask` was applied to every text.

    Exceptions, paths and other objects become masked texts. Numbers, Booleans and None do not
    change.
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
    """Mask all log records and tracebacks of this process while the context is open.

    Args:
        mask: Function that returns a text with its secrets masked.
    """
    original_factory = logging.getLogRecordFactory()

    def create_masked_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = original_factory(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:
            # The message and its arguments do not fit together. Leave the record unchanged, because
            # the logging handlers report this mistake.
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
def _list_all_spellings(values: frozenset[str]) -> tuple[str, ...]:
    """Return all spellings of all secret values, the longest first.

    If a secret contains another secret, the longer one must be masked first.
    """
    spellings = {spelling for value in values for spelling in _list_spellings(value)}
    return tuple(sorted(spellings, key=len, reverse=True))


def _list_spellings(value: str) -> set[str]:
    """Return the forms in which a secret value may appear in a log, for example as JSON text."""
    as_json = json.dumps(value)[1:-1]
    spellings = {
        value,
        # The value as JSON text: with escaped non-ASCII characters, with unchanged non-ASCII
        # characters, and escaped twice (JSON text inside JSON).
        as_json,
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(as_json)[1:-1],
        # The value as Python prints it: with `repr`, with `ascii`, and with `repr` as part of a
        # longer text. If the longer text contains both kinds of quotes, `repr` escapes each single
        # quote.
        repr(value)[1:-1],
        ascii(value)[1:-1],
        repr(f"{value}'\"")[1:-4],
        # Two percent-encoded forms of the value in a URL. The first form also encodes slashes. The
        # second form leaves slashes unchanged.
        quote(value, safe=""),
        quote(value),
        # The value between single quotes in a shell command.
        value.replace("'", "'\"'\"'"),
    }
    lines = [line.strip() for line in value.splitlines()]
    if len(lines) > 1:
        spellings |= {line for line in lines if len(line) >= 8}
    return {spelling for spelling in spellings if spelling}
