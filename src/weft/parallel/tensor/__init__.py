"""Tensor parallelism: shares of layers, their exchanges, Megatron sequence parallelism, vocabulary-parallel loss."""
