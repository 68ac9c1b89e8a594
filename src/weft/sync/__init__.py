"""Gradient synchronisation: when gradients are exchanged, and between which ranks."""
