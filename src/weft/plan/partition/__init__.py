"""Index arithmetic: which rank holds which part of what, and the bytes that puts on the wire; no torch."""
