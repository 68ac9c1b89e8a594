"""Inner loops of codecs in C: a C file per family of codecs, and beside it the Python file that calls it.

Every loop does what torch's operations in the codec do, to the bit, and is used for host tensors where it could be
compiled.
"""
