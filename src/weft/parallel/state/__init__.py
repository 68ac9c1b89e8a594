"""Weights, buffers and random numbers that must not depend on the plan."""
