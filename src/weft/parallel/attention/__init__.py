"""Attention over a sequence that several ranks hold: ring, Ulysses, kernels, masks."""
