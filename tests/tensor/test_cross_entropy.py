"""Vocabulary-parallel cross-entropy against torch's own of whole logits, and the bytes it exchanges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from meshes import data_group
from ranks import ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.parallel.tensor import cross_entropy as vocabulary
from weft.parallel.tensor.cross_entropy import Share, gather_logits, split_cross_entropy_sum
from weft.plan.partition.tensor import shares
from weft.plan.partition.wire import sent_bytes
from weft.world import World

SIZES = (17, 18, 100)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@functools.cache
def group_on(transport: str) -> Group:
    return data_group("test", transport=transport)


def alone() -> Group:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    return data_group("test", world=world)


def share(total: int, group: Group) -> Share:
    start, stop = shares(total, group.size)[group.index]
    return Share(start=start, stop=stop, total=total)


def slice_of(whole: Tensor, mine: Share) -> Tensor:
    return whole[..., mine.start : mine.stop].clone().requires_grad_()


def whole_loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum")


def assert_near(found: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest entry; what is not finite is so in both."""
    finite = true.isfinite()
    assert torch.equal(found.nan_to_num(0.0, 1.0, -1.0)[~finite], true.nan_to_num(0.0, 1.0, -1.0)[~finite])
    if finite.any():
        largest = max(1.0, true[finite].abs().max().item())
        assert (found - true)[finite].abs().max().item() <= TOLERANCES[dtype] * largest


def compare(logits: Tensor, targets: Tensor, group: Group, *, upstream: float = 1.0) -> None:
    """One slice per rank against the whole: the loss, and this rank's part of the gradient."""
    mine = share(logits.shape[-1], group)
    part, whole = slice_of(logits, mine), logits.clone().requires_grad_()
    loss, true = split_cross_entropy_sum(part, targets, mine, group), whole_loss(whole, targets)
    assert loss.shape == () and loss.dtype == true.dtype
    wide = loss.dtype
    assert_near(loss.detach(), true.detach(), wide)
    assert len(set(gather_values(loss.item().hex(), group))) == 1, "ranks differ"
    (loss * upstream).backward()
    (true * upstream).backward()
    assert part.grad is not None and whole.grad is not None and part.grad.dtype == logits.dtype
    assert_near(part.grad.to(wide), whole.grad[..., mine.start : mine.stop].to(wide), logits.dtype)


def edge_targets(total: int, group: Group, *shape: int) -> Tensor:
    """Targets anywhere, among them the first and the last of every slice, and some that do not count."""
    targets = torch.randint(0, total, shape)
    edges = torch.tensor([entry for start, stop in shares(total, group.size) for entry in (start, stop - 1)])
    targets.view(-1)[: len(edges)] = edges
    targets.view(-1)[len(edges) :: 3] = -100
    return targets


def check_equal_to_whole(group: Group) -> None:
    for total in SIZES:
        for dtype in TOLERANCES:
            logits = (torch.randn(3, 7, total, dtype=torch.float64) * 3).to(dtype)
            compare(logits, edge_targets(total, group, 3, 7), group, upstream=0.37)


def check_large_logits(group: Group) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = torch.randn(12, 18, dtype=torch.float64)
        logits[::2] *= 1e4
        logits[1::4] += 1e4
        logits[3::4] -= 1e4
        compare(logits.to(dtype), edge_targets(18, group, 12), group)


def check_ties(group: Group) -> None:
    """Between two logits of one size the loss is log 2 however large they are: nothing is lost to cancellation."""
    for size in (0.0, 1e4, -1e4):
        logits = torch.full((3, 17), size - 1e4)
        logits[:, [1, 15]] = size
        mine = share(17, group)
        loss = split_cross_entropy_sum(logits[:, mine.start : mine.stop], torch.tensor([1, 15, -100]), mine, group)
        assert loss.item() == pytest.approx(2 * math.log(2), rel=1e-6)


def check_masked_logits(group: Group) -> None:
    """Rows of which a rank has nothing but −inf, in one slice, in all but one, and everywhere."""
    slices = shares(17, group.size)
    logits = torch.randn(2 * group.size + 2, 17)
    for number, (start, stop) in enumerate(slices):
        logits[number, start:stop] = -math.inf
        others = torch.ones(17, dtype=torch.bool)
        others[start] = False
        logits[group.size + number, others] = -math.inf
    targets = torch.tensor([(stop % 17) for _, stop in slices] + [start for start, _ in slices] + [0, 0])
    compare(logits, targets, group)
    logits[-1] = -math.inf
    logits[-2, 3] = math.nan
    compare(logits, targets, group)
    targets[-2:] = -100
    targets[0] = 0  # masked: its loss is infinite
    mine = share(17, group)
    loss = split_cross_entropy_sum(slice_of(logits, mine), targets, mine, group)
    assert_near(loss.detach(), whole_loss(logits, targets), torch.float32)


def check_nothing_counts(group: Group) -> None:
    for shape in ((0,), (2, 0), (4,)):
        mine = share(17, group)
        part = torch.randn(*shape, mine.width, requires_grad=True)
        loss = split_cross_entropy_sum(part, torch.full(shape, -100), mine, group)
        assert loss.item() == 0.0
        loss.backward()
        assert part.grad is not None and part.grad.shape == part.shape and not part.grad.any()


def check_blocks(group: Group) -> None:
    """Rows taken in several blocks give what one block gives, to the bit."""
    mine, targets = share(18, group), edge_targets(18, group, 13)
    for dtype in (torch.float32, torch.bfloat16):
        logits, found = torch.randn(13, 18, dtype=dtype), []
        for block_bytes in (2**23, 4 * mine.width * 4, 1):
            with mock.patch.object(vocabulary, "BLOCK_BYTES", block_bytes):
                part = slice_of(logits, mine)
                loss = split_cross_entropy_sum(part, targets, mine, group)
                found.append((loss.detach(), *torch.autograd.grad(loss, part)))
        assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))


def check_larger_graph(group: Group) -> None:
    """After a sharded layer, with logits that are not contiguous and are used twice."""
    mine, targets = share(17, group), edge_targets(17, group, 2, 5)
    hidden, weight = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(17, 4, dtype=torch.float64)

    def run(weight: Tensor, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        inputs, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = torch.tanh(inputs @ weight.T)
        loss = 0.1 * loss_of(logits[:, :-1]) + loss_of(logits[:, 1:]) ** 2
        return torch.autograd.grad(loss, (inputs, weight))

    true_input, true_weight = run(weight, lambda logits: whole_loss(logits, targets))
    of_input, of_weight = run(
        weight[mine.start : mine.stop], lambda logits: split_cross_entropy_sum(logits, targets, mine, group)
    )
    all_reduce(of_input, group)
    assert_near(of_input, true_input, torch.float64)
    assert_near(of_weight, true_weight[mine.start : mine.stop], torch.float64)


def check_bytes(group: Group) -> None:
    for dtype, item_bytes in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 4)):
        mine, before = share(100, group), group.traffic.sent_bytes
        part = torch.randn(3, 7, mine.width, dtype=dtype, requires_grad=True)
        split_cross_entropy_sum(part, torch.zeros(3, 7, dtype=torch.int64), mine, group).backward()
        both = [sent_bytes("all-reduce", number * 21 * item_bytes, group.size) for number in (1, 2)]
        assert group.traffic.sent_bytes - before == sum(both)


def check_bad_targets(group: Group) -> None:
    """Every rank refuses them before it exchanges anything, so that none is left waiting."""
    mine, calls = share(17, group), group.traffic.num_calls
    for bad in (17, -1, -101):
        with pytest.raises(IndexError, match=f"target {bad} is outside the vocabulary of 17 entries"):
            split_cross_entropy_sum(torch.randn(2, mine.width), torch.tensor([-100, bad]), mine, group)
    with pytest.raises(ValueError, match="have 6 rows and there are 5 targets"):
        split_cross_entropy_sum(torch.randn(2, 3, mine.width), torch.zeros(5, dtype=torch.int64), mine, group)
    assert group.traffic.num_calls == calls


def check_second_backward(group: Group) -> None:
    """The kept tensor was overwritten by the gradient: torch refuses a second use, rather than being silently wrong."""
    mine = share(17, group)
    part = torch.randn(4, mine.width, requires_grad=True)
    loss = split_cross_entropy_sum(part, torch.zeros(4, dtype=torch.int64), mine, group)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def check_gather(group: Group) -> None:
    for total in SIZES:
        for shape in ((3, 5), (4,), (0,)):
            logits, factors = torch.randn(*shape, total), torch.randn(*shape, total)
            mine, before = share(total, group), group.traffic.sent_bytes
            part = slice_of(logits, mine)
            whole = gather_logits(part, mine, group)
            assert torch.equal(whole, logits)
            (whole**2 * factors).sum().backward()
            assert torch.equal(part.grad, (2 * logits * factors)[..., mine.start : mine.stop])
            message_bytes = 4 * len(logits.flatten(0, -2)) * -(-total // group.size)
            assert group.traffic.sent_bytes - before == sent_bytes("all-gather", message_bytes * group.size, group.size)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@ranks(2)
def on_2(name: str, transport: str) -> None:
    CHECKS[name](group_on(transport))


@ranks(3)
def on_3(name: str, transport: str) -> None:
    CHECKS[name](group_on(transport))


@ranks(4)
def on_4(name: str, transport: str) -> None:
    CHECKS[name](group_on(transport))


@pytest.mark.sampled(22)
@pytest.mark.parametrize("transport", ["shared", "c10d"])
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("on_ranks", [on_2, on_3, on_4], ids=lambda body: body.__name__)
def test_split_vocabulary(on_ranks: Callable[..., None], name: str, transport: str) -> None:
    on_ranks(name=name, transport=transport)


@pytest.mark.parametrize("name", CHECKS)
def test_a_group_of_one_has_the_whole_vocabulary(name: str) -> None:
    CHECKS[name](alone())


class Allocations(TorchDispatchMode):
    """The memory that operations get, as large as the logits or more."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._least_bytes = logits.nbytes
        self._known = {logits.untyped_storage().data_ptr()}
        self.made: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for storage in [one.untyped_storage() for one in tree_leaves(result) if isinstance(one, Tensor)]:
            if storage.nbytes() >= self._least_bytes and storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self.made.append(storage)
        return result


@pytest.mark.parametrize(
    ("dtype", "trains", "num_forward", "num_backward"),
    [(torch.float32, True, 1, 0), (torch.bfloat16, True, 0, 1), (torch.float32, False, 0, 0)],
    ids=["exponentials become the gradient", "16-bit logits are kept", "evaluation keeps nothing"],
)
def test_memory_of_the_size_of_the_logits(
    dtype: torch.dtype, trains: bool, num_forward: int, num_backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_BYTES", 4 * 17 * 10)
    logits = torch.randn(100, 17).to(dtype).requires_grad_(trains)
    before = logits.detach().clone()
    with Allocations(logits) as memory:
        loss = split_cross_entropy_sum(logits, torch.zeros(100, dtype=torch.int64), share(17, alone()), alone())
        assert len(memory.made) == num_forward
        if trains:
            (gradient,) = torch.autograd.grad(loss, logits)
            assert gradient.data_ptr() == memory.made[-1].data_ptr()
    assert len(memory.made) == num_forward + num_backward
    assert torch.equal(logits, before)


def test_slices_must_fit() -> None:
    with pytest.raises(AssertionError, match="5 logits per row are not those of"):
        split_cross_entropy_sum(torch.randn(1, 5), torch.zeros(1, dtype=torch.int64), share(17, alone()), alone())
    with pytest.raises(AssertionError, match="not a slice"):
        Share(start=4, stop=4, total=17)
