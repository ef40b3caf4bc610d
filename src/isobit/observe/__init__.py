"""What a run shows: figures, lines on the console, trackers, the report."""
