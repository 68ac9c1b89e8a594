"""Codecs on one GPU: how much of the device's copy bandwidth each pass reaches, by the bytes that must move.

    python benchmarks/codecs_gpu.py [--numel 100_000_000 1_000_000_000] [--only dgc topk] [--limit-s 140]

Bytes that must move: each input and each state is read once, each output and each new state is written once; terngrad
reads values twice, because it must know the largest before it can round. A copy of as many float32 values, timed in the
same run, reads and writes 8 bytes per element. Times are medians of CUDA's events around the whole call, all launches
and their gaps included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from weft.codecs.base import Bucket
from weft.codecs.make import make_codec
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.plan import Codec as CodecSection

NUM_TENSORS, COLUMNS, NUM_REPLICAS = 4, 4096, 2
SECTIONS = {
    "sign": CodecSection(name="sign"),
    "onebit": CodecSection(name="onebit"),
    "qsgd 2 bits": CodecSection(name="qsgd", levels=4),
    "qsgd 4 bits": CodecSection(name="qsgd", levels=16),
    "qsgd 8 bits": CodecSection(name="qsgd", levels=256),
    "terngrad": CodecSection(name="terngrad"),
    "topk 1 %": CodecSection(name="topk", density=0.01),
    "topk 0.1 %": CodecSection(name="topk", density=0.001),
    "dgc 1 %": CodecSection(name="dgc", density=0.01),
    "dgc 0.1 %": CodecSection(name="dgc", density=0.001),
    "powersgd 1": CodecSection(name="powersgd", rank=1),
    "powersgd 4": CodecSection(name="powersgd", rank=4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", default=[100_000_000, 1_000_000_000])
    parser.add_argument("--only", nargs="+", default=sorted({one.name for one in SECTIONS.values()}))
    parser.add_argument("--limit-s", type=float, default=140.0, help="begin no further codec after so many seconds")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {NUM_REPLICAS} replicas decoded")
    for wanted in arguments.numel:
        bucket = _bucket(wanted, SECTIONS["sign"])
        values = torch.randn(bucket.numel, device="cuda")
        other = torch.empty_like(values)
        copy_s = _time(lambda values=values, other=other: other.copy_(values))  # type: ignore[misc]
        copy_rate = 8 * bucket.numel / copy_s
        del other
        print(f"\n{bucket.numel / 1e6:.0f} M elements; copy {copy_rate / 1e9:.0f} GB/s")
        print(f"{'':12} {'pass':9} {'ms':>8} {'bytes/el.':>9} {'GB/s':>6} {'of copy':>8}")
        for title, section in SECTIONS.items():
            if section.name not in arguments.only:
                continue
            if time.perf_counter() - begun > arguments.limit_s:
                print(f"{title}: no time left")
                continue
            for which, seconds, num_bytes in _measure(section, values, bucket):
                rate = num_bytes / seconds
                per_element = num_bytes / bucket.numel
                print(
                    f"{title:12} {which:9} {1e3 * seconds:8.3f} {per_element:9.2f} {rate / 1e9:6.0f} "
                    f"{rate / copy_rate:8.0%}",
                    flush=True,
                )
            torch.cuda.empty_cache()
        del values
    print(f"\n{time.perf_counter() - begun:.0f} s")


def _bucket(numel: int, section: CodecSection) -> Bucket:
    rows = round(numel / NUM_TENSORS / COLUMNS)
    tensors = tuple(
        CodedTensor(name=f"t{place}", shape=(rows, COLUMNS), offset=place * rows * COLUMNS, numel=rows * COLUMNS)
        for place in range(NUM_TENSORS)
    )
    return Bucket(
        codec=section,
        tensors=tensors,
        numel=NUM_TENSORS * rows * COLUMNS,
        dtype=torch.float32,
        device=torch.device("cuda"),
        replica=0,
        num_replicas=NUM_REPLICAS,
    )


def _measure(section: CodecSection, given: torch.Tensor, like: Bucket) -> list[tuple[str, float, float]]:
    """(pass, seconds, bytes that must move) of every pass of an exchange."""
    numel = like.numel
    bucket = _bucket(numel, section)
    codec = make_codec(bucket)
    if section.name == "dgc":
        codec.momenta = [(0.9, False)] * NUM_TENSORS  # type: ignore[attr-defined]
    flag = torch.zeros(1, device="cuda")
    values, found = given.clone(), []
    forms = codec.begin(0)
    for number, form in enumerate(forms):
        message = torch.zeros(form.numel, dtype=getattr(torch, form.dtype), device="cuda")

        def encode(number: int = number, message: torch.Tensor = message) -> None:
            codec.encode(number, values, message, flag)

        found.append((f"encode {number}", _time(encode), _encoded(section.name, number) * numel + form.num_bytes))
        received = message * NUM_REPLICAS if form.adds_up else torch.stack([message] * NUM_REPLICAS)

        def decode(number: int = number, received: torch.Tensor = received) -> None:
            codec.decode(number, received, values)

        seconds = _time(decode)
        if number == len(forms) - 1:
            written = 12 if section.name == "powersgd" else 4
            found.append((f"decode {number}", seconds, written * numel + received.numel() * received.element_size()))
    return found


def _encoded(name: str, number: int) -> int:
    """Bytes per element that an encoding must read and write, without the message."""
    if name == "powersgd":
        return 12 if number == 0 else 4
    return {"onebit": 12, "topk": 12, "dgc": 20, "terngrad": 8}.get(name, 4)


def _time(call: Callable[[], object], num_times: int = 7) -> float:
    """Seconds of one call, the median of some."""
    for _ in range(2):
        call()
    pairs = []
    for _ in range(num_times):
        pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        pairs[-1][0].record()
        call()
        pairs[-1][1].record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in pairs) / 1e3


if __name__ == "__main__":
    main()
