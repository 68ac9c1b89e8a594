"""One microbatch's backward pass through one stage in two halves: input gradients now, weight gradients later.

Zero-bubble schedules send a stage's input gradients as early as they can and fill their bubbles with the rest. Autograd
knows only whole passes, so the graph is cut in two:

    root ── gelu ── addmm ── norm ── addmm ── input     ──  the path: nodes that lead to an input       (first half)
                      ╎        ╎       ╎
                      t     weight     t                ╎   cuts: edges from the path to nodes that lead
                      │                │                    to parameters and to no input
                   weight           weight              │   beyond the cuts                            (second half)

1. One walk over the graph finds the path and the cuts.
2. The first half is torch's own backward pass for the inputs. Hooks keep the incoming gradients of each cut node.
3. The second half calls each cut node once more with those, from the roots down, and accumulates the gradients of its
   cut edges. A node asks the backward pass it runs in which of its results are wanted. Here that is a pass which wants
   the cut edges only, so no product is computed twice, and no node between two cut nodes runs again.

Cut nodes that share a parameter accumulate together, so that a parameter's hooks run once per microbatch. Each group
accumulates as soon as its last node has run, so that the gradient exchange can begin.

A Python `autograd.Function` computes all its gradients whenever it runs, wanted or not (torch.compile makes such
functions, for which `torch._functorch.config.donated_buffer` must be off). Where it is a cut node, the gradients beyond
the cut are kept from the first half until the second.

Between the halves the graph keeps all that it has saved: autograd frees only whole graphs. Blocks under torch's
checkpoint (not reentrant) are recomputed once in each half. A hook on a cut node (`Node.register_hook`, not a tensor's)
runs in the first half only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.hooks import RemovableHandle

AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

ACCUMULATE_AT_BYTES = 2**20
"""Groups with fewer bytes of gradients accumulate together: each backward pass costs some 20 us."""

# Bits of what a node leads to.
INPUT = 1
PARAMETER = 2


def run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
    """`torch.autograd.backward` without its checks, which take longer than a small stage's backward pass."""
    _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
    )


class SplitBackward:
    """The second half of a backward pass whose first half has run: `input_grads` makes one."""

    __slots__ = ("_cuts", "_parameters")

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._cuts: list[_Cut] | None = []

    @classmethod
    def input_grads(
        cls,
        edges: Sequence[GradientEdge],
        given: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> Self:
        """Run the first half, from roots with given gradients: add to `.grad` of the inputs, which are leaves, touching
        no parameter. Without inputs, as on the first stage, it does nothing and the second is the whole backward pass.
        """
        split = cls(parameters)
        leads_to, cuts_of = _survey(edges, inputs, split._parameters) if inputs else ({}, {})
        on_path = [k for k, edge in enumerate(edges) if leads_to.get(edge.node, PARAMETER) & INPUT]
        beside = [k for k, edge in enumerate(edges) if leads_to.get(edge.node, PARAMETER) == PARAMETER]
        if beside:
            split._keep(None, [(k, edges[k]) for k in beside], given)
        if on_path:
            handles = [split._watch(node, found) for node, found in cuts_of.items()]
            try:
                torch.autograd.backward(
                    [edges[k] for k in on_path], [given[k] for k in on_path], retain_graph=True, inputs=list(inputs)
                )
            finally:
                for handle in handles:
                    handle.remove()
        return split

    def weight_grads(self) -> None:
        """Run the second half: add to `.grad` of the parameters, run their hooks, free the graph."""
        assert self._cuts is not None, "the second half of a backward pass can run once only"
        cuts, self._cuts = self._cuts, None
        if not cuts or not self._parameters:
            return
        groups = _grouped(cuts, self._parameters)
        wanted = [edge for cut in cuts if cut.node is not None for _, edge in cut.edges]
        # The groups accumulate in separate backward passes, which share one recomputation of each block.
        with GraphExecGroup():
            _within_a_pass(wanted, partial(_accumulate_all, cuts, groups))

    def _watch(self, node: Node, edges: list[tuple[int, GradientEdge]]) -> RemovableHandle:
        """Keep the incoming gradients of a cut node, or the outgoing ones where it cannot be called again."""
        if isinstance(node, BackwardCFunction):
            return node.register_hook(lambda flowing, _: self._keep(None, edges, flowing))
        return node.register_prehook(partial(self._keep, node, edges))

    def _keep(
        self, node: Node | None, edges: list[tuple[int, GradientEdge]], gradients: Sequence[Tensor | None]
    ) -> None:
        assert self._cuts is not None
        self._cuts.append(_Cut(node=node, edges=edges, gradients=gradients))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The cut edges of one node, and what the second half needs to compute their gradients."""

    node: Node | None
    """The node to call; None if the gradients are already those of the edges."""
    edges: list[tuple[int, GradientEdge]]
    """The cut edges, each with its index among the node's results, or among the gradients if there is no node."""
    gradients: Sequence[Tensor | None]
    """The node's incoming gradients, one per output of its forward pass."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """Cuts whose parameters overlap, so that they accumulate together."""

    waiting: int = 0
    """Number of cut nodes still to be called."""
    parameters: list[Tensor] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def take(self, other: Self) -> None:
        self.parameters += other.parameters
        self.edges += other.edges
        self.gradients += other.gradients
        other.edges, other.gradients = [], []

    def num_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    def accumulate(self) -> None:
        if self.edges:
            # torch.autograd.backward would refuse a gradient not yet summed to the shape of a broadcast operand.
            run_backward(self.edges, self.gradients, self.parameters)


def _survey(
    roots: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[dict[Node, int], dict[Node, list[tuple[int, GradientEdge]]]]:
    """The bits of what each node leads to, and the cut edges of the nodes that have any."""
    leaves = dict.fromkeys(map(id, parameters), PARAMETER) | dict.fromkeys(map(id, inputs), INPUT)
    leads_to: dict[Node, int] = {}
    cuts_of: dict[Node, list[tuple[int, GradientEdge]]] = {}
    stack: list[tuple[Node, Any]] = [(edge.node, None) for edge in roots]
    while stack:
        node, edges = stack.pop()
        if node in leads_to:
            continue
        if type(node) is AccumulateGrad:
            leads_to[node] = leaves.get(id(_leaf_of(node)), 0)
            continue
        if edges is None:
            edges = node.next_functions
            below = [(child, None) for child, _ in edges if child is not None and child not in leads_to]
            if below:
                stack.append((node, edges))
                stack += below
                continue
        found = 0
        beyond = False
        for child, _ in edges:
            if child is not None:
                found |= leads_to[child]
                beyond = beyond or leads_to[child] == PARAMETER
        leads_to[node] = found
        if beyond and found != PARAMETER:
            cuts_of[node] = [
                (k, GradientEdge(*edge)) for k, edge in enumerate(edges) if leads_to.get(edge[0]) == PARAMETER
            ]
    return leads_to, cuts_of


def _leaf_of(node: Node) -> Tensor:
    """The leaf whose gradient this node accumulates."""
    leaf: Tensor = node.variable  # type: ignore[attr-defined]
    return leaf


def _grouped(cuts: list[_Cut], parameters: Sequence[Tensor]) -> list[_Group]:
    """The group of each cut. Those that meet at any node beyond their cuts share one."""
    if len(cuts) == 1:
        return [_Group(waiting=1, parameters=list(parameters))]
    known = set(map(id, parameters))
    merged_into = list(range(len(cuts)))

    def first_of(k: int) -> int:
        while merged_into[k] != k:
            k = merged_into[k]
        return k

    owner: dict[Node, int] = {}
    for k, cut in enumerate(cuts):
        stack = [edge.node for _, edge in cut.edges]
        while stack:
            node = stack.pop()
            if node in owner:
                one, other = sorted((first_of(k), first_of(owner[node])))
                merged_into[other] = one
            else:
                owner[node] = k
                stack.extend(child for child, _ in node.next_functions if child is not None)
    groups = {first: _Group() for first in map(first_of, merged_into)}
    for node, k in owner.items():
        if type(node) is AccumulateGrad and id(_leaf_of(node)) in known:
            groups[first_of(k)].parameters.append(_leaf_of(node))
    members = [groups[first] for first in map(first_of, range(len(cuts)))]
    for group in members:
        group.waiting += 1
    return members


def _accumulate_all(cuts: list[_Cut], groups: list[_Group]) -> None:
    """Call the cut nodes and accumulate each group once it is complete. Both lists are used up."""
    # Popped one by one: a node owns those below it, so what lies between two cut nodes is freed on the way.
    cuts.reverse()
    groups.reverse()
    complete = _Group()
    while cuts:
        cut, group = cuts.pop(), groups.pop()
        flowing: Sequence[Tensor | None] = cut.gradients
        if cut.node is not None:
            flowing = cut.node(*cut.gradients)  # type: ignore[operator]
        for k, edge in cut.edges:
            gradient = flowing[k]
            if gradient is not None:
                group.edges.append(edge)
                group.gradients.append(gradient)
        del cut, flowing, gradient
        group.waiting -= 1
        if not group.waiting:
            complete.take(group)
            if not cuts or complete.num_bytes() >= ACCUMULATE_AT_BYTES:
                complete.accumulate()
                complete = _Group()


def _within_a_pass(wanted: list[GradientEdge], call: Callable[[], None]) -> None:
    """Call a function from a node of a backward pass that wants these edges, and in which nothing leads to them."""
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        edge = get_gradient_edge(leaf.clone())
    edge.node.register_prehook(lambda _: call())
    torch.autograd.grad([edge], [get_gradient_edge(leaf), *wanted], [torch.ones(())], allow_unused=True)
