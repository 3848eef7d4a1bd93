"""Tests of recognising secrets and of masking them in files and logs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.spec.secrets import (
    MASK,
    find_argument_secrets,
    find_code_secrets,
    find_env_secrets,
    looks_secret,
    mask_env,
    mask_logs,
    mask_nested,
    mask_text,
)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "GITHUB_TOKEN",
        "GitHubToken",
        "hf_token",
        "WANDB_API_KEY",
        "OPENAI_API_KEY_2",
        "APIKEY",
        "apiKey",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "PRIVATE_KEY",
        "PRIVATE_KEY_PEM",
        "SSH_KEY",
        "DEPLOY_KEYS",
        "KEY",
        "TOKEN",
        "DB_PASSWORD",
        "PGPASSWORD",
        "MYSQL_PWD",
        "REDIS_PASSWD",
        "SMTP_PASS",
        "GPG_PASSPHRASE",
        "CLIENT_SECRET",
        "SECRETS",
        "GOOGLE_CREDENTIALS",
        "BASIC_AUTH",
        "PREFECT_API_AUTH_STRING",
        "SLACK_WEBHOOK_URL",
        "SESSION_COOKIE",
        "X-Api-Key",
    ],
)
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "TOKENIZER_PATH",
        "MAX_TOKENS",
        "MAX_TOKEN_LENGTH",
        "TOKEN_BUDGET",
        "PAD_TOKEN_ID",
        "EOS_TOKEN",
        "KEYBOARD",
        "MONKEY",
        "AUTHOR",
        "GIT_AUTHOR_NAME",
        "PUBLIC_KEY",
        "CACHE_KEY",
        "KEY_COUNT",
        "PASS_RATE",
        "BYPASS",
        "PWD",
        "OLDPWD",
        "PATH",
        "PATTERN",
        "SSH_AUTH_SOCK",
        "SSH_KEY_FILE",
        "HF_TOKEN_PATH",
        "HF_HUB_OFFLINE",
        "COMPASS",
        "",
        "_",
        "42",
    ],
)
def test_other_names_are_not_recognised_as_secrets(name: str) -> None:
    assert not looks_secret(name)


def test_only_secret_variables_are_masked() -> None:
    env = {"HF_TOKEN": "hf_abc", "HF_HUB_OFFLINE": "1", "API_KEY": ""}

    assert mask_env(env) == {"HF_TOKEN": MASK, "HF_HUB_OFFLINE": "1", "API_KEY": ""}
    assert list(mask_env(env)) == list(env)


def test_password_in_a_url_is_masked_for_any_name() -> None:
    env = {"http_proxy": "http://me:hunter2@proxy:80", "URL": "http://host:80/a:b@c"}

    assert mask_env(env) == {"http_proxy": f"http://me:{MASK}@proxy:80", "URL": env["URL"]}
    assert find_env_secrets(env) == {"hunter2"}


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        ("hunter2", True),
        ("abcd", True),  # the shortest secret that is masked
        ("abc", False),  # too short: it may occur within words
        ("", False),
        ("true", False),
        ("None", False),
        ("12345", False),  # the number may also be a step, a port or a size
        ("123456", True),
    ],
)
def test_common_values_are_not_treated_as_secrets(value: str, is_secret: bool) -> None:
    assert (value in find_env_secrets({"MY_SECRET": value})) is is_secret


@pytest.mark.parametrize(
    ("secret", "text", "result"),
    [
        ("hunter2", "login hunter2, again hunter2", "login ***, again ***"),
        ("hunter2", "nothing here", "nothing here"),
        ('a"b\\c', json.dumps({"k": 'a"b\\c'}), '{"k": "***"}'),  # within JSON
        ("a/b&c=", "http://h/?k=a%2Fb%26c%3D", "http://h/?k=***"),  # within a URL
        ("-----BEGIN\nMIIEvQIBADAN\n", "log: MIIEvQIBADAN", "log: ***"),  # a line of a key
        ("a'b\"c\n", repr(ValueError({"k": "a'b\"c\n"})), "ValueError({'k': '***'})"),
        ("it's", "sh -c 'login it'\"'\"'s'", "sh -c 'login ***'"),  # within a shell's quotes
        ('a"b', json.dumps(json.dumps('a"b')), '"\\"***\\""'),  # JSON within JSON
    ],
)
def test_secrets_are_masked_in_all_spellings(secret: str, text: str, result: str) -> None:
    assert mask_text(text, {secret}) == result


def test_secret_arguments_are_recognised_by_the_option() -> None:
    words = [
        *("python", "serve.py", "--api-key", "sk-12345", "--auth-token=t0ken-1", "HF_TOKEN=hf_abc"),
        *("+trainer.wandb_api_key='k3y-w'", "--proxy", "http://me:hunter2@proxy:80"),
        # These values are no secrets: names of columns of a data set, and common values. The option
        # `--password` has no value, because another option follows.
        *("--label-key", "label", "data.prompt_key=prompt", "--reward-key=score"),
        *("--password", "--seed", "123456", "--max-new-tokens", "4096"),
    ]

    assert find_argument_secrets(words) == {"sk-12345", "t0ken-1", "hf_abc", "k3y-w", "hunter2"}


@pytest.mark.parametrize(
    ("line", "is_secret"),
    [
        ("+export WANDB_API_KEY=0123456789abcdef", True),
        ('+{"hf_token": "0123456789abcdef", "seed": 12345678}', True),
        ("+  password: 0123456789abcdef", True),
        ("+api_key = '0123456789abcdef'", True),
        ("+token = decoder(0123456789abcdef)", False),
        ("+label_key = '0123456789abcdef'", False),
        ("+commit: 0123456789abcdef", False),
    ],
)
def test_secrets_in_source_code_are_recognised_by_the_name(line: str, is_secret: bool) -> None:
    assert find_code_secrets(line) == ({"0123456789abcdef"} if is_secret else set())


def test_objects_are_converted_to_text_and_masked() -> None:
    found = {
        "error": ValueError("no hunter2"),
        "path": Path("/tmp/hunter2"),
        "all": [{"of": ("hunter2", 1, None, True)}],
        "some": {"hunter2"},
    }

    assert mask_nested(found, lambda text: mask_text(text, {"hunter2"})) == {
        "error": "no ***",
        "path": "/tmp/***",
        "all": [{"of": ["***", 1, None, True]}],
        "some": ["***"],
    }


def test_secrets_are_masked_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("tasks.test")

    with mask_logs(lambda text: mask_text(text, {"hunter2"})):
        log.warning("env %s", {"A": "hunter2"})
        try:
            raise ValueError("hunter2") from KeyError("hunter2")
        except ValueError:
            log.exception("it failed")
    log.warning("hunter2 again")

    assert caplog.text.count("hunter2") == 1, caplog.text
    assert "ValueError: ***" in caplog.text and "KeyError: '***'" in caplog.text
    assert "hunter2 again" in caplog.text


def test_secret_that_contains_another_secret_is_masked_completely() -> None:
    assert mask_text("x hunter2-more y", ["hunter2", "hunter2-more"]) == "x *** y"


@settings(deadline=None)
@given(
    st.text(st.characters(codec="ascii", categories=["L"]), min_size=8, max_size=20),
    st.lists(st.text(), max_size=3),
)
def test_masked_text_contains_no_secret(secret: str, parts: list[str]) -> None:
    text = mask_text(secret.join(["", *parts, ""]), {secret})

    assert secret not in text
