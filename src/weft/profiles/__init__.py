"""Models and clusters, described as plain data."""
