"""Codecs: what travels between replicas."""
