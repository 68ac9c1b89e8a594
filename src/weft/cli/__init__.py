"""The commands: one file each, thin over the library."""
