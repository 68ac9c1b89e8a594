"""ZeRO: flat parameter buffers, the ranks that share one, gather and free (stage 3)."""
