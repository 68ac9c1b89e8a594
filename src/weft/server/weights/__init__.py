"""The weights of a server, and how they are updated."""
