"""The workers of a run as a server knows them: who is there, how far each is, and what of them is on its way."""
