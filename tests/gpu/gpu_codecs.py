"""Every codec on a GPU, in Triton's kernels, against its path on the CPU; float32.

    python tests/gpu/gpu_codecs.py
    TRITON_INTERPRET=1 python tests/gpu/gpu_codecs.py --interpreter     # the kernels without a GPU, on a few numbers

Prints one line per codec, and ends with 1 if one of them differs. Exchanges of 1, 2 and 4 replicas in this process, of
tensors of odd sizes and of such that can be read in vectors; one exchange of three does not count, which only the GPU
knows; then one that is not finite.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence

import torch

from weft.codecs.base import Bucket, Codec
from weft.codecs.fused import FUSED
from weft.codecs.make import make_codec
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.plan import Codec as CodecSection

NUM_STEPS, NOT_MADE = 4, 1
ODD = ((7, 5), (130, 67), (3, 23_501), (4_099, 1), (5, 9))
EVEN = ((64, 1_024), (256, 576), (2_048, 128))
FEW_NUMBERS = ((9, 67), (20, 30), (4, 8))
CASES: tuple[tuple[str, dict[str, float]], ...] = (
    ("topk", {"density": 0.01}),
    ("topk", {"density": 0.05, "bits": 8}),
    ("topk", {"density": 0.05, "bits": 2, "memory": 0.9}),
    ("dgc", {"density": 0.01}),
    ("dgc", {"density": 0.5, "masking": 0}),
    ("onebit", {"memory": 0.9}),
    ("sign", {}),
    ("qsgd", {"levels": 4}),
    ("qsgd", {"levels": 16}),
    ("qsgd", {"levels": 256}),
    ("terngrad", {}),
    ("powersgd", {"rank": 2}),
    ("powersgd", {"rank": 8, "memory": 0.9}),
)
INTERPRETED = (0, 2, 3, 5, 6, 8, 10, 11)
"""The cases that are tried in Triton's interpreter."""
FEW = 1e-4
"""Share of entries that may differ by more than rounding where sums decide about them (a sign, a code)."""


def main() -> None:
    is_interpreted = "--interpreter" in sys.argv[1:]
    failures = 0
    begun = time.perf_counter()
    for name, settings in [CASES[place] for place in INTERPRETED] if is_interpreted else CASES:
        section = CodecSection(name=name, **{key: _typed(key, value) for key, value in settings.items()})
        problems: list[str] = []
        at = time.perf_counter()
        runs = ((FEW_NUMBERS, (2,)),) if is_interpreted else ((ODD, (1, 2, 4)), (EVEN, (2,)))
        for shapes, replicas in runs:
            for num_replicas in replicas:
                problems += _compare(section, shapes, num_replicas, "cpu" if is_interpreted else "cuda")
        text = "; ".join(problems[:3]) if problems else "equal"
        print(f"{name:9} {settings}: {text} ({time.perf_counter() - at:.1f} s)", flush=True)
        failures += bool(problems)
    print(f"{time.perf_counter() - begun:.0f} s, {failures} codecs differ")
    sys.exit(failures > 0)


def _typed(key: str, value: float) -> float | int | bool:
    field = {one.name: one.default for one in dataclasses.fields(CodecSection)}[key]
    return type(field)(value)


def _compare(section: CodecSection, shapes: Sequence[tuple[int, int]], num_replicas: int, device: str) -> list[str]:
    gap = 0 if shapes is EVEN else 1
    tensors, offset = [], 3 * gap
    for place, shape in enumerate(shapes):
        numel = math.prod(shape) - (place == 1) * gap * 31  # a range of a tensor
        tensors.append(CodedTensor(name=f"t{place}", shape=shape, offset=offset, numel=numel))
        offset += numel + gap * (place % 2)
    sides = [
        _Side(section, tuple(tensors), offset, num_replicas, place, is_fused=is_fused)
        for place, is_fused in (("cpu", False), (device, True))
    ]
    torch.manual_seed(num_replicas)
    problems: list[str] = []
    sizes: dict[str, float] = {}
    for step in range(NUM_STEPS):
        given = [torch.randn(offset) * 10 ** torch.randn(offset) for _ in range(num_replicas)]
        made = step != NOT_MADE
        if step == NUM_STEPS - 1:
            given[0][tensors[-1].offset + 1] = math.nan
            made = False
        results = [side.exchange(step, given, made) for side in sides]
        where = f"{num_replicas} replicas, step {step}"
        if results[0][1] != results[1][1] or results[1][1] != (step == NUM_STEPS - 1):
            problems.append(f"{where}: not finite: {results[0][1]} on the CPU, {results[1][1]} on the GPU")
        if step < NUM_STEPS - 1:
            for one in tensors:
                part = slice(one.offset, one.offset + one.numel)
                sizes[one.name] = max(float(values[part].abs().max()) for values in given)
                problems += _differ(section, f"{where}: {one.name}", results[0][0][part], results[1][0][part])
    for first, second in zip(sides[0].codecs, sides[1].codecs, strict=True):
        states, others = first.tensors(), second.tensors()
        assert states.keys() == others.keys()
        for key, state in states.items():
            where, given_size = f"{num_replicas} replicas: {key}", sizes.get(key.removeprefix("residual/"), 0.0)
            problems += _differ(section, where, state, others[key].cpu(), given=given_size)
    return problems


def _differ(
    section: CodecSection, what: str, expected: torch.Tensor, found: torch.Tensor, *, given: float = 0.0
) -> list[str]:
    """`given`: the largest entry that the tensor was given: the size of rounding, where little is left of it."""
    size = expected.abs().max().clamp(min=max(given, 1e-30))
    errors = (found - expected).abs() / size
    is_exact = section.name in ("sign", "qsgd", "terngrad", "topk", "dgc") and section.bits == 32
    # Thin factors of entries of such unlike sizes are nearly dependent, and rounding grows with that.
    allowed = 0.0 if is_exact else 2e-3 if section.name == "powersgd" else 3e-5
    num_wrong = int((~(errors <= allowed)).sum())
    if num_wrong <= (0 if is_exact else FEW * errors.numel()):
        return []
    return [f"{what}: {num_wrong} of {errors.numel()} entries, by {float(errors.max()):.1e}"]


class _Side:
    """All replicas' codecs on one device."""

    def __init__(
        self,
        section: CodecSection,
        tensors: tuple[CodedTensor, ...],
        numel: int,
        num_replicas: int,
        device: str,
        *,
        is_fused: bool,
    ) -> None:
        self._device, self._is_fused = torch.device(device), is_fused
        self.codecs: list[Codec] = []
        for replica in range(num_replicas):
            bucket = Bucket(
                codec=section,
                tensors=tensors,
                numel=numel,
                dtype=torch.float32,
                device=self._device,
                replica=replica,
                num_replicas=num_replicas,
            )
            codec = FUSED[section.name](bucket) if is_fused else make_codec(bucket)
            if section.name == "dgc":
                codec.momenta = [(0.9, place % 2 == 1) for place in range(len(tensors))]  # type: ignore[attr-defined]
            self.codecs.append(codec)

    def exchange(self, step: int, given: Sequence[torch.Tensor], made: bool) -> tuple[torch.Tensor, bool]:
        """What the first replica ends with; whether the values were found not to be finite."""
        messages = [codec.begin(step) for codec in self.codecs][0]
        values = [one.to(self._device, copy=True) for one in given]
        flag = torch.zeros(1, device=self._device)
        for number, form in enumerate(messages):
            dtype = getattr(torch, form.dtype)
            rows = torch.zeros(len(given), form.numel, dtype=dtype, device=self._device)
            for codec, own, row in zip(self.codecs, values, rows, strict=True):
                codec.encode(number, own, row, flag)
            received = rows
            if form.adds_up:
                received = rows[0].clone()
                for row in rows[1:]:
                    received += row
            for codec, own in zip(self.codecs, values, strict=True):
                codec.decode(number, received, own, scale=0.5)
        for codec in self.codecs:
            codec.end(torch.tensor(float(made)).to(self._device) if self._is_fused else made)
        return values[0].cpu(), bool(flag > 0)


if __name__ == "__main__":
    main()
