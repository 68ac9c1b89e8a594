"""Codes of 1, 2, 4 or 8 bits packed into bytes, low bits first: entry i of 2 bits is in byte i // 4, from bit 2·(i % 4)
on. Bits of the last byte that no entry has are 0."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    """Write the bytes of these codes, uint8 [n], into `packed`, uint8 [ceil(n·bits / 8)]."""
    if bits == 8:
        packed.copy_(codes)
        return
    per_byte = 8 // bits
    num_missing = packed.numel() * per_byte - codes.numel()
    if num_missing:
        codes = torch.cat([codes, codes.new_zeros(num_missing)])
    columns = codes.view(-1, per_byte)
    packed.copy_(columns[:, 0])
    for place in range(1, per_byte):
        packed |= columns[:, place] << place * bits


def unpack(packed: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """The codes, uint8, that `pack` has written."""
    if bits == 8:
        return packed
    codes = torch.empty(packed.numel(), 8 // bits, dtype=torch.uint8, device=packed.device)
    for place in range(codes.shape[1]):
        torch.bitwise_and(packed >> place * bits, 2**bits - 1, out=codes[:, place])
    return codes.view(-1)[:num_codes]
