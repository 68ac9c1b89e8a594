"""What to do: the plan of a run, as pure data and arithmetic. Nothing in this room imports torch."""
