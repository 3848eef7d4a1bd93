"""Credentials are sent only to listed Ray clusters and to the cluster of the own run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ray._private.authentication import http_token_authentication

from tasks.ray.dashboard import (
    CLUSTERS_VARIABLE,
    Credentials,
    Dashboard,
    Denied,
    ListedCluster,
    NoAnswer,
    add_listed_clusters,
)
from tasks.spec.run import RunSpec
from tasks.train.plan import component_env
from tests.support.guarded_dashboard import create_certificate, run_guarded_dashboard

ADDRESS = "https://ray:8265"
TOKEN = {"authorization": "Bearer of-ray"}
LISTED = ListedCluster(address=f"{ADDRESS}/", headers={"X-Key": "Basic ${env.OUR_KEY}"}, ca="/ca")


@pytest.fixture(autouse=True)
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn on Ray's token authentication, and set MUSTER_RAY_CLUSTERS to an empty text."""

    def token(headers: dict[str, str]) -> dict[str, str]:
        return {} if "authorization" in map(str.lower, headers) else TOKEN

    monkeypatch.setattr(http_token_authentication, "get_auth_headers_if_auth_enabled", token)
    monkeypatch.setenv("OUR_KEY", "a4711")
    monkeypatch.setenv(CLUSTERS_VARIABLE, "")


def test_listed_cluster_gets_its_headers_and_the_token() -> None:
    credentials = Credentials.of(ADDRESS, [LISTED])

    assert credentials.make_headers() == {"X-Key": "Basic a4711", **TOKEN}
    assert credentials.ca == "/ca"


def test_unlisted_cluster_gets_the_token_only_from_its_own_run() -> None:
    other = "https://other:8265"

    assert Credentials.of(other, [LISTED]).make_headers() == {}
    assert Credentials.of(other, [LISTED], is_own=True).make_headers() == TOKEN


def test_configured_authorization_replaces_the_token() -> None:
    listed = ListedCluster(address=ADDRESS, headers={"Authorization": "Bearer of-the-proxy"})

    assert Credentials.of(ADDRESS, [listed]).make_headers() == {
        "Authorization": "Bearer of-the-proxy"
    }


@pytest.mark.parametrize(
    ("value", "sent", "why"),
    [
        ("plain", "plain", ""),
        ("$${env.OUR_KEY}", "${env.OUR_KEY}", ""),
        (
            "${env.NOT_SET}",
            "",
            "the environment variable NOT_SET, but this process does not have this variable",
        ),
        ("${run.id}", "", r"unknown placeholder \$\{run.id\}\. Write \$\{env.NAME\}"),
    ],
)
def test_header_placeholders_are_read_from_the_environment(value: str, sent: str, why: str) -> None:
    listed = ListedCluster(address=ADDRESS, headers={"X-Key": value})
    credentials = Credentials.of(ADDRESS, [listed])

    if why:
        with pytest.raises(Denied, match=why):
            credentials.make_headers()
    else:
        assert credentials.make_headers()["X-Key"] == sent


def test_new_clusters_are_added_to_the_listed_clusters() -> None:
    first = {"address": "http://a:8265", "headers": {"X": "1"}}

    add_listed_clusters([first, {"address": "no url"}, "nothing"])
    add_listed_clusters([{"address": "http://b:8265"}, {**first, "headers": {"X": "2"}}])
    add_listed_clusters([])

    assert Credentials.own("http://a:8265/").make_headers() == {"X": "2", **TOKEN}
    addresses = {cluster["address"] for cluster in json.loads(os.environ[CLUSTERS_VARIABLE])}
    assert addresses == {"http://a:8265", "http://b:8265"}


def test_components_do_not_inherit_listed_clusters() -> None:
    add_listed_clusters([{"address": ADDRESS, "headers": {"X": "1"}}])
    trainer = {"command": ["true"]}
    spec = RunSpec.model_validate(
        {"name": "trial", "workload": "sft", "components": {"trainer": trainer}}
    )

    env = component_env(spec, "trainer", "trial-sft", 1)

    assert "OUR_KEY" in env
    assert CLUSTERS_VARIABLE not in env


@pytest.mark.asyncio
async def test_https_address_is_verified_with_the_listed_certificates(
    tmp_path: Path,
) -> None:
    whole, trusted = create_certificate(tmp_path)
    with run_guarded_dashboard("http://127.0.0.1:9", certificate=whole) as proxy:

        async def ask(ca: str | None) -> str:
            dashboard = Dashboard(proxy.address, credentials=Credentials(ca=ca, has_token=False))
            try:
                await dashboard.session()
            except (NoAnswer, Denied) as error:
                return str(error)
            finally:
                await dashboard.aclose()
            return ""

        assert "CERTIFICATE_VERIFY_FAILED" in await ask(None)
        assert proxy.sent == []
        assert "certificates of the cluster from /none" in await ask("/none")
        await ask(str(trusted))
        assert len(proxy.sent) == 1
