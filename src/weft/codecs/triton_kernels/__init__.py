"""Codecs in fused Triton kernels, for float32 buckets on a GPU. A bucket's tensors are served by one launch per pass.

Results are those of torch's functions: to the bit where the arithmetic is elementwise, to rounding where sums are.
Nothing waits for the device, shapes are fixed, and results do not depend on the order in which programs run.
"""
