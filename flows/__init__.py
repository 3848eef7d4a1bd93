"""The Prefect flows. The import of this package prepares the environment for Prefect's import."""

import sys

from tasks.show.early_check import report_spec_faults
from tasks.spec.service_links import drop_service_variables
from tasks.train.spec_check import load_checked_spec

# Kubernetes may set variables such as PREFECT_SERVER_API_PORT, which Prefect would read as settings
# during its import. Remove these variables here, because `python -m flows.train` imports this
# package before Prefect.
drop_service_variables()

# Report the faults of a spec before the import of Prefect, which takes about two seconds. Do this
# only for `python -m flows.train`: Python then sets sys.argv[0] to `-m` during the import of this
# package.
if sys.argv[:1] == ["-m"] and "flows.train" in sys.orig_argv:
    exit_code = report_spec_faults(load_checked_spec, sys.argv[1:])
    if exit_code != 0:
        raise SystemExit(exit_code)
