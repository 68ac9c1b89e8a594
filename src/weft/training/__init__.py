"""Training: `parallelize`, the trainer and its steps, data, and runs from job files."""
