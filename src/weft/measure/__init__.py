"""Profiles of models and clusters: a model traced without values, devices and links timed."""
