"""One forward pass of a meta copy of a model under the tracer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.errors import ModelError
from weft.parallel.tensor.discovery.records import Record, RecordedCall
from weft.parallel.tensor.discovery.trace import Tracer
from weft.parallel.tracing.meta_copy import freeze_batch_norms, make_meta_copy
from weft.parallel.tracing.placeholder import tensor_leaves
from weft.parallel.wrapping.wrap import wrap_forward

CACHES = ("past_key_values",)
"""Outputs of Hugging Face models that are for generation and in no loss."""


def follow(model: nn.Module, call: Callable[[nn.Module], Any], *, whole_between: Collection[str] = ()) -> Record:
    """Record one forward pass. Inputs and outputs of the modules `whole_between` stay whole."""
    meta_copy = make_meta_copy(model, learns_all=True)  # what is frozen today may be trained tomorrow
    freeze_batch_norms(meta_copy)
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
    tracer = Tracer(meta_copy, device)
    watch = _Watch(tracer)
    for name, module in tracer.record.modules.items():
        if not isinstance(module, torch.jit.ScriptModule):
            watched = watch.watched(name, module.forward, must_be_whole=name in whole_between)
            wrap_forward(module, watched, by="discovery", why="tells the tracer whose code is running")
    own_rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with own_rng, torch.enable_grad(), tracer, _UnseenOperators(tracer):
        torch.manual_seed(0)  # a model that decides at random decides alike on all ranks
        try:
            output = call(meta_copy)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f'"{watch.failed or type(model).__name__}" cannot be followed without values ({type(error).__name__}: '
                f"{error}), which is how weft finds how a model splits over the tensor axis; declare its `regions` "
                "in weft_blueprint()"
            ) from error
    outputs = tensors_of(output)
    for tensor in outputs:
        tracer.add_end(tensor)
        if len(outputs) == 1 and tensor.is_floating_point() and tensor.dim() > 0:  # its features may stay split
            tracer.record.output = tracer.layout(tensor)
        else:
            tracer.block(tensor, "the model returns them")
    return tracer.record


class _Watch:
    """Tells the tracer which module's code is running."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.failed = ""
        """The innermost module that raised an error."""

    def watched(self, name: str, forward: Callable[..., Any], *, must_be_whole: bool) -> Callable[..., Any]:
        tracer = self.tracer

        def run(*args: Any, **kwargs: Any) -> Any:
            if not tracer.names:
                for leaf in tensor_leaves((args, kwargs)):
                    tracer.add_model_input(leaf)
            if must_be_whole:
                for tensor in tensors_of((args, kwargs)):
                    tracer.block(tensor, f'they enter "{name}"')
            calls: list[RecordedCall] = []
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


class _UnseenOperators(TorchDispatchMode):
    """Blocks the operands of operators that were not called by a function the tracer sees: compiled code, say."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracer.is_inside:
            return func(*args, **(kwargs or {}))
        self.tracer.is_inside = True
        try:
            for tensor in tensor_leaves((args, kwargs)):
                self.tracer.block(tensor, self.tracer.unfollowed)
                self.tracer.add_end(tensor)
            return func(*args, **(kwargs or {}))
        finally:
            self.tracer.is_inside = False


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in a model's output, also inside objects."""
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
