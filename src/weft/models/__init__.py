"""Small plain models, for first runs and for tests, whose code does not know of parallelism."""
