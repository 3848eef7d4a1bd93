"""Read the metric values that the runs of a matrix's points report, while they run."""

from __future__ import annotations

import logging

from tasks.pipeline.decision import StageRun
from tasks.pipeline.early_stopping import PointHistory
from tasks.processes.place_reader import PlaceReader
from tasks.record.metrics_of_run import MetricReader
from tasks.record.places import RunPlace
from tasks.record.states import RunState

_log = logging.getLogger(__name__)

#: Longest time, in seconds, that the file system of a metrics file may take to answer.
_ANSWERS_WITHIN_S = 5.0


class PointHistories:
    """Reads the metrics that the runs of a parameter sweep have written so far.

    Each call reads only the lines that were added to the metrics files since the previous call.
    """

    def __init__(self) -> None:
        #: Mapping from the name of a run and the key of a metric to the reader of the metric.
        self._readers: dict[tuple[str, str], MetricReader] = {}
        #: Mapping from the name of a run and the key of a metric to the values at the last read.
        self._histories: dict[tuple[str, str], PointHistory] = {}
        #: Metrics that were read after the end of their run, as pairs of the run's name and the
        #: metric's key. These metrics are not read again, because they cannot change.
        self._complete: set[tuple[str, str]] = set()
        #: Names of the runs whose metrics could not be read at the last try.
        self._unreadable: set[str] = set()
        self._files = PlaceReader("")

    def read(self, run: StageRun, key: str) -> PointHistory:
        """Return the values of a metric that a run has reported so far.

        If the metrics files cannot be read now, return the values of the last successful call.

        Args:
            run: A run of a parameter sweep.
            key: Key of the metric.
        """
        metric = (run.name, key)
        if metric not in self._complete and self._read_new(run, key):
            reader = self._readers[metric]
            self._histories[metric] = PointHistory(
                figures=reader.values,
                last_step=reader.last_step or 0.0,
                has_ended=bool(run.stop_reason) or run.ending is RunState.COMPLETED,
            )
            if run.ending is not None:
                self._complete.add(metric)
        return self._histories.get(metric, PointHistory())

    def _read_new(self, run: StageRun, key: str) -> bool:
        """Read the new lines of the metrics of a run. Return False if the lines cannot be read."""
        place = RunPlace.of(run.name)
        reader = self._readers.setdefault((run.name, key), MetricReader(place, key))
        if self._files.is_idle:
            self._files.place = str(place.directory)
        try:
            self._files.ask_blocking(reader.read_new, _ANSWERS_WITHIN_S)
        except FileNotFoundError:
            # There are no metrics to read, because the run has not begun or its directory is on
            # another host.
            return False
        except (OSError, ValueError) as error:
            if run.name not in self._unreadable:
                _log.warning("The metrics of the run %s cannot be read: %s", run.name, error)
            self._unreadable.add(run.name)
            return False
        self._unreadable.discard(run.name)
        return True
