"""What messages are made of: packed bits, random numbers, sparse entries."""
