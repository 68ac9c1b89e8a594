"""What replicas exchange: the messages of codecs, and the buckets of weights."""
