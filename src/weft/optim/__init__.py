"""Optimizers weft adds to torch's, and schedules of the learning rate."""
