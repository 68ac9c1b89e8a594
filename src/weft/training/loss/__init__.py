"""What a loss is: a sum over targets and their number, also over the samples of all data ranks."""
