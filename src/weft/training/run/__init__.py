"""One run from a job file to its end: loop, components, metrics, stop."""
