"""Changes of modules, and replacements of functions of torch: recorded, undone, and made in one place only."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch._functorch.config
from torch import nn

from weft.parallel.wrapping.replacements import Replacements, donated_buffers, exact_float32
from weft.parallel.wrapping.wrap import add_hook, changes_of, wrap_forward

SOURCE = Path(__file__).parents[2] / "src" / "weft"


class Twice:
    """Wraps a forward; an object, so that a copy of the module runs the copy."""

    def __init__(self, module: nn.Module) -> None:
        self.inner = module.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = self.inner(x) * 2
        return doubled


def test_nothing_else_changes_modules_or_torch() -> None:
    hidden = re.compile(
        r"\.forward = |\.register_(full_|module_)?(forward|backward|state_dict)|^ +setattr\(", re.MULTILINE
    )
    found = {
        str(path.relative_to(SOURCE)): hits
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "wrapping" and (hits := hidden.findall(path.read_text()))
    }
    own = {"parallel/tensor/shares.py", "parallel/tensor/discovery/layer_rules.py"}  # sizes, on the model's own modules
    own.add("parallel/tensor/discovery/symbolic_sizes.py")  # a class of weft's own
    own.add("parallel/tensor/layers.py")  # a note on a traced tensor
    assert found.keys() <= own, found


# ---- changes of modules ----


def test_changes_are_recorded_copied_and_undone() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    before = layer(x)
    undo_wrap = wrap_forward(layer, Twice(layer).forward, by="test", why="doubles its output")
    undo_hook = add_hook(layer, "forward", lambda module, args, output: output + 1, by="test", why="adds 1")
    assert torch.equal(layer(x), before * 2 + 1)
    assert [(change.kind, change.why) for change in changes_of(layer)] == [
        ("forward", "doubles its output"),
        ("forward hook", "adds 1"),
    ]
    copied = copy.deepcopy(layer)
    nn.init.zeros_(copied.weight)
    nn.init.zeros_(copied.bias)
    assert torch.equal(copied(x), torch.ones(1, 2)) and changes_of(copied) == changes_of(layer)
    undo_hook()
    undo_wrap()
    assert torch.equal(layer(x), before) and changes_of(layer) == () and "forward" not in vars(layer)
    assert len(changes_of(copied)) == 2


def test_a_forward_that_was_wrapped_before_comes_back() -> None:
    layer = nn.Linear(2, 2)
    inner = Twice(layer).forward
    wrap_forward(layer, inner, by="test", why="doubles its output")
    wrap_forward(layer, Twice(layer).forward, by="test", why="doubles it again")()
    assert layer.forward == inner and len(changes_of(layer)) == 1


# ---- replacements ----


def test_replacements_are_entered_and_left_together() -> None:
    config = torch._functorch.config
    assert config.donated_buffer
    replacements = Replacements(donated_buffers(), *exact_float32())
    with pytest.raises(RuntimeError, match="inside"), replacements, replacements:
        assert not config.donated_buffer
        with replacements.paused():
            assert config.donated_buffer
        assert not config.donated_buffer
        raise RuntimeError("inside")
    assert config.donated_buffer


def test_replacements_that_cannot_be_entered_are_left() -> None:
    broken = dataclasses.replace(donated_buffers(), apply=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError), Replacements(donated_buffers(), broken):
        pass
    assert torch._functorch.config.donated_buffer
