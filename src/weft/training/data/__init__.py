"""Samples: datasets, the order of batches, trees, and the part of a sample a rank gets."""
