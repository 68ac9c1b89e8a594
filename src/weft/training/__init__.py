"""From a plan to a trained model: data, steps, precision, checkpoints, metrics and the loop."""
