"""Bytes sent for images split by rows are those of `plan/partition/rows.py`; memory falls with the number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from image_rows import images, rows_group
from ranks import ranks
from torch import Tensor, nn

from weft.comm.group import Group
from weft.measure.liveness import LiveBytes
from weft.parallel.spatial.row_tensor import RowTensor
from weft.parallel.spatial.spatial_parallel import SpatialParallel
from weft.plan.partition.rows import Window, exchange_for, halo_bytes, join_bytes
from weft.plan.partition.wire import sent_bytes

SAMPLES, WIDTH, ITEM_BYTES = 2, 11, 8


class Halos(nn.Module):
    """Three windows of different shapes; the input needs no gradient, so the first has no backward exchange."""

    WINDOWS = (
        Window(kernel=3, before=1, after=1),
        Window(kernel=3, stride=2),
        Window(kernel=5, stride=1, before=4, after=4, dilation=2),
    )

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, (3, 1), padding=(1, 0))
        self.last = nn.Conv2d(4, 5, (5, 1), padding=(4, 0), dilation=(2, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), (3, 1), stride=(2, 1))
        return F.gelu(self.last(x))


def check_bytes(num_ranks: int, height: int, leave: Callable[[Tensor], Tensor], left: Callable[[int], int]) -> None:
    """`left`: bytes that joining or reducing a map of this height sends, in both passes."""
    group, model = rows_group(num_ranks), Halos()
    before = group.traffic.sent_bytes
    output = SpatialParallel(group).call(lambda x: leave(model(x)), images(height, samples=SAMPLES, width=WIDTH))
    output.sum().backward()
    expected = 0
    for number, (window, channels) in enumerate(zip(Halos.WINDOWS, (3, 4, 4), strict=True)):
        exchange, row_bytes = exchange_for(window, height, num_ranks), SAMPLES * channels * WIDTH * ITEM_BYTES
        expected += halo_bytes(exchange, group.index, row_bytes=row_bytes, backward=False)
        if number:
            expected += halo_bytes(exchange, group.index, row_bytes=row_bytes, backward=True)
        height = exchange.out_height
    assert group.traffic.sent_bytes - before == expected + left(height)


def check_all(num_ranks: int) -> None:
    def joins(height: int) -> int:
        return 2 * join_bytes(height, num_ranks, row_bytes=SAMPLES * 5 * WIDTH * ITEM_BYTES)

    for height in (24, 13, 3):
        check_bytes(num_ranks, height, lambda x: x, joins)
        check_bytes(num_ranks, height, lambda x: x.flatten(1), joins)
        check_bytes(
            num_ranks,
            height,
            lambda x: F.adaptive_avg_pool2d(x, 1),
            lambda _: 2 * sent_bytes("all-reduce", SAMPLES * 5 * ITEM_BYTES, num_ranks),
        )


@ranks(2)
def test_counted_bytes_are_those_predicted_on_two_ranks() -> None:
    check_all(2)


@ranks(4)
def test_counted_bytes_are_those_predicted_on_four_ranks() -> None:
    check_all(4)


STAY: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: (1 - x) / (x.abs() + 2) ** 2 - 3 * x.exp().clamp(max=2),
    "in place": lambda x: x.clone().mul_(2).add_(x).relu_(),
    "activations": lambda x: F.silu(F.gelu(F.relu(x))) + F.hardswish(x) + F.leaky_relu(x).tanh(),
    "with whole ones": lambda x: x + torch.ones(x.shape, dtype=x.dtype) * torch.ones(x.shape[2], 1, dtype=x.dtype),
    "a convolution of one pixel": lambda x: F.conv2d(x, torch.ones(2, 3, 1, 1, dtype=x.dtype)),
    "channels": lambda x: torch.cat([x.softmax(1), x[:, :1], x.amax(1, keepdim=True)], 1),
    "channels last": lambda x: F.linear(x.permute(0, 2, 3, 1), torch.ones(4, 3, dtype=x.dtype)).permute(0, 3, 1, 2),
    "five dims": lambda x: x.view(x.shape[0], 3, 1, x.shape[2], -1).transpose(1, 2).flatten(1, 2),
    "casts": lambda x: x.float().to(torch.float64).contiguous().detach(),
    "norms of channels": lambda x: F.local_response_norm(x, 3) + F.layer_norm(x, x.shape[-1:]) + F.normalize(x),
    "width": lambda x: F.pad(x, (1, 1)).mean(3, keepdim=True) + x.cumsum(3),
}


@ranks(2)
def test_what_needs_no_other_rank_sends_nothing() -> None:
    for name, function in STAY.items():
        group = rows_group(2)
        whole = images(7)
        made = function(SpatialParallel(group).split(whole))
        assert isinstance(made, RowTensor), name
        assert (group.traffic.num_calls, made.shape) == (0, function(whole).shape), name


def kept_bytes(group: Group | None) -> int:
    """Bytes that a stack of convolutions keeps for the backward pass, besides weights and the whole input."""
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4)]
    model, inputs = nn.Sequential(*layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), torch.randn(1, 4, 64, 32)
    call = model if group is None else functools.partial(SpatialParallel(group).call, model)
    with LiveBytes(others=[inputs, *model.parameters()], made=lambda operator, tensor: None) as live:
        output = call(inputs)
        kept = live.live_bytes
    del output
    return kept


@ranks(4)
def test_what_is_kept_falls_with_the_number_of_ranks() -> None:
    """Kept are four maps and the indices of the last one's maxima. A rank keeps its rows of them and of the input, and
    a halo of at most two rows per convolution."""
    a_map, a_row, others = 4 * 64 * 32 * 4, 4 * 32 * 4, 1024
    alone = kept_bytes(None)
    assert 0 <= alone - (4 * a_map + a_map // 4 * 2) < others
    # Through sockets, because shared memory would count too.
    assert 0 <= kept_bytes(rows_group(4, transport="c10d")) - (alone + a_map) // 4 <= 4 * 2 * a_row + others
