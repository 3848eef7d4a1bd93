"""The Prefect server: flow runs, events, artifacts, signals.

The import of this package changes all Prefect clients of this process. Before a client sends the
server's password, it then checks that the server process belongs to a trusted user. See
`trusted_clients`.
"""

from tasks.server.trusted_clients import guard_prefect_clients

guard_prefect_clients()
