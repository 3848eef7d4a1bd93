"""Keeping secrets out of what is written down: by the names of environment variables, and of the
options that a program is given."""

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


#: Alone enough, wherever it stands in the name.
_SECRET = _words(
    "SECRETS PASSWORDS PASSPHRASE PWD CREDENTIAL CREDENTIALS AUTH AUTHORIZATION BEARER JWT COOKIE "
    "COOKIES WEBHOOK PAT"
)
#: The same, also where the word before it runs into it: PGPASSWORD, APIKEY.
_SECRET_ENDS = (
    *("PASSWORD", "PASSWD", "SECRET", "APIKEY", "ACCESSKEY", "SECRETKEY", "PRIVATEKEY"),
    *("APITOKEN", "AUTHTOKEN", "ACCESSTOKEN"),
)
#: Secret at the end of a name, a number aside (SSH_KEY, API_KEY_2, DB_PASS), in any other place
#: not: a KEY_COUNT, a PASS_RATE.
_SECRET_LAST = _words("KEY KEYS PASS")
#: KEY is secret anywhere after one of these (AWS_ACCESS_KEY_ID), ...
_KEY_OF = _words("API ACCESS PRIVATE SECRET SIGNING ENCRYPTION MASTER ACCOUNT")
#: ... and not after one of these.
_OPEN_KEY_OF = _words("PUBLIC PRIMARY FOREIGN SORT PARTITION CACHE GROUP STEP METRIC")
#: A token of a language model, not of an account.
_TOKEN_OF = _words("EOS BOS PAD UNK SEP CLS MASK STOP IMAGE SPECIAL PER MAX MIN NUM")
_TOKEN_MEASURE = _words("ID IDS LEN LENGTH LIMIT COUNT BUDGET LEVEL MEAN SIZE RATE")
#: It says where a secret is or how it is used, which is none.
_ABOUT = _words("FILE PATH DIR SOCK PORT HOST TIMEOUT TTL ENABLED TYPE MODE")
#: Two names of the shell's, for directories.
_NEVER = frozenset({"PWD", "OLDPWD"})

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: `--api-key`, `--api-key=VALUE`, `HF_TOKEN=VALUE` and Hydra's `+a.b=VALUE`.
_OPTION = re.compile(
    r"(?P<dashes>--?)?(?P<name>[+~]*[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL
)
_ASSIGNED = re.compile(
    r"""([A-Za-z][\w.-]*)["']?\s*[:=]\s*(["']?)([^\s"'(\[,;)}]{8,})(?=["'\s,;)}]|$)"""
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*:)([^/@\s]+)(?=@)")

#: Too common to be taken out of a text, whatever the name of the variable was.
_COMMON = frozenset({"true", "false", "none", "null", "auto", "default"})


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret.

    Judged word by word: HF_TOKEN, db_password and GitHubToken are secret; TOKENIZERS_PARALLELISM,
    MAX_TOKENS, AUTHOR, MONKEY and SSH_KEY_FILE are not. In doubt it is secret: a masked setting
    costs a look at the spec, a leaked key more.
    """
    if name.upper() in _NEVER:
        return False
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    if any(word in _SECRET or word.endswith(_SECRET_ENDS) for word in words):
        return True
    befores, afters = ["", *words[:-1]], [*words[1:], ""]
    return any(map(_is_secret_word, befores, words, afters))


def _is_secret_word(before: str, word: str, after: str) -> bool:
    if word == "TOKEN":
        return before not in _TOKEN_OF and after not in _TOKEN_MEASURE
    if word == "KEY" and before in _KEY_OF:
        return True
    return word in _SECRET_LAST and not after and before not in _OPEN_KEY_OF


def masked(env: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, with those that look secret masked.

    By their names, and a password in a URL (`http://user:password@proxy`) whatever the name. What
    is no text, such as the name of a secret that is kept elsewhere, stays.
    """

    def shown(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        is_secret = bool(value) and looks_secret(name)
        return MASK if is_secret else _URL_PASSWORD.sub(rf"\1{MASK}", value)

    return {name: shown(name, value) for name, value in env.items()}


def secret_values(env: Mapping[str, object]) -> frozenset[str]:
    """The values to take out of free text; see `telling`."""
    texts = {name: value for name, value in env.items() if isinstance(value, str)}
    values = {value for name, value in texts.items() if looks_secret(name)}
    for value in texts.values():
        values |= _passwords(value)
    return telling(values)


def secrets_in_words(words: Sequence[str]) -> frozenset[str]:
    """The same of a program's arguments, by the names of its options: `--api-key VALUE`,
    `--api-key=VALUE`, `HF_TOKEN=VALUE`.

    Of names with KEY only those of a kind that is secret: `--label-key`, `data.prompt_key=prompt`
    and the like name a column, and are the rule where models are trained.
    """
    values = set[str]()
    for word, following in pairwise([*words, ""]):
        values |= _passwords(word)
        found = _OPTION.fullmatch(word)
        if found is None or not _is_secret_option(found["name"]):
            continue
        if found["value"]:
            values.add(found["value"].strip("\"'"))
        elif found["dashes"] and found["value"] is None and not following.startswith("-"):
            values.add(following)
    return telling(values)


def secrets_in_code(text: str) -> frozenset[str]:
    """The same of source code and settings: `"hf_token": "VALUE"`, `export HF_TOKEN=VALUE`."""
    return telling(value for name, _, value in _ASSIGNED.findall(text) if _is_secret_option(name))


def _is_secret_option(name: str) -> bool:
    words = [word.upper() for word in _WORD.findall(name)]
    is_column = words[-1] in _SECRET_LAST and (len(words) == 1 or words[-2] not in _KEY_OF)
    return looks_secret(name) and not is_column


def _passwords(text: str) -> set[str]:
    return {password for _user, password in _URL_PASSWORD.findall(text)}


def telling(values: Iterable[str]) -> frozenset[str]:
    """Without those that a text holds for other reasons: under four characters, numbers under six
    digits, and words such as `true`; to mask these would spoil every log for no secret."""
    return frozenset(
        value
        for value in values
        if len(value) >= 4
        and value.strip().lower() not in _COMMON
        and not (value.isdecimal() and len(value) < 6)
    )


def mask_text(text: str, secret_values: Iterable[str]) -> str:
    """The text without the secrets, in any form in which a log is likely to hold them.

    That is as they are, as Python, JSON, a shell or a URL write them, and line by line where one
    has several lines (a PEM key).
    """
    for form in _forms(frozenset(secret_values)):
        text = text.replace(form, MASK)
    return text


def masked_in(value: Any, mask: Callable[[str], str]) -> Any:
    """Plain data, with each text in it masked; lists and mappings are made anew, and anything else,
    such as an error or a path, becomes its text."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: masked_in(one, mask) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [masked_in(one, mask) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return mask(str(value))


@contextmanager
def masked_logs(mask: Callable[[str], str]) -> Iterator[None]:
    """While open, no line that this process logs, and no traceback in one, holds a secret."""
    make = logging.getLogRecordFactory()

    def masked_record(*given: Any, **more: Any) -> logging.LogRecord:
        record = make(*given, **more)
        try:
            said = record.getMessage()
        except Exception:  # The handlers say what is wrong with it.
            return record
        if (clean := mask(said)) != said:
            record.msg, record.args = clean, None
        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            if (clean := mask(trace)) != trace:
                record.exc_info, record.exc_text = None, clean
        return record

    logging.setLogRecordFactory(masked_record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


@lru_cache(maxsize=32)
def _forms(values: frozenset[str]) -> tuple[str, ...]:
    """The longest first: a secret may hold another one."""
    forms = {form for value in values for form in _forms_of(value)}
    return tuple(sorted(forms, key=len, reverse=True))


def _forms_of(value: str) -> set[str]:
    lines = [line.strip() for line in value.splitlines()]
    as_json = json.dumps(value)[1:-1]
    forms = {value, as_json, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(as_json)[1:-1]}
    forms |= {repr(value)[1:-1], ascii(value)[1:-1], repr(f"{value}'\"")[1:-4]}
    forms |= {quote(value, safe=""), quote(value), value.replace("'", "'\"'\"'")}
    forms |= {line for line in lines if len(lines) > 1 and len(line) >= 8}
    return {form for form in forms if form}
