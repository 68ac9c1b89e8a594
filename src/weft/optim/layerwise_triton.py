"""LARS and LAMB in one launch per pass over many tensors; needs Triton. `layerwise.py` does it by torch's functions.

A program has one block of one tensor (`block_jobs.py`). The first pass updates moments and sums squares; the program
that ends the last block of a tensor adds up these sums, in the order of blocks. The second updates weights. It goes
through the blocks backwards: what the first touched last is still in the GPU's cache.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.optim.block_jobs import NUM_FIELDS, BlockJobs, flat
from weft.optim.layerwise import Batch, bias_corrections

BLOCK = 2048
"""Elements of a job."""
_SUMMED = 1024
"""Blocks whose sums are added up at a time."""


class Kernels:
    """The kernel's tables for one batch, kept as long as the batch has the same tensors."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self._key: tuple[Any, ...] | None = None
        self._addresses: list[int] = []
        self._address_table = self._corrections = torch.empty(0)

    def first(self, batch: Batch, found_inf: Tensor | None) -> Tensor | None:
        """The first pass; returns the squares of the tensors, for the second. A batch that does not adapt needs one
        pass only, and gives none."""
        self._prepare(batch)
        self._corrections = self._no_corrections if batch.steps is None else bias_corrections(batch)
        self._counters.zero_()
        self._launch(batch, self._squares, found_inf, second=False)
        return self._squares if batch.adapts else None

    def second(self, batch: Batch, squares: Tensor, found_inf: Tensor | None) -> None:
        """The second pass, with the squares of whole tensors."""
        # Not copied over this rank's own: the kernel writes none of a tensor that is empty here, and they stay 0.
        self._launch(batch, squares.contiguous(), found_inf, second=True)

    def _prepare(self, batch: Batch) -> None:
        device = batch.weights[0].device
        key = (batch.numbers, tuple(weight.numel() for weight in batch.weights), batch.counted)
        if key != self._key:
            self._key = key
            self._lay_out(batch, device)
            self._addresses = []
        lists = (batch.gradients, batch.weights, *batch.states)
        addresses = [one.data_ptr() for tensors in lists for one in tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self._address_table = _to_device(addresses, device)
            self._is_aligned = self._is_even and all(address % 16 == 0 for address in addresses)

    def _lay_out(self, batch: Batch, device: torch.device) -> None:
        num_tensors = len(batch.weights)
        jobs = BlockJobs([weight.numel() for weight in batch.weights], batch.counted, block=BLOCK)
        self._num_jobs = len(jobs.jobs)
        self._jobs, self._ends = _to_device(flat(jobs.jobs), device), _to_device(jobs.ends, device)
        self._sums = torch.zeros(2 * max(self._num_jobs, 1), dtype=torch.float64, device=device)
        self._squares = torch.zeros(2, num_tensors, dtype=torch.float64, device=device)
        self._counters = torch.zeros(num_tensors, dtype=torch.int32, device=device)
        self._no_corrections = torch.ones(1, dtype=torch.float64, device=device)
        self._no_flag = torch.zeros(1, device=device)
        # Vectors of 16 bytes need places that are multiples of 8 elements.
        self._is_even = all(job[1] % 8 == 0 and job[2] % 8 == 0 for job in jobs.jobs)

    def _launch(self, batch: Batch, squares: Tensor, found_inf: Tensor | None, *, second: bool) -> None:
        settings, rule = batch.settings, self.settings
        if not self._num_jobs:
            return
        # In double precision: of 1 - β, where β is close to 1, float32 would keep few digits.
        rest, rest2 = 1.0 - float(rule["momentum"]), 1.0 - float(rule.get("beta2", 0.0))
        with torch.cuda.device_of(batch.weights[0]):  # Triton launches on the current device
            _update_blocks[(self._num_jobs,)](
                self._jobs,
                self._address_table,
                self._ends,
                self._corrections,
                self._sums,
                squares,
                self._counters,
                self._no_flag if found_inf is None else found_inf,
                len(batch.weights),
                float(settings["lr"]),
                float(settings["weight_decay"]),
                float(rule["momentum"]),
                rest,
                rest2,
                float(rule.get("eps", 0.0)),
                float(rule.get("trust", 1.0)),
                float(rule["low"]),
                float(rule["high"]),
                RULE=rule["rule"],
                ADAPTS=batch.adapts,
                SECOND=second,
                HAS_FLAG=found_inf is not None,
                IS_ALIGNED=self._is_aligned,
                DTYPE=_DTYPES[batch.weights[0].dtype],
                BLOCK=BLOCK,
                SUMMED=_SUMMED,
                FIELDS=NUM_FIELDS,
                num_warps=8,
            )


def _to_device(values: list[int], device: torch.device) -> Tensor:
    """A table on the device, without waiting for it."""
    table = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def try_kernels() -> None:
    """Compile and run the kernel on a few numbers; raises where that does not work."""
    device = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
    some = [torch.ones(8, device=device)]
    settings = {"lr": 0.0, "weight_decay": 0.0, "adapt": True, "betas": (0.9, 0.999)}
    batch = Batch(
        settings=settings,
        numbers=(0,),
        weights=some,
        gradients=some,
        states=(some, some),
        steps=torch.ones(1, device=device),
        counted=(None,),
    )
    kernels = Kernels()
    kernels.settings = {"rule": 0, "momentum": 0.9, "beta2": 0.999, "eps": 1e-6, "low": 0.0, "high": 1.0}
    squares = kernels.first(batch, None)
    assert squares is not None
    kernels.second(batch, squares, None)


@triton.jit
def _update_blocks(
    jobs, addresses, ends, corrections, sums, squares, counters, found_inf,
    num_tensors, lr, decay, momentum, rest, rest2, eps, trust, low, high,
    RULE: tl.constexpr, ADAPTS: tl.constexpr, SECOND: tl.constexpr, HAS_FLAG: tl.constexpr, IS_ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """RULE 0: LAMB; 1: LARS with scaled gradients; 2: LARS with a normalised momentum. `momentum` is LAMB's β₁ too;
    `rest` is 1 - momentum, `rest2` 1 - β₂."""
    is_on = True
    if HAS_FLAG:
        is_on = tl.load(found_inf) == 0.0
    if is_on:
        number = tl.program_id(0)
        if SECOND:
            number = tl.num_programs(0) - 1 - number
        job = jobs + number.to(tl.int64) * FIELDS
        tensor = tl.load(job)
        start = tl.load(job + 1)
        stop = tl.load(job + 2)
        at_g = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))
        at_w = tl.load(addresses + num_tensors + tensor).to(tl.pointer_type(DTYPE))
        at_m = tl.load(addresses + 2 * num_tensors + tensor).to(tl.pointer_type(DTYPE))
        at_v = at_m
        of_mean = 1.0
        of_square = 1.0
        if RULE == 0:
            at_v = tl.load(addresses + 3 * num_tensors + tensor).to(tl.pointer_type(DTYPE))
            of_mean = 1.0 / tl.load(corrections + tensor).to(tl.float32)
            of_square = 1.0 / tl.sqrt(tl.load(corrections + num_tensors + tensor).to(tl.float32))
        if IS_ALIGNED:
            start = tl.multiple_of(start, 8)
            stop = tl.multiple_of(stop, 8)
            at_g = tl.multiple_of(at_g, 16)
            at_w = tl.multiple_of(at_w, 16)
            at_m = tl.multiple_of(at_m, 16)
            at_v = tl.multiple_of(at_v, 16)
        entry = start + tl.arange(0, BLOCK)
        here = entry < stop
        if SECOND:
            _second_pass(
                at_g + entry, at_w + entry, at_m + entry, at_v + entry, here,
                tl.load(squares + tensor), tl.load(squares + num_tensors + tensor),
                lr, decay, momentum, eps, trust, low, high, of_mean, of_square, RULE, DTYPE,
            )  # fmt: skip
        else:
            _first_pass(
                at_g + entry, at_w + entry, at_m + entry, at_v + entry, here, tl.load(job + 3) != 0, tensor, number,
                ends, sums, squares, counters, num_tensors, lr, decay, momentum, rest, rest2, eps, of_mean, of_square,
                RULE, ADAPTS, DTYPE, SUMMED,
            )  # fmt: skip


@triton.jit
def _first_pass(
    at_g, at_w, at_m, at_v, here, is_counted, tensor, number,
    ends, sums, squares, counters, num_tensors, lr, decay, momentum, rest, rest2, eps, of_mean, of_square,
    RULE: tl.constexpr, ADAPTS: tl.constexpr, DTYPE: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    w = tl.load(at_w, mask=here, other=0.0).to(tl.float32)
    g = tl.load(at_g, mask=here, other=0.0).to(tl.float32)
    update = g
    if RULE == 1:
        if not ADAPTS:
            old = tl.load(at_m, mask=here, other=0.0).to(tl.float32)
            new = (momentum * old + lr * (g + decay * w)).to(DTYPE)
            tl.store(at_m, new, mask=here)
            tl.store(at_w, (w - new.to(tl.float32)).to(DTYPE), mask=here)
    else:
        old = tl.load(at_m, mask=here, other=0.0).to(tl.float32)
        added = g + decay * w if RULE == 2 else g
        new = (old + rest * (added - old)).to(DTYPE)
        tl.store(at_m, new, mask=here)
        update = new.to(tl.float32)
        if RULE == 0:
            square = tl.load(at_v, mask=here, other=0.0).to(tl.float32)
            square = (square + rest2 * (g * g - square)).to(DTYPE)
            tl.store(at_v, square, mask=here)
            update = update * of_mean / (tl.sqrt(square.to(tl.float32)) * of_square + eps) + decay * w
        if not ADAPTS:
            tl.store(at_w, (w - lr * update).to(DTYPE), mask=here)
    if ADAPTS:
        counts = here & is_counted
        place = number.to(tl.int64)
        tl.store(sums + 2 * place, tl.sum(tl.where(counts, w * w, 0.0)).to(tl.float64))
        tl.store(sums + 2 * place + 1, tl.sum(tl.where(counts, update * update, 0.0)).to(tl.float64))
        tl.debug_barrier()  # all stores of this program are made before it says so
        num_done = tl.atomic_add(counters + tensor, 1) + 1
        begin = tl.load(ends + tensor)
        end = tl.load(ends + tensor + 1)
        if num_done == end - begin:
            total_w = tl.zeros((SUMMED,), dtype=tl.float64)
            total_u = tl.zeros((SUMMED,), dtype=tl.float64)
            while begin < end:
                block = begin + tl.arange(0, SUMMED)
                total_w += tl.load(sums + 2 * block, mask=block < end, other=0.0, cache_modifier=".cg")
                total_u += tl.load(sums + 2 * block + 1, mask=block < end, other=0.0, cache_modifier=".cg")
                begin += SUMMED
            tl.store(squares + tensor, tl.sum(total_w))
            tl.store(squares + num_tensors + tensor, tl.sum(total_u))


@triton.jit
def _second_pass(
    at_g, at_w, at_m, at_v, here, of_w, of_u,
    lr, decay, momentum, eps, trust, low, high, of_mean, of_square, RULE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    norm_w = tl.sqrt(of_w)
    norm_u = tl.sqrt(of_u)
    if RULE == 1:
        ratio = trust * norm_w / (norm_u + decay * norm_w)
    else:
        ratio = trust * tl.minimum(tl.maximum(norm_w, low), high) / norm_u
    rate = lr * tl.where((of_w > 0.0) & (of_u > 0.0), ratio, 1.0).to(tl.float32)
    w = tl.load(at_w, mask=here, other=0.0).to(tl.float32)
    m = tl.load(at_m, mask=here, other=0.0).to(tl.float32)
    if RULE == 1:
        g = tl.load(at_g, mask=here, other=0.0).to(tl.float32)
        new = (momentum * m + rate * (g + decay * w)).to(DTYPE)
        tl.store(at_m, new, mask=here)
        tl.store(at_w, (w - new.to(tl.float32)).to(DTYPE), mask=here)
    else:
        update = m
        if RULE == 0:
            v = tl.load(at_v, mask=here, other=0.0).to(tl.float32)
            update = m * of_mean / (tl.sqrt(v) * of_square + eps) + decay * w
        tl.store(at_w, (w - rate * update).to(DTYPE), mask=here)
