"""The plan of a run, as pure data and arithmetic. Nothing in this package imports torch."""
