"""The rule of every codec, computed by one process for all replicas."""
