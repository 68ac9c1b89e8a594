"""Before the first step: cut stages, split layers and samples, and test that the answer is unchanged."""
