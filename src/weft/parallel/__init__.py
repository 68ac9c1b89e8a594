"""From a model and a mesh to a parallel model."""
