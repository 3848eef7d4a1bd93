"""The Prefect flows. The import of this package prepares the environment for Prefect's import."""

from tasks.spec.service_links import drop_service_variables

# Prefect reads its settings when it is imported, and `python -m flows.train` imports Prefect first.
drop_service_variables()
