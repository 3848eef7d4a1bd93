"""The Prefect server: flow runs, events, artifacts, signals.

When this package is imported, the clients of Prefect in this process are changed. Each client then
checks that the server belongs to a trusted user before it sends the server's password. See
`trusted_clients`.
"""

from tasks.server.trusted_clients import guard_prefect_clients

guard_prefect_clients()
