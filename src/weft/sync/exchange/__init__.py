"""Exchanges between replicas: buckets of weights, buckets through codecs, the outer step."""
