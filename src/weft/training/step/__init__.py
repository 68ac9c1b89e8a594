"""The parts of one step: microbatches, loss, scaling, clipping, update, pipeline steps."""
