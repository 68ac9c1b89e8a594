"""Exchanges between ranks: thin calls over torch.distributed that count bytes and seconds by axis."""
