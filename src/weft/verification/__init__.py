"""A plan against one process: reference runs, comparison, diagnosis, verdict."""
