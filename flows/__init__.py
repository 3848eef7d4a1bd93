"""The Prefect flows. The import of this package prepares the environment for Prefect's import."""

from tasks.spec.service_links import drop_service_variables

# Kubernetes may set variables such as PREFECT_SERVER_API_PORT, which Prefect would read as settings
# when it is imported. So these variables must be removed before the import.
# `python -m flows.train` imports this package first, and then the flow's module with Prefect.
drop_service_variables()
