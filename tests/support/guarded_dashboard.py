"""A proxy of a Ray dashboard, which may require a header and HTTPS, and records requests."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_HOST = "127.0.0.1"
#: Request headers that the proxy does not pass to the dashboard.
_NOT_PASSED = {"host", "connection", "authorization", "transfer-encoding", "content-length"}


@dataclass(kw_only=True)
class GuardedDashboard:
    """A running proxy of a Ray dashboard. The object records the headers of all requests."""

    #: URL of the proxy.
    address: str
    #: The headers of each request. Their names are in lower case.
    sent: list[Mapping[str, str]] = field(default_factory=list)

    def values(self, header: str) -> set[str]:
        """Return the values of a header in all requests.

        The set contains an empty string if a request had no such header.
        """
        return {headers.get(header, "") for headers in self.sent}


@contextmanager
def run_guarded_dashboard(
    target: str, *, wants: tuple[str, str] | None = None, certificate: Path | None = None
) -> Iterator[GuardedDashboard]:
    """Run a proxy of a Ray dashboard while the context is open.

    Args:
        target: URL of the dashboard.
        wants: Name and value of a required header. The proxy answers other requests with 403. None
            if no header is required.
        certificate: File with a certificate and its private key, for HTTPS. None for HTTP.
    """

    class Handler(BaseHTTPRequestHandler):
        def _forward(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            dashboard.sent.append(headers)
            body = self.rfile.read(int(headers.get("content-length", "0")))
            if wants is not None and headers.get(wants[0].lower()) != wants[1]:
                self.send_error(403)
                return
            passed = {name: value for name, value in headers.items() if name not in _NOT_PASSED}
            # The request has no timeout, because the dashboard streams a log until its job ends.
            with (
                suppress(OSError, httpx.HTTPError),
                httpx.Client(trust_env=False, timeout=None) as client,
                client.stream(
                    self.command, f"{target}{self.path}", headers=passed, content=body
                ) as answer,
            ):
                self.send_response(answer.status_code)
                for name in ("content-type", "content-encoding"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                for chunk in answer.iter_raw():
                    self.wfile.write(chunk)
                    self.wfile.flush()

        do_GET = do_POST = do_PUT = do_DELETE = _forward

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer((_HOST, 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if certificate is None else "https"
    dashboard = GuardedDashboard(address=f"{scheme}://{_HOST}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield dashboard
    finally:
        server.shutdown()
        server.server_close()


def create_certificate(directory: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate for 127.0.0.1 that is valid for one day.

    Args:
        directory: Directory for the two files.

    Returns:
        The file with the private key and the certificate, for a server; and the file with only the
        certificate, which a client must trust.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "our own")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(_HOST))]), False)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    server_file = directory / "server.pem"
    server_file.write_bytes(private + public)
    trusted_file = directory / "ca.pem"
    trusted_file.write_bytes(public)
    return server_file, trusted_file
