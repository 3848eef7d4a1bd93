"""The Prefect server: flow runs, events, artifacts, signals.

The import of this package makes every client of a Prefect server in the process check who listens,
before the client sends the server's password: see `trusted_clients`.
"""

from tasks.server.trusted_clients import guard_prefect_clients

guard_prefect_clients()
