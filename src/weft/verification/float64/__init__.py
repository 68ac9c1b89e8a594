"""What a model or a loss does in a narrower format by itself, made to compute in float64 for a comparison."""
