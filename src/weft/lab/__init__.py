"""An emulated network: hosts in namespaces, links of chosen speed and delay."""
