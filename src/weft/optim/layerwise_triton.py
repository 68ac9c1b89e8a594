"""LARS and LAMB in one kernel for many tensors; needs Triton. `layerwise.py` does the same in torch's functions.

A job is a block of one tensor in one pass (`block_jobs.py`). The first pass updates moments and sums squares; the
program that ends the last block of a tensor adds up these sums, in the order of blocks. The second updates weights.

Where no other rank holds parts of the tensors, both passes are one launch: the second pass of a tensor follows the
first closely enough to find its numbers in the GPU's cache, so LAMB, which touches weights and moments twice, does not
read them twice from memory. Jobs are given out by a counter, in their order, so what a job waits for has been started
before it, and never waits itself for a later one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.optim.block_jobs import NUM_FIELDS, BlockJobs, flat
from weft.optim.layerwise import Batch, bias_corrections

BLOCK = 2048
"""Elements of a job."""
_LAG = 512
"""Jobs between the first pass of a tensor and its second: about as many as run at once."""
_READY = 1 << 30
"""Written over the count of a tensor's finished blocks when its sums are complete."""
_SUMMED = 1024
"""Blocks whose sums are added up at a time."""


class Kernels:
    """The kernel's tables for one batch, kept as long as the batch has the same tensors."""

    in_one_launch = False
    """Both passes in one launch, where nothing is exchanged between them; benchmarks/optimizers.py compares."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self._key: tuple[Any, ...] | None = None
        self._addresses: list[int] = []
        self._address_table = self._flag = torch.empty(0)

    def first(self, batch: Batch, found_inf: Tensor | None, *, both: bool) -> Tensor | None:
        """The first pass, or both; returns the squares of the tensors, for the second. A batch that does not adapt
        needs one pass only, and gives none."""
        self._prepare(batch)
        if not (both and batch.adapts):
            self._launch(batch, self._first_jobs, found_inf, waits=False)
            return self._squares if batch.adapts else None
        if self.in_one_launch:
            self._launch(batch, self._both, found_inf, waits=True)
        else:
            self._launch(batch, self._first_jobs, found_inf, waits=False)
            self._launch(batch, self._second_jobs, found_inf, waits=False)
        return None

    def second(self, batch: Batch, squares: Tensor, found_inf: Tensor | None) -> None:
        """The second pass, with the squares of whole tensors."""
        self._squares.copy_(squares)
        self._launch(batch, self._second_jobs, found_inf, waits=False)

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
        self._first_jobs, self._second_jobs = (
            _to_device(flat(jobs.first), device),
            _to_device(flat(jobs.second), device),
        )
        self._both = _to_device(flat(jobs.interleaved(lag=_LAG)), device)
        ends, num_blocks = jobs.ends, jobs.ends[-1]
        self._ends = _to_device(ends, device)
        self._sums = torch.zeros(2 * max(num_blocks, 1), dtype=torch.float64, device=device)
        self._squares = torch.zeros(2, num_tensors, dtype=torch.float64, device=device)
        self._counters = torch.zeros(num_tensors + 1, dtype=torch.int32, device=device)
        self._no_corrections = torch.ones(1, dtype=torch.float64, device=device)
        self._no_flag = torch.zeros(1, device=device)
        # Vectors of 16 bytes need places that are multiples of 8 elements.
        self._is_even = all(job[1] % 8 == 0 and job[2] % 8 == 0 for job in jobs.first)

    def _launch(self, batch: Batch, jobs: Tensor, found_inf: Tensor | None, *, waits: bool) -> None:
        settings, rule, num_jobs = batch.settings, self.settings, jobs.numel() // NUM_FIELDS
        if not num_jobs:
            return
        corrections = self._no_corrections
        if batch.steps is not None:
            corrections = bias_corrections(batch)
        self._counters.zero_()
        with torch.cuda.device_of(batch.weights[0]):  # Triton launches on the current device
            _update_blocks[(num_jobs,)](
                jobs,
                self._address_table,
                self._ends,
                corrections,
                self._sums,
                self._squares,
                self._counters,
                self._no_flag if found_inf is None else found_inf,
                len(batch.weights),
                float(settings["lr"]),
                float(settings["weight_decay"]),
                float(rule["momentum"]),
                float(rule.get("beta2", 0.0)),
                float(rule.get("eps", 0.0)),
                float(rule.get("trust", 1.0)),
                float(rule["low"]),
                float(rule["high"]),
                RULE=rule["rule"],
                ADAPTS=batch.adapts,
                WAITS=waits,
                HAS_FLAG=found_inf is not None,
                IS_ALIGNED=self._is_aligned,
                DTYPE=_DTYPES[batch.weights[0].dtype],
                BLOCK=BLOCK,
                SUMMED=_SUMMED,
                FIELDS=NUM_FIELDS,
                READY=_READY,
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
    kernels.settings = {"rule": 1, "momentum": 0.0, "low": 0.0, "high": 1.0}
    kernels.first(replace(batch, steps=None), None, both=True)


@triton.jit
def _update_blocks(
    jobs, addresses, ends, corrections, sums, squares, counters, found_inf,
    num_tensors, lr, decay, momentum, beta2, eps, trust, low, high,
    RULE: tl.constexpr, ADAPTS: tl.constexpr, WAITS: tl.constexpr, HAS_FLAG: tl.constexpr, IS_ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr, FIELDS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """RULE 0: LAMB; 1: LARS with scaled gradients; 2: LARS with a normalised momentum. `momentum` is LAMB's β₁."""
    is_on = True
    if HAS_FLAG:
        is_on = tl.load(found_inf) == 0.0
    if is_on:
        number = tl.program_id(0)
        if WAITS:
            number = tl.atomic_add(counters + num_tensors, 1)
        job = jobs + number.to(tl.int64) * FIELDS
        tensor = tl.load(job)
        start = tl.load(job + 1)
        stop = tl.load(job + 2)
        place = tl.load(job + 3)
        flags = tl.load(job + 4)
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
        if (flags & 1) == 0:
            _first_pass(
                at_g + entry, at_w + entry, at_m + entry, at_v + entry, here, (flags & 2) != 0, tensor, place,
                ends, sums, squares, counters, num_tensors, lr, decay, momentum, beta2, eps, of_mean, of_square,
                RULE, ADAPTS, DTYPE, SUMMED, READY,
            )  # fmt: skip
        else:
            if WAITS:
                while tl.atomic_add(counters + tensor, 0) < READY:
                    pass
            of_w = tl.load(squares + tensor, cache_modifier=".cg")
            of_u = tl.load(squares + num_tensors + tensor, cache_modifier=".cg")
            _second_pass(
                at_g + entry, at_w + entry, at_m + entry, at_v + entry, here, of_w, of_u,
                lr, decay, momentum, eps, trust, low, high, of_mean, of_square, RULE, DTYPE,
            )  # fmt: skip


@triton.jit
def _first_pass(
    at_g, at_w, at_m, at_v, here, is_counted, tensor, place,
    ends, sums, squares, counters, num_tensors, lr, decay, momentum, beta2, eps, of_mean, of_square,
    RULE: tl.constexpr, ADAPTS: tl.constexpr, DTYPE: tl.constexpr, SUMMED: tl.constexpr, READY: tl.constexpr,
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
        new = (old + (1 - momentum) * (added - old)).to(DTYPE)
        tl.store(at_m, new, mask=here)
        update = new.to(tl.float32)
        if RULE == 0:
            square = tl.load(at_v, mask=here, other=0.0).to(tl.float32)
            square = (beta2 * square + (1 - beta2) * g * g).to(DTYPE)
            tl.store(at_v, square, mask=here)
            update = update * of_mean / (tl.sqrt(square.to(tl.float32)) * of_square + eps) + decay * w
        if not ADAPTS:
            tl.store(at_w, (w - lr * update).to(DTYPE), mask=here)
    if ADAPTS:
        counts = here & is_counted
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
            tl.debug_barrier()
            tl.atomic_xchg(counters + tensor, READY)


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
    # Around the first-level cache, which may have these entries as they were before the first pass.
    w = tl.load(at_w, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    m = tl.load(at_m, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    if RULE == 1:
        g = tl.load(at_g, mask=here, other=0.0).to(tl.float32)
        new = (momentum * m + rate * (g + decay * w)).to(DTYPE)
        tl.store(at_m, new, mask=here)
        tl.store(at_w, (w - new.to(tl.float32)).to(DTYPE), mask=here)
    else:
        update = m
        if RULE == 0:
            v = tl.load(at_v, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
            update = m * of_mean / (tl.sqrt(v) * of_square + eps) + decay * w
        tl.store(at_w, (w - rate * update).to(DTYPE), mask=here)
