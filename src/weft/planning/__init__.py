"""The predicted memory and time of a plan, before it runs."""
