"""Pipeline schedules as lists of actions (1F1B, interleaved, zero-bubble, PipeDream), cuts and timelines; no torch."""
