"""Every function and setting of torch and transformers that weft replaces, for as long as passes of a model run.

They belong to the whole process, so they are entered and left together, by one context manager, and are the originals
again after an error. The functions at the end of this file are the complete list of what can be replaced; the values
come from the packages that need them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from weft.parallel.wrapping.wrap import Undo

WHOLE_ATTENTION: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
"""torch's own attention, also while it is replaced."""
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One thing outside weft that has another value for a while."""

    what: str
    """The full name of the function or setting."""
    why: str
    """The effect of the replacement, as a verb phrase."""
    apply: Callable[[], Undo]


class Replacements:
    """Context in which a set of replacements is in force; entering it again inside changes nothing."""

    def __init__(
        self,
        *known: Replacement,
        find: Callable[[], Iterable[Replacement]] | None = None,
        on_leave: Callable[[], None] | None = None,
    ) -> None:
        """`find` is called once, on first use, for what is not known before the first pass."""
        self._known = list(known)
        self._find = find
        self._on_leave = on_leave
        self._undo: list[Undo] = []
        self._depth = 0

    def add(self, replacement: Replacement) -> None:
        """Enter this as well, from the next time on; a replacement of the same thing is not added twice."""
        if replacement.what not in [known.what for known in self._known]:
            self._known.append(replacement)

    def all(self) -> list[Replacement]:
        if self._find is not None:
            self._known += self._find()
            self._find = None
        return self._known

    def __enter__(self) -> None:
        if self._depth == 0:
            self._apply()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore()
            if self._on_leave is not None:
                self._on_leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which everything is the original again: a loss may call a model of its own."""
        if self._depth == 0:
            yield
            return
        self._restore()
        try:
            yield
        finally:
            self._apply()

    def _apply(self) -> None:
        try:
            for replacement in self.all():
                self._undo.append(replacement.apply())
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def torch_attention(model: nn.Module, attend: Callable[..., torch.Tensor], *, why: str) -> list[Replacement]:
    """torch's attention, in torch and under the names by which the modules of a model have imported it."""
    found = functions(model, [(F, WHOLE_ATTENTION.__name__, attend)], why=why, original=WHOLE_ATTENTION)
    enable = torch.backends.mha.set_fastpath_enabled
    why_slow = "makes torch's layers call the attention function in evaluation too"
    fast_path = partial(_set, torch.backends.mha.get_fastpath_enabled, enable, False)
    return [*found, Replacement(what="torch.backends.mha fast path", why=why_slow, apply=fast_path)]


def functions(
    model: nn.Module,
    replaced: Iterable[tuple[ModuleType, str, Callable[..., Any]]],
    *,
    why: str,
    original: Callable[..., Any] | None = None,
) -> list[Replacement]:
    """Functions of a module (torch, numpy), also under the names by which the modules of a model have imported them.

    Given are the module, the function's name there and what takes its place; `original` where that may be replaced
    already.
    """
    replaced = list(replaced)
    places = {(holder.__name__, key): value for holder, key, value in replaced}
    by_function = {id(getattr(holder, key)): value for holder, key, value in replaced}
    if original is not None:
        by_function[id(original)] = replaced[0][2]
    for user in {kind.__module__ for module in model.modules() for kind in type(module).__mro__}:
        for name, one in vars(sys.modules[user]).items() if user in sys.modules else ():
            if id(one) in by_function:
                places.setdefault((user, name), by_function[id(one)])
    return [
        _entry(vars(sys.modules[holder]), key, value, what=f"{holder}.{key}", why=why)
        for (holder, key), value in sorted(places.items(), key=lambda one: one[0])
    ]


def tensor_method(name: str, value: Callable[..., Any], *, why: str) -> Replacement:
    """A method of all tensors."""
    return _attribute(torch.Tensor, name, value, of="torch.Tensor", why=why)


def hugging_face_attention(
    name: str,
    *,
    attention: Callable[..., Any],
    mask: Callable[..., Any],
    find_documents: Callable[..., Any],
    configs: Sequence[Any],
    calls_torch: bool,
) -> list[Replacement]:
    """Attention and masks in the registries of transformers, and the name by which configurations choose them.

    `calls_torch`: some models call torch's attention themselves, with a mask from the registry.
    """
    masks, models = (sys.modules[f"transformers.{module}"] for module in ("masking_utils", "modeling_utils"))
    documents, chosen = "find_packed_sequence_indices", "_attn_implementation_internal"
    writes = [
        (models.AttentionInterface._global_mapping, name, attention, f"transformers.AttentionInterface[{name!r}]"),
        *(
            (masks.AttentionMaskInterface._global_mapping, key, mask, f"transformers.AttentionMaskInterface[{key!r}]")
            for key in ((name, "sdpa") if calls_torch else (name,))
        ),
        (vars(masks), documents, find_documents, f"transformers.masking_utils.{documents}"),
        *((vars(config), chosen, name, f"{type(config).__name__}.{chosen}") for config in configs),
    ]
    why = "attends over all ranks of the sequence"
    return [_entry(names, key, value, what=what, why=why) for names, key, value, what in writes]


def donated_buffers() -> Replacement:
    """Stops compiled backward passes from reusing saved tensors: zero-bubble schedules run them in two halves."""
    return _attribute(
        torch._functorch.config,
        "donated_buffer",
        False,
        of="torch._functorch.config",
        why="keeps compiled code from reusing in the first half of a backward pass what the second half needs",
    )


def reentrant_checkpoints() -> Replacement:
    """Turns checkpoints with use_reentrant=True into those without, which compute the same.

    A reentrant checkpoint runs what is inside without a graph, and its backward pass by itself. A stage that ends or
    begins inside would have no graph to send gradients through, and half a backward pass cannot contain a whole one.
    """
    why = "recomputes in the schedule's own backward pass, also with use_reentrant=True"
    of = "torch.utils.checkpoint"
    return _attribute(torch.utils.checkpoint, "CheckpointFunction", _CheckpointInOneGraph, of=of, why=why)


class _CheckpointInOneGraph:
    """Stands in for torch's autograd function of reentrant checkpoints, which `checkpoint` looks up when called."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


def autocast_entry(note: Callable[[object], None]) -> Replacement:
    """Calls `note` at each entry of torch.autocast; for the probe."""
    enter = torch.autocast.__enter__

    def noted(autocast: torch.autocast) -> Any:
        note(autocast)
        return enter(autocast)  # type: ignore[no-untyped-call]

    why = "finds out whether the model casts by itself"
    return _attribute(torch.autocast, "__enter__", noted, of="torch.autocast", why=why)


def exact_float32() -> list[Replacement]:
    """Turns off TF32; for the probe."""
    why = "takes products of float32 in float32, also on a GPU"
    return [
        _attribute(torch.backends.cuda.matmul, "allow_tf32", False, of="torch.backends.cuda.matmul", why=why),
        _attribute(torch.backends.cudnn, "allow_tf32", False, of="torch.backends.cudnn", why=why),
    ]


def _attribute(holder: Any, key: str, value: Any, *, of: str, why: str) -> Replacement:
    get, put = partial(getattr, holder, key), partial(setattr, holder, key)
    return Replacement(what=f"{of}.{key}", why=why, apply=partial(_set, get, put, value))


def _set(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Undo:
    before = get()
    put(value)
    return partial(put, before)


def _entry(names: MutableMapping[str, Any], key: str, value: Any, *, what: str, why: str) -> Replacement:
    def apply() -> Undo:
        before = names.get(key, _MISSING)
        names[key] = value
        return partial(names.__delitem__, key) if before is _MISSING else partial(names.__setitem__, key, before)

    return Replacement(what=what, why=why, apply=apply)
