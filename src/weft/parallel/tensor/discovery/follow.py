"""One forward pass of a copy of a model, with somebody watching."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.errors import ModelError
from weft.parallel.tensor.discovery.records import NotedCall, Record
from weft.parallel.tensor.discovery.trace import Tracer
from weft.parallel.tracing.placeholder import to_meta
from weft.parallel.wrapping.wrap import wrap_forward

CACHES = ("past_key_values",)
"""What Hugging Face models return for the next token's sake, and no loss looks at."""


def follow(model: nn.Module, call: Callable[[nn.Module], Any], *, whole_between: Collection[str] = ()) -> Record:
    """Follow one forward pass. What enters and leaves the modules `whole_between` stays whole."""
    meta_copy = _make_twin(model)
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
    tracer = Tracer(meta_copy, device)
    watch = _Watch(tracer)
    for name, module in tracer.record.modules.items():
        if not isinstance(module, torch.jit.ScriptModule):
            watched = watch.watched(name, module.forward, must_be_whole=name in whole_between)
            wrap_forward(module, watched, by="discovery", why="tells the tracer whose code is running")
    drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with drawing, torch.enable_grad(), tracer, _Unseen(tracer):
        torch.manual_seed(0)  # a model that decides at random does so alike on all ranks
        try:
            output = call(meta_copy)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f'"{watch.failed or type(model).__name__}" cannot be followed without values ({type(error).__name__}: '
                f"{error}), which is how weft finds out how a model splits over the tensor axis; declare its `regions` "
                "in weft_blueprint()"
            ) from error
    _note_output(tracer, output)
    return tracer.record


def _make_twin(model: nn.Module) -> nn.Module:
    """A copy whose parameters have no memory, and all learn: what is frozen today may not be tomorrow."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        bare = to_meta(parameter.detach())
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=bare.is_floating_point() or bare.is_complex())
    meta_copy = copy.deepcopy(model, memo)
    for module in meta_copy.modules():
        if isinstance(module, _BatchNorm):
            module.eval()  # shapes are the same, and one sample is no reason to refuse
    return meta_copy


class _Watch:
    """Tells the tracer whose code is running."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.failed = ""
        """The innermost module in which something went wrong."""

    def watched(self, name: str, forward: Callable[..., Any], *, must_be_whole: bool) -> Callable[..., Any]:
        tracer = self.tracer

        def run(*args: Any, **kwargs: Any) -> Any:
            if not tracer.names:
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, torch.Tensor):
                        tracer.give(leaf)
            if must_be_whole:
                for tensor in tensors_of((args, kwargs)):
                    tracer.block(tensor, f'they enter "{name}"')
            calls: list[NotedCall] = []
            tracer.record.calls.setdefault(name, []).append(calls)
            tracer.names.append(name)
            tracer.calls.append(calls)
            try:
                output = forward(*args, **kwargs)
            except Exception:
                self.failed = self.failed or name
                raise
            finally:
                tracer.names.pop()
                tracer.calls.pop()
            if must_be_whole:
                for tensor in tensors_of(output):
                    tracer.block(tensor, f'they leave "{name}"')
            return output

        return run


class _Unseen(TorchDispatchMode):
    """Notices operators that no function of torch which was seen has called."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracer.is_inside:
            return func(*args, **(kwargs or {}))
        self.tracer.is_inside = True
        try:
            self.tracer.hide_from_modes(
                [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            )
            return func(*args, **(kwargs or {}))
        finally:
            self.tracer.is_inside = False


def _note_output(tracer: Tracer, output: Any) -> None:
    """What the model returns is whole, but perhaps the features of its one output."""
    tensors = tensors_of(output)
    is_alone = len(tensors) == 1 and tensors[0].is_floating_point() and tensors[0].dim() > 0
    for tensor in tensors:
        tracer.end(tensor)
        if is_alone:
            tracer.record.output = tracer.layout(tensor)
        else:
            tracer.block(tensor, "the model returns them")


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in what a model returns, also those inside objects."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            waiting += [inner for key, inner in value.items() if key not in CACHES]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            waiting += [getattr(value, one.name) for one in dataclasses.fields(value)]
        elif not isinstance(value, type | nn.Module) and hasattr(value, "__dict__"):
            waiting += vars(value).values()
    return found
