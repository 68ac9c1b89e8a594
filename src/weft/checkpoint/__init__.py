"""Save, load, pretrained weights: files that do not depend on the plan."""
