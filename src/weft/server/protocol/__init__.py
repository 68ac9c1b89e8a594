"""What passes between workers and servers: messages, keys and connections."""
