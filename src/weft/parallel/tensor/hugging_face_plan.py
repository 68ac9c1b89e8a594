"""The regions of a Hugging Face model, read from the tensor plan that comes with it; transformers is not imported.

Their plan gives modules and parameters styles by patterns; those under one parent module are a region:

    model.layers.*.self_attn.q_proj   colwise                          -> column layer
    model.layers.*.self_attn.o_proj   rowwise                          -> row layer
    model.layers.*.self_attn.sinks    colwise, of a parameter          -> cut like a column layer's bias
    model.layers.*.self_attn.q_norm   replicated_with_grad_allreduce   -> partial
    model.embed_tokens                embedding_rowwise                -> rows of the vocabulary
    lm_head                           colwise_gather_output            -> the output

Which features stay together follows from the sizes of heads and layers. Parameters of a region that the plan does not
name (norms of one head, slopes of activations) are classified by shape, or refused. Layers whose outputs are gathered
stay whole, except fused layers whose order of features is known. The plan of a model whose planned layers have been
replaced (by adapters, by quantised ones) is not used: discovery follows its dataflow instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from weft.errors import ModelError
from weft.plan.partition.tensor import Count, Cut, Region, Section

COLUMN, ROW = "colwise", "rowwise"
GATHERED_COLUMN, SPLIT_ROW = "colwise_gather_output", "rowwise_split_input"
PARTIAL, EMBEDDING = "replicated_with_grad_allreduce", "embedding_rowwise"
STYLES = (COLUMN, ROW, GATHERED_COLUMN, SPLIT_ROW, PARTIAL, EMBEDDING)

QUERIES_KEYS_VALUES, GATE_UP = "qkv_proj", "gate_up_proj"
KEYS_OR_VALUES = ("k_proj", "v_proj")
FUSED = {QUERIES_KEYS_VALUES, GATE_UP}
"""Layers that are the concatenation of two or three."""

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A module or parameter that the plan names."""

    name: str
    pattern: str
    """Its name in the plan, with * for numbers."""
    style: str
    thing: nn.Module | nn.Parameter
    owner: nn.Module
    """The module that contains it."""

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def said(self) -> str:
        return f'its plan has "{self.pattern}": "{self.style}"'

    def tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        if isinstance(self.thing, nn.Parameter):
            yield self.name, self.thing
        else:
            yield from self.thing.named_parameters(prefix=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """The sizes of an attention module."""

    queries: int
    keys: int
    dim: int
    """Entries of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Parts under one module that become a region."""

    columns: tuple[_Part, ...]
    row: _Part
    planned: tuple[_Part, ...]
    """These, and parts that stay whole and are not used on shards."""

    @property
    def layers(self) -> tuple[_Part, ...]:
        return tuple(part for part in self.columns if isinstance(part.thing, nn.Module))

    @property
    def is_plain(self) -> bool:
        return all(type(part.thing) is nn.Linear for part in (*self.layers, self.row))


_DECLARE = "give the model a weft_blueprint() that declares its regions, if it is of your own making"


class _Unclear(Exception):
    """A reason why a plan cannot be used."""


def hugging_face_regions(model: nn.Module) -> tuple[Region, ...] | None:
    """The regions of a model's own plan; None if it has none, or its planned layers have been replaced."""
    parts = _planned_parts(model)
    found = _for_all(model, _find_group, _by_parent(model, parts))
    groups = [group for group in found if group is not None]
    if not groups or not all(group.is_plain for group in groups):
        return None
    embedding, head = _vocabulary(model, parts)
    return (*embedding, *_for_all(model, _make_region, groups), *head)


def _for_all(model: nn.Module, work: Callable[[_Item], _Made], items: Iterable[_Item]) -> list[_Made]:
    """The results of some work on each item; everything that is unclear is refused together."""
    made, problems = [], []
    for item in items:
        try:
            made.append(work(item))
        except _Unclear as error:
            problems.append(f"{type(model).__name__}: {error}; set [axes] tensor = 1, or {_DECLARE}")
    if problems:
        raise ModelError(list(dict.fromkeys(problems)))
    return made


def _planned_parts(model: nn.Module) -> list[_Part]:
    """In the order of registration."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not hasattr(model, "config"):
        return []
    found = []
    for name, thing in (*model.named_modules(), *model.named_parameters()):
        if (pattern := _pattern(name)) in plan:
            owner = model.get_submodule(name.rpartition(".")[0])
            found.append(_Part(name=name, pattern=pattern, style=str(plan[pattern]), thing=thing, owner=owner))
    return found


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _by_parent(model: Any, parts: Sequence[_Part]) -> list[list[_Part]]:
    """Parts grouped by parent, without embedding and head."""
    ends = _ends(model) if parts else ()
    inside: dict[str, list[_Part]] = {}
    for part in parts:
        if not any(part.thing is end for end in ends):
            inside.setdefault(part.parent, []).append(part)
    return list(inside.values())


def _ends(model: Any) -> tuple[Any, Any]:
    """The embedding of the inputs and the layer of the outputs, or None."""
    try:
        return model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # a model of images, for example
        return None, None


def _find_group(parts: Sequence[_Part]) -> _Group | None:
    """The parts under one parent that are cut; None if all of them stay whole."""
    for part in parts:
        if part.style not in STYLES:
            raise _Unclear(f"{part.said}, a style that weft does not know")
        if part.style == EMBEDDING:
            raise _Unclear(f"{part.said}, which is not the embedding of the model's inputs")
    columns, rows, gathered, split_rows = ([part for part in parts if part.style == style] for style in STYLES[:4])
    if not columns and not rows and gathered and {part.leaf for part in gathered} <= FUSED:
        columns, rows = gathered, split_rows
    if not columns and not rows:
        return None
    layers = [part for part in columns if isinstance(part.thing, nn.Module)]
    if not layers or len(rows) != 1 or not isinstance(rows[0].thing, nn.Module):
        raise _Unclear(
            f"{(rows or columns)[-1].said}, and under that module {len(layers)} column and {len(rows)} row layers in "
            "all, where a region has one row layer and at least one column layer"
        )
    planned = tuple(part for part in parts if part.style != PARTIAL)
    return _Group(columns=tuple(columns), row=rows[0], planned=planned)


def _make_region(group: _Group) -> Region:
    heads, width = _find_heads(group), _linear(group.row).in_features
    cuts = [
        Cut(name=name, dim=0, sections=_sections(part, tensor.shape[0], heads, width))
        for part in group.columns
        for name, tensor in part.tensors()
    ]
    cuts.append(Cut(name=f"{group.row.name}.weight", dim=1, sections=_sections(group.row, width, heads, width)))
    partial = []
    for name, tensor in _other_tensors(group):
        shape = tuple(tensor.shape)
        if tensor.numel() == 1 or (heads is not None and shape == (heads.dim,)):
            partial += [name] if isinstance(tensor, nn.Parameter) else []
        elif heads is not None and shape in ((heads.queries, heads.dim), (heads.keys, heads.dim)):
            cuts.append(Cut(name=name, dim=0, sections=(Section(num_units=shape[0]),)))
        else:
            raise _Unclear(f'its plan does not say how to split "{_pattern(name)}", of shape {shape}')
    return Region(
        columns=(tuple(part.name for part in group.layers),),
        rows=(group.row.name,),
        cuts=tuple(cuts),
        partial=tuple(partial),
        counts=() if heads is None else tuple(_counts(group, heads)),
    )


def _linear(part: _Part) -> nn.Linear:
    assert isinstance(part.thing, nn.Linear)
    return part.thing


def _find_heads(group: _Group) -> _Heads | None:
    """The heads of an attention module; None for other modules, whose features may be cut anywhere."""
    owner = group.row.owner
    dim = getattr(owner, "head_dim", getattr(owner, "head_size", None))
    if dim is None:
        return None
    config = getattr(owner, "config", None)
    queries = getattr(config, "num_attention_heads", None)
    if queries is None:
        raise _Unclear(f"{group.row.said}, but no configuration beside it says how many heads of {dim} there are")
    by_leaf = {part.leaf: part for part in group.layers}
    if "k_proj" in by_leaf:  # some layers have another number of key heads than the configuration
        keys = -(-_linear(by_leaf["k_proj"]).out_features // dim)
    elif "q_proj" in by_leaf:
        raise _Unclear(f'{by_leaf["q_proj"].said}, but there is no "k_proj" beside it')
    else:
        keys = getattr(config, "num_key_value_heads", None) or queries
    return _Heads(queries=queries, keys=keys, dim=dim)


def _sections(part: _Part, length: int, heads: _Heads | None, width: int) -> tuple[Section, ...]:
    """The units along a dim of `length` entries; `width`: number of features that the row layer takes."""
    if heads is None:
        sections = (Section(num_units=width),) * (2 if part.leaf == GATE_UP else 1)
    elif part.leaf == QUERIES_KEYS_VALUES:
        sections = tuple(Section(num_units=n, unit=heads.dim) for n in (heads.queries, heads.keys, heads.keys))
    else:
        number = heads.keys if part.leaf in KEYS_OR_VALUES else heads.queries
        sections = (Section(num_units=number, unit=length // number),)
    expected = sum(section.length for section in sections)
    if expected != length:
        units = "" if heads is None else f", {heads.queries} heads of {heads.dim} for {heads.keys} of keys"
        raise _Unclear(
            f"{part.said}, which has {length} features and not {expected} (the row layer takes {width}{units})"
        )
    return sections


def _other_tensors(group: _Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under a region's module that the plan does not name."""
    planned = [part.name for part in group.planned]
    owner, prefix = group.row.owner, group.row.parent
    for name, tensor in (*owner.named_parameters(prefix=prefix), *owner.named_buffers(prefix=prefix)):
        if not any(name == known or name.startswith(f"{known}.") for known in planned):
            yield name, tensor


def _counts(group: _Group, heads: _Heads) -> Iterator[Count]:
    name, module = group.row.parent, group.row.owner
    numbers = {"num_heads": heads.queries, "num_attention_heads": heads.queries, "num_key_value_heads": heads.keys}
    for attribute, number in numbers.items():
        if getattr(module, attribute, None) == number:
            yield Count(module=name, attribute=attribute, num_units=number)
    if hasattr(module, "num_key_value_groups"):
        yield Count(module=name, attribute="num_key_value_groups", num_units=heads.queries, per_units=heads.keys)
    if any(part.leaf == QUERIES_KEYS_VALUES for part in group.layers):  # its code splits them by its config
        yield Count(module=name, attribute="config.num_attention_heads", num_units=heads.queries)


def _vocabulary(model: Any, parts: Sequence[_Part]) -> tuple[list[Region], list[Region]]:
    """The regions of the embedding and of the head. Tied ones are split both or neither, whatever the plan says."""
    embedding, head = _ends(model)
    names = {id(thing): name for name, thing in (*model.named_modules(), *model.named_parameters())}
    styles = {id(part.thing): part.style for part in parts}
    is_tied = head is not None and getattr(embedding, "weight", None) is head.weight
    cuts_head = type(head) is nn.Linear and styles.get(id(head)) == GATHERED_COLUMN
    cuts_embedding = cuts_head if is_tied else styles.get(id(embedding)) == EMBEDDING
    # Rows that a lookup changes (max_norm), or whose gradients are sparse, cannot be sharded.
    if not isinstance(embedding, nn.Embedding) or embedding.sparse or embedding.max_norm is not None:
        cuts_embedding, cuts_head = False, cuts_head and not is_tied
    return (
        [Region(rows=(names[id(embedding)],), cuts=_token_cuts(embedding, names))] if cuts_embedding else [],
        [Region(columns=((names[id(head)],),), cuts=_token_cuts(head, names), is_output=True)] if cuts_head else [],
    )


def _token_cuts(module: nn.Module, names: Mapping[int, str]) -> tuple[Cut, ...]:
    """Cuts along the vocabulary. A tied weight is known by its first name."""
    return tuple(
        Cut(name=names[id(tensor)], dim=0, sections=(Section(num_units=tensor.shape[0]),))
        for tensor in module.parameters(recurse=False)
    )
