"""What each backend's servers run, by which requests they are judged, and what an answer proves."""
