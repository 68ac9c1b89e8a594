"""A model cut into stages, and a schedule executed on them."""
