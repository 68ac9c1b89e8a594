"""When gradients travel, and with whom."""
