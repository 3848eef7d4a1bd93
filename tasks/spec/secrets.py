"""Keeping secrets out of what is written down: by the names of environment variables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
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


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """The variables, with those that look secret masked.

    By their names, and a password in a URL (`http://user:password@proxy`) whatever the name.
    """
    return {
        name: MASK if value and looks_secret(name) else _URL_PASSWORD.sub(rf"\1{MASK}", value)
        for name, value in env.items()
    }


def secret_values(env: Mapping[str, str]) -> frozenset[str]:
    """The values to take out of free text.

    Values that a text holds for other reasons are left: under four characters, numbers under six
    digits, and words such as `true`; to mask these would spoil every log for no secret.
    """
    values = {value for name, value in env.items() if looks_secret(name)}
    for value in env.values():
        values.update(password for _user, password in _URL_PASSWORD.findall(value))
    return frozenset(value for value in values if _is_telling(value))


def _is_telling(value: str) -> bool:
    if len(value) < 4 or value.strip().lower() in _COMMON:
        return False
    return not (value.isdecimal() and len(value) < 6)


def mask_text(text: str, secret_values: Iterable[str]) -> str:
    """The text without the secrets, in any form in which a log is likely to hold them.

    That is as they are, within JSON, within a URL, and line by line where one has several lines
    (a PEM key).
    """
    forms = {form for value in secret_values for form in _forms(value)}
    for form in sorted(forms, key=len, reverse=True):  # a secret may hold another one
        text = text.replace(form, MASK)
    return text


def masked_in(value: Any, mask: Callable[[str], str]) -> Any:
    """Plain data, with each text in it masked; lists and mappings are made anew."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: masked_in(one, mask) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked_in(one, mask) for one in value]
    return value


def _forms(value: str) -> set[str]:
    lines = [line.strip() for line in value.splitlines()]
    forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    forms |= {quote(value, safe=""), quote(value)}
    forms |= {line for line in lines if len(lines) > 1 and len(line) >= 8}
    return {form for form in forms if form}
