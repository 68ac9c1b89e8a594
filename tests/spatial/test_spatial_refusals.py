"""Refusals and randomness with images split by rows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from image_rows import images, rows_group
from oracle import small_convnet
from ranks import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.comm.collectives import all_gather
from weft.errors import ModelError
from weft.parallel.spatial.row_tensor import RowTensor
from weft.parallel.spatial.spatial_parallel import SpatialParallel
from weft.parallel.state.batchnorm import synchronise_batch_norms


def overwrite_some(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, 0] = 0
    return y


def overwrite_all(x: Tensor) -> Tensor:
    return x.clone().uniform_()


def set_data(x: Tensor) -> Tensor:
    x.data = torch.zeros(x.shape, dtype=x.dtype)
    return x


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "channels dropped": (F.dropout2d, "dropout2d drops whole channels"),
    "batch norm as a function": (lambda x: F.batch_norm(x, None, None, training=True), "use nn.BatchNorm2d"),
    "some rows overwritten": (overwrite_some, r"overwrites an image .*\(__setitem__\)"),
    "random numbers in place": (overwrite_all, r"overwrites an image .*\(uniform_\)"),
    "operators in place": (lambda x: torch.ops.aten.sin_.default(x.clone()), r"overwrites an image .*\(sin_.default\)"),
    "result given": (lambda x: torch.cumsum(x, 2, out=x.clone()), "overwrites an image"),
    "data set": (set_data, "sets .data of an image"),
}


@ranks(2)
def test_what_would_be_wrong_is_refused() -> None:
    rows = SpatialParallel(rows_group(2))
    for what, (function, problem) in REFUSED.items():
        try:
            rows.call(function, images(6))
        except ModelError as error:
            assert re.search(problem, str(error)), what
        else:
            raise AssertionError(f"{what}: not refused")


@ranks(2)
def test_inputs_must_have_images_of_one_height() -> None:
    rows = SpatialParallel(rows_group(2))
    with pytest.raises(ModelError, match="there are none"):
        rows.call(lambda x: x, torch.zeros(2, 3))
    with pytest.raises(ModelError, match="there are heights 4, 6"):
        rows.call(lambda x: x, {"left": images(4), "right": images(6)})
    both = rows.split({"left": images(4), "mask": images(4)[:, :1], "class": torch.zeros(2)})
    assert [isinstance(value, RowTensor) for value in both.values()] == [True, True, False]


@ranks(2)
def test_batch_norm_counts_every_sample_once() -> None:
    group = rows_group(2)
    rows = SpatialParallel(group)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyBatchNorm1d()).double()
    model(images(6))
    synchronise_batch_norms(model, group)
    rows.prepare(model)
    with pytest.raises(ModelError, match='"2" comes where images are no longer split .* every sample 2 times'):
        rows.call(model, images(6))
    model.eval()
    torch.testing.assert_close(rows.call(model, images(6)), model(images(6)))
    model = nn.Sequential(nn.BatchNorm2d(3)).double()
    rows.prepare(model)
    with pytest.raises(ModelError, match='buffers = "synchronise"'):
        rows.call(model, images(6))


@ranks(2)
def test_evaluation_is_that_of_one_process() -> None:
    model = small_convnet().double()
    model(images(6, channels=1))
    model.eval()
    expected = model(images(5, channels=1))
    rows = SpatialParallel(rows_group(2))
    rows.prepare(model)
    torch.testing.assert_close(rows.call(model, images(5, channels=1)), expected)
    torch.testing.assert_close(rows.call(lambda x: F.dropout2d(x, training=False), images(6)), images(6))


@ranks(2)
def test_rows_overwritten_after_a_window_are_noticed() -> None:
    """As in one process: an input that a convolution saved must not be overwritten before the backward pass."""
    conv, x = nn.Conv2d(3, 3, 3, padding=1).double(), images(6).requires_grad_()

    def model(x: Tensor) -> Tensor:
        y = x * 1
        z = conv(y)
        y.mul_(2)
        return z

    output = SpatialParallel(rows_group(2)).call(model, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class OwnSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


@ranks(2)
def test_functions_with_a_backward_of_their_own_are_refused() -> None:
    """Their gradients cover some rows, while the tensors they saved report whole shapes."""
    output = SpatialParallel(rows_group(2)).call(OwnSquare.apply, images(6).requires_grad_())
    torch.testing.assert_close(output.detach(), images(6) ** 2)
    with pytest.raises(ModelError, match=r"autograd.Function .* \(mul\)"):
        output.sum().backward()


@ranks(2)
def test_dropout_differs_between_ranks_and_leaves_their_streams_alike() -> None:
    group = rows_group(2)
    rows = SpatialParallel(group)
    torch.manual_seed(3)
    whole = torch.ones(2, 8, 9, 50)
    dropped = rows.call(lambda x: F.dropout(x, 0.25), whole)
    assert set(dropped.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.02
    assert not torch.equal(dropped[:, :, :4], dropped[:, :, 5:])
    drawn, from_all = torch.rand(1), torch.empty(2)
    all_gather(from_all, drawn, group)
    assert from_all[0] == from_all[1], "uneven rows, and yet the next number is the same"


@ranks(2)
@pytest.mark.parametrize("inplace", [True, False])
def test_dropout_is_drawn_again_as_it_was(inplace: bool) -> None:
    x = torch.ones(1, 2, 6, 5, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return F.dropout(x * 1, 0.5, inplace=inplace) ** 2

    output = SpatialParallel(rows_group(2)).call(lambda x: checkpoint(block, x, use_reentrant=False), x)
    output.sum().backward()
    assert x.grad is not None
    own = slice(0, 3) if torch.distributed.get_rank() == 0 else slice(3, 6)
    # Both ranks count the whole output.
    torch.testing.assert_close(x.grad[:, :, own], 2 * 2 * output.detach()[:, :, own])


@pytest.mark.long
def test_rules_are_of_torchs_own_functions_whenever_they_are_first_used() -> None:
    """`verify` silences dropout while its passes run: rules that were made then would not know it afterwards."""
    script = """
import torch
import torch.nn.functional as F
from weft.verification.silence import Silence
from weft.verification import verify
with Silence(torch.nn.Dropout2d()).replacements:
    from weft.parallel.spatial.rules import rule_for
    rule_for(torch.add)
print(rule_for(F.dropout2d).__name__)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "channel_dropout"
