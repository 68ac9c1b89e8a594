"""Models to train at once and to test with: small, plain, free of parallelism."""
