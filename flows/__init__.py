"""The Prefect flows. The import of this package prepares the environment for Prefect's import."""

from tasks.spec.service_links import drop_service_variables

# Prefect reads its settings when it is imported, so the variables must be removed before that.
# `python -m flows.train` imports this package first, and then the flow's module with Prefect.
drop_service_variables()
