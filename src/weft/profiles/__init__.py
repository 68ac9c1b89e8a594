"""What we have: models, described as plain data."""
