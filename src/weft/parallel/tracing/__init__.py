"""The user's model run without values: which block feeds which, and placeholders for what is elsewhere."""
