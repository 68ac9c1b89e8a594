"""The places where a model may be cut: prelude, blocks, postlude, found in an ordinary module without changing it.

A block list is the longest `ModuleList` or `Sequential` whose members are all of one class with parameters; without
one, the longest `Sequential` of whatever layers. Modules registered before it are the prelude, those after it the
postlude. A model whose order of registration is not its order of use, or with several equal lists, declares its own:

    def weft_blueprint(self) -> Blueprint: ...

A blueprint holds names, not modules: plain data that outlives the model and can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from weft.errors import ModelError
from weft.plan.partition.tensor import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The ways in which a model gets position ids, for ranks that have only some tokens of a sequence."""

    argument: str | None = None
    """An argument of the model's forward that takes one position id per token; None: 0 to T - 1."""
    longest: int | None = None
    """The number of positions, if it does not follow from the modules and tables below."""
    num_dims: int = 1
    """Dims of that argument: 1 (tokens), or 2 (1, tokens)."""
    modules: tuple[str, ...] = ()
    """Submodules that are called with position ids, such as a position embedding."""
    tables: tuple[tuple[str, int], ...] = ()
    """Buffers of which the model takes the first rows, each with its dim of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The parts of a model, by the names of its submodules, in the order of use."""

    prelude: tuple[str, ...] = ()
    """The modules that turn inputs into activations."""
    blocks: tuple[str, ...] = ()
    """The repeated part; the model may be cut between any two of them. Empty: the model cannot be cut."""
    postlude: tuple[str, ...] = ()
    """The modules that turn activations into outputs."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of one and the same parameter, each group sorted by first appearance."""
    regions: tuple[Region, ...] | None = None
    """The layers split over the tensor axis; None: not declared, and found from the dataflow."""
    positions: Positions | None = None
    """Needed if the sequence axes split tokens; None: not declared."""


def find_blueprint(model: nn.Module) -> Blueprint:
    """The blueprint a model declares, or the one its block list implies."""
    declare = getattr(model, "weft_blueprint", None)
    if declare is not None:
        blueprint: Blueprint = declare()
        _refuse_unknown_names(blueprint, model)
        return replace(blueprint, tied=find_tied(model))
    owner = _longest_block_list(model)
    if owner is None:
        return Blueprint(tied=find_tied(model))
    prelude: list[str] = []
    postlude: list[str] = []
    parent = ""
    for step in owner.split(".") if owner else ():  # a list inside a module has neighbours on every level
        names = _children(model, parent)
        path = f"{parent}.{step}" if parent else step
        place = names.index(path)
        prelude, postlude = [*prelude, *names[:place]], [*names[place + 1 :], *postlude]
        parent = path
    return Blueprint(
        prelude=tuple(prelude),
        blocks=tuple(_children(model, owner)),
        postlude=tuple(postlude),
        tied=find_tied(model),
    )


def find_tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names under which one parameter appears more than once."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in names_of.values() if len(names) > 1)


def _children(model: nn.Module, parent: str) -> list[str]:
    return [f"{parent}.{name}" if parent else name for name, _ in model.get_submodule(parent).named_children()]


def _longest_block_list(model: nn.Module) -> str | None:
    best: tuple[bool, int, str] | None = None
    for name, module in model.named_modules():
        members = list(module.children())
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(members) < 2:
            continue
        have_parameters = [any(True for _ in member.parameters()) for member in members]
        is_alike = len({type(member) for member in members}) == 1 and all(have_parameters)
        is_stack = isinstance(module, nn.Sequential) and sum(have_parameters) > 1
        if (is_alike or is_stack) and (best is None or (is_alike, len(members)) > best[:2]):
            best = (is_alike, len(members), name)
    return None if best is None else best[2]


def _refuse_unknown_names(blueprint: Blueprint, model: nn.Module) -> None:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    positions = blueprint.positions or Positions()
    named = [*blueprint.prelude, *blueprint.blocks, *blueprint.postlude, *positions.modules]
    problems = [
        f'weft_blueprint names "{name}", which is not a submodule of the model' for name in named if name not in known
    ]
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    problems += [
        f'weft_blueprint names the table of positions "{table}", which is not a buffer of the model; for learned '
        "positions use an nn.Embedding and Positions(modules=...)"
        for table, _ in positions.tables
        if table not in buffers
    ]
    if problems:
        raise ModelError(problems)
