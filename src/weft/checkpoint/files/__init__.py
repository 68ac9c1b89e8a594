"""The files of a checkpoint: their format and checksums, written and read so that all ranks agree."""
