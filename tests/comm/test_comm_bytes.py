"""The bytes a step sends against what `plan/partition/wire.py` predicts, to the byte: models, buckets, microbatches,
dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import data_plan, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from ranks import ranks
from torch import Tensor, nn

from weft.comm.buckets import member_of
from weft.plan.partition.wire import batch_norm_bytes, gradient_all_reduce_bytes
from weft.training.trainer import Trainer


def bytes_of_a_step(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes that the third step sends over the data axis: by then the order of buckets is agreed."""
    rank, size = trainer.data_rank, trainer.data_size
    for number in range(3):
        before = trainer.mesh.traffic["data"].sent_bytes
        trainer.step(batch[0][rank::size], batch[1][rank::size])
        assert number < 2 or trainer.sync.state()["agreed"]
    return trainer.mesh.traffic["data"].sent_bytes - before


def predicted_gradient_bytes(trainer: Trainer) -> int:
    trainable = [parameter for parameter in trainer.named_model.parameters() if parameter.requires_grad]
    return gradient_all_reduce_bytes(
        [member_of(trainable[index]) for index in trainer.sync.state()["order"]],
        bucket_bytes=trainer.plan.comm.bucket_bytes,
        data=trainer.data_size,
    )


def check_gpt_bytes(bucket_bytes: int, microbatches: int) -> None:
    plan = data_plan(dist.get_world_size(), bucket_bytes=bucket_bytes, microbatches=microbatches)
    trainer = make_trainer(small_gpt(), plan)
    counted_bytes, numel = bytes_of_a_step(trainer, token_batch(8)), sum(p.numel() for p in trainer.model.parameters())
    assert counted_bytes == predicted_gradient_bytes(trainer)
    num_parameters, size = len(list(trainer.model.parameters())), trainer.data_size
    tail = 3 + size + num_parameters
    off = counted_bytes - 2 * (size - 1) * 4 * (numel + tail) / size
    assert 0 <= off < 1 + num_parameters, "only rounding, once per bucket"


def check_convnet_bytes(dtype: torch.dtype, microbatches: int) -> None:
    model = small_convnet().to(dtype)
    images, classes = image_batch(8)
    trainer = make_trainer(model, data_plan(dist.get_world_size(), microbatches=microbatches))
    counted_bytes = bytes_of_a_step(trainer, (images.to(dtype), classes))
    channels = [module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(channels) == 5
    statistics = batch_norm_bytes(
        channels, item_bytes=dtype.itemsize, microbatches=microbatches, data=trainer.data_size
    )
    assert counted_bytes == predicted_gradient_bytes(trainer) + statistics


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 26214400])
def test_a_gpt_step_on_two_ranks_sends_what_wire_predicts(bucket_bytes: int, microbatches: int) -> None:
    check_gpt_bytes(bucket_bytes, microbatches)


@ranks(3)
@pytest.mark.parametrize("bucket_bytes", [1, 1000])
def test_a_gpt_step_on_three_ranks_sends_what_wire_predicts(bucket_bytes: int) -> None:
    check_gpt_bytes(bucket_bytes, 1)


@ranks(4)
@pytest.mark.parametrize("bucket_bytes", [1, 26214400])
def test_a_gpt_step_on_four_ranks_sends_what_wire_predicts(bucket_bytes: int) -> None:
    check_gpt_bytes(bucket_bytes, 2)


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_convnet_step_on_two_ranks_sends_what_wire_predicts(dtype: torch.dtype, microbatches: int) -> None:
    check_convnet_bytes(dtype, microbatches)


@ranks(4)
def test_a_convnet_step_on_four_ranks_sends_what_wire_predicts() -> None:
    check_convnet_bytes(torch.float32, 1)


class TwoPrecisions(nn.Module):
    """Float64 and float32 layers by turns, so that buckets of two dtypes fill up side by side."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(5, 5), nn.Linear(5, 7).double(), nn.Linear(7, 3), nn.Linear(3, 4).double())
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


@ranks(3)
@pytest.mark.parametrize("bucket_bytes", [1, 60, 200, 26214400])
def test_two_dtypes_never_share_a_bucket_and_are_counted_right(bucket_bytes: int) -> None:
    trainer = make_trainer(TwoPrecisions(), data_plan(3, bucket_bytes=bucket_bytes))
    batch = torch.randn(6, 5), torch.randint(4, (6,))
    assert bytes_of_a_step(trainer, batch) == predicted_gradient_bytes(trainer)
    kinds = {parameter.grad.dtype for parameter in trainer.model.parameters() if parameter.grad is not None}
    assert kinds == {torch.float32, torch.float64}
