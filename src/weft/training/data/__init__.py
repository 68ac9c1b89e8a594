"""Samples: datasets, the order of batches, trees, and the split of samples over ranks."""
