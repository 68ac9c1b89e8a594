"""A run's pipeline as a picture and as a trace: text made from plain data, without torch."""
