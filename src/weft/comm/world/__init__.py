"""Which device and backend the ranks of a process group have, before any group is made."""
