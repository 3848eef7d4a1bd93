"""URLs of pages in the Prefect UI.

This module must not import Prefect. The command `muster` uses the module before it sets the
environment variables that Prefect reads.
"""

from __future__ import annotations

#: Path of the newer Prefect UI. A user who is not logged in sees a login form, and then the page.
#: The older UI at `/` shows an error instead.
#: Source: prefect/server/api/server.py, _resolve_ui_base_urls.
_UI_PATH = "/v2"
#: Beginning of each URL in the UI of Prefect Cloud. This UI has no path `/v2`.
_CLOUD_UI = "https://app.prefect.cloud"


def make_page_url(ui_url: str, page: str, *, has_password: bool = False) -> str:
    """Return the URL of a page in the Prefect UI.

    If the server has a password, the URL leads through the login form. A user who is logged in sees
    the page at once. With a direct URL, the page of a deployment would fail after the login,
    because the UI adds the query `?tab=` twice.

    Args:
        ui_url: URL of the Prefect UI. If empty, the path of the page on the server is returned.
        page: Path of the page in the UI, such as `runs/flow-run/ID`.
        has_password: True if the server requires a password.
    """
    base = ui_url.rstrip("/")
    path = page.lstrip("/")
    if base.startswith(_CLOUD_UI):
        return f"{base}/{path}"
    base = base.removesuffix(_UI_PATH) + _UI_PATH
    return f"{base}/login?redirectTo=/{path}" if has_password else f"{base}/{path}"
