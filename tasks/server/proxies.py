"""Proxies in the environment variables, such as `http_proxy`, for the clients of a Prefect server.

A server on this machine is never asked through a proxy. For a server on another machine, a client
uses the proxy that the variables select for the server's URL. Other variables have no effect on the
client, so a malformed `all_proxy` does no harm if `http_proxy` is set.

The environment variables stay as they are, because the components of runs inherit them.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx

from tasks.processes.trusted_server import is_address_of_this_machine
from tasks.spec.errors import MusterError
from tasks.spec.secrets import mask_env


class UnusableProxy(MusterError):
    """The proxy in an environment variable cannot be used. The user must correct or unset the
    variable.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """The proxy that an environment variable selects for a URL."""

    #: Name of the environment variable, for example `http_proxy`.
    variable: str
    #: Value of the environment variable, for example `http://proxy.example:3128`.
    value: str
    #: Host name in the URL for which the proxy was selected.
    host: str

    @property
    def address(self) -> str:
        """URL of the proxy. Without a scheme in the environment variable, the scheme is `http`."""
        return self.value if "://" in self.value else f"http://{self.value}"

    def __str__(self) -> str:
        """Return the text `VARIABLE=VALUE`, in which the password of the proxy is masked."""
        masked = mask_env({self.variable: self.value})
        return f"{self.variable}={masked[self.variable]}"

    @property
    def remedy(self) -> str:
        """Advice for a user whose proxy does not work."""
        return (
            f"correct or unset the variable {self.variable}, or add {self.host} to the variable "
            "no_proxy"
        )


def is_on_this_machine(url: str) -> bool:
    """Return True if the host of a URL is an IP address of this machine or the name `localhost`.

    Other host names are not resolved, because in some networks only the proxy can resolve them.
    """
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return is_address_of_this_machine(ip_address(host))
    except ValueError:
        return False


def find_proxy(url: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy that the environment variables select for a URL.

    A variable with a name in lower case has priority over the same name in upper case.

    Returns:
        The proxy. None if no variable selects a proxy, if `no_proxy` lists the host of the URL, or
        if the URL leads to this machine.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return None
    if is_on_this_machine(url) or _is_excepted(host, environment):
        return None
    for scheme in (parts.scheme, "all"):
        for variable in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            if value := environment.get(variable):
                return Proxy(variable=variable, value=value, host=host)
            if variable in environment:
                # Ignore the variable whose name is in upper case. The variable whose name is in
                # lower case has priority, even if its value is empty.
                break
    return None


def _is_excepted(host: str, environment: Mapping[str, str]) -> bool:
    """Return True if the variable `no_proxy` lists the host."""
    hosts = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    return bool(urllib.request.proxy_bypass_environment(host, {"no": hosts}))  # type: ignore[attr-defined]


def make_proxy_options(url: str) -> dict[str, Any]:
    """Return the proxy settings for a URL, as keyword arguments of an httpx client.

    Args:
        url: URL of the server to which the client sends its requests.
    """
    proxy = find_proxy(url)
    if proxy is None:
        return {"trust_env": False}
    return {"trust_env": False, "proxy": proxy.address}


@contextmanager
def name_unusable_proxy(url: str) -> Iterator[None]:
    """Raise UnusableProxy if an httpx client in the `with` block cannot use its proxy.

    Args:
        url: URL of the server to which the client sends its requests.

    Raises:
        UnusableProxy: The address of the proxy is malformed, or its protocol is not available.
    """
    try:
        yield
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        proxy = find_proxy(url)
        if proxy is None:
            raise
        if isinstance(error, ImportError):
            reason = "a SOCKS proxy needs the Python package socksio, which is not installed"
        else:
            reason = f"{proxy.variable} must have the form http://HOST:PORT"
        raise UnusableProxy(
            f"Muster can't use the proxy {proxy} for {url} ({reason}): {proxy.remedy}"
        ) from error
