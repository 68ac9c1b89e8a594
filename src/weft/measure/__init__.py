"""From real things to profiles: look at a model, write down what a plan needs to know of it."""
