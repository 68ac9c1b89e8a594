"""Images split by rows: a tensor subclass with halo exchange."""
