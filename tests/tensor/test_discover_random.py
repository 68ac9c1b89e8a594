"""Random programs between layers: every split that is found gives the whole program's outputs and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from discovered import run_split
from torch import Tensor, nn

from weft.parallel.tensor.discovery.find import find

B, T, C = 2, 4, 12
Step = Callable[["Program", list[Tensor]], Tensor]


class Program(nn.Module):
    """Random steps, each of which computes a tensor from earlier ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.layers, self.learned = nn.ModuleList(), nn.ParameterList()
        self.steps: list[Step] = []
        self.shapes: list[torch.Size] = [torch.Size((B, T, C))]
        self.num_split = self.draw.choice((12, 24, 36))
        source = self.add_layer(0, C) if self.draw.random() < 0.5 else 0
        made = [self.add_layer(source, self.num_split)]
        for _ in range(self.draw.randint(2, 8)):
            if self.draw.random() < 0.15:
                made.append(self.add_layer(source, self.draw.choice((1, self.num_split))))
            else:
                made += self.add_step(made)
        fit = [place for place in made if self.shapes[place][:2] == (B, T) and self.shapes[place][2:].numel() > 1]
        self.ends = [self.add_layer(self.add_flat(end), C) for end in {fit[-1], self.draw.choice(fit)}]

    def add(self, step: Step) -> int | None:
        """The place of a step's result; None if the step does not fit."""
        values = [torch.zeros(shape) for shape in self.shapes]
        try:
            made = step(self, values)
        except (RuntimeError, IndexError):
            return None
        if made.numel() == 0 or made.numel() > 20_000 or made.dim() < 3:
            return None
        self.steps.append(step)
        self.shapes.append(made.shape)
        return len(self.shapes) - 1

    def add_flat(self, place: int) -> int:
        made = self.add(lambda program, values: values[place].flatten(2))
        assert made is not None
        return made

    def add_layer(self, place: int, width: int) -> int:
        self.layers.append(nn.Linear(self.shapes[place][-1], width, bias=self.draw.random() < 0.5))
        number = len(self.layers) - 1
        made = self.add(lambda program, values: program.layers[number](values[place]))
        assert made is not None
        return made

    def add_step(self, made: list[int]) -> list[int]:
        """Add a random step of one or two operands, if it fits."""
        draw = self.draw
        first, second = draw.choice(made[-3:]), draw.choice(made)
        shape = self.shapes[first]
        dim, other = draw.randrange(len(shape)), draw.randrange(len(shape))
        size = shape[dim]
        number = draw.randrange(1, size) if size > 1 else 1
        factor = draw.choice([factor for factor in range(1, size + 1) if size % factor == 0])
        rest = shape[2:].numel()
        kept = [size if draw.random() < 0.5 else 1 for size in shape[2:]]
        self.learned.append(nn.Parameter(torch.randn(kept)))
        last = len(self.learned) - 1
        kinds: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda x, y: x.relu(),
            lambda x, y: x.unflatten(dim, (factor, size // factor)),
            lambda x, y: x.flatten(2, 3),
            lambda x, y: x.transpose(dim, other),
            lambda x, y: x.split([number, size - number], dim)[0],
            lambda x, y: x.chunk(2, dim)[-1],
            lambda x, y: x.softmax(dim),
            lambda x, y: x * x.mean(dim, keepdim=True),
            lambda x, y: x * y,
            lambda x, y: torch.cat((x, y), dim),
            lambda x, y: x.repeat_interleave(2, dim),
            lambda x, y: x @ y.mT,
            lambda x, y: x @ y,
            lambda x, y: x.narrow(dim, size - number, number),
            lambda x, y: x.unsqueeze(dim).expand(*(3 if d == dim else -1 for d in range(x.dim() + 1))),
            lambda x, y: x.reshape(*x.shape[:2], factor, rest // factor),
            lambda x, y: x.sum(dim),
            lambda x, y: x[(slice(None),) * dim + (slice(number % 2, None, 2),)],
            lambda x, y: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
        ]
        kind = draw.randrange(len(kinds) + 2)
        if kind >= len(kinds):
            place = self.add(lambda program, values: values[first] * program.learned[last])
        else:
            place = self.add(lambda program, values: kinds[kind](values[first], values[second]))
        return [] if place is None else [place]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(step(self, values))
        return sum((values[end] for end in self.ends), values[0])


@pytest.mark.parametrize("seed", range(30))
def test_a_random_program_is_split_right(seed: int) -> None:
    torch.manual_seed(seed)
    program = Program(seed).double()
    x = torch.randn(B, T, C, dtype=torch.float64)
    largest = float(program(x).detach().abs().max())
    for tensor in (2, 3):
        regions = find(program, lambda meta_copy: meta_copy(x), tensor=tensor).regions
        assert run_split(program, regions, tensor, x) < 1e-9 * max(largest, 1.0)
