"""Old import place of the readers of metrics files and logs, until their callers are renamed."""

from tasks.record.log_file import LogFile as LogFile
from tasks.record.metrics_file import Mark as Mark
from tasks.record.metrics_file import MetricsFile as MetricsFile
