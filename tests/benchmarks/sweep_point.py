"""One point of the benchmark `sweep`: `POINT=NUMBER:SECONDS python -I -S sweep_point.py TRACE`.

The program sleeps for SECONDS. It appends two lines to the file TRACE, one before and one after the
sleep: the event `begin` or `end`, the number of the point, the number of its GPU, and the time in
nanoseconds of CLOCK_MONOTONIC. This clock is the same in all processes of the machine. The program
uses only the standard library, so that its own start takes little time.
"""

import os
import sys
import time


def note(trace: str, event: str, number: str) -> None:
    """Append a line to the trace with one `os.write`, so that lines of two points never mix."""
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    line = f"{event} {number} {gpu} {time.monotonic_ns()}\n"
    descriptor = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def main() -> None:
    trace = sys.argv[1]
    number, _, seconds = os.environ["POINT"].partition(":")
    note(trace, "begin", number)
    time.sleep(float(seconds))
    note(trace, "end", number)


if __name__ == "__main__":
    main()
