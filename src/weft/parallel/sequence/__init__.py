"""The ring and ulysses axes on the user's model: attention replaced, positions passed in."""
