"""Everything that weft changes outside its own code: the user's modules, and functions of torch and transformers."""
