"""The models and datasets that a job names; its optimizer and schedule are in `optimizers.py`.

`prepare` builds everything but the weights and collects all problems of a job, so that a bad one is refused before any
rank is started.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.checkpoint.new_layers import NewLayers
from weft.errors import DataError, JobError, ModelError, WeftError, nearest
from weft.models.convnet import ConvNet, ConvNetConfig
from weft.models.gpt import GPT, GPTConfig
from weft.models.hugging_face import HuggingFaceModel, read_hugging_face
from weft.optim.schedule import Schedule
from weft.parallel.state.materialise import draw_seed, fill_alone
from weft.plan.fields import statement, toml
from weft.training.data import datasets
from weft.training.data.datasets import Dataset
from weft.training.loss.loss import LossFunction, resolve_loss
from weft.training.parallelize import ParameterGroups
from weft.training.run.imports import call_function, load_function, setting_problems
from weft.training.run.job import Job, Part
from weft.training.run.optimizers import make_groups, make_optimizer, make_schedule

_MODELS: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "gpt": (GPT, GPTConfig),
    "convnet": (ConvNet, ConvNetConfig),
}
_NEW_LAYERS = "new_layers"
_USUAL_CONTEXT = 256
"""Tokens per sample for a Hugging Face model, which may have positions for far more."""
_DATASET_SETTINGS: dict[str, tuple[Any, str]] = {
    "held_out": (int | float, "a number between 0 and 1"),
    "files": (list | str, "a list of file names, in quotes"),
    "file": (str, "the name of a file, in quotes"),
    "dtype": (str, "the name of a dtype, in quotes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The parts of a job, built except for the weights."""

    make_model: Callable[[], nn.Module]
    make_empty: Callable[[], nn.Module]
    """Makes the model for `parallelize`, which fills it: a Hugging Face model is on the meta device."""
    weights: Path | None
    """Folder of pretrained weights."""
    new_layers: tuple[str, ...]
    """Layers that are not in that folder."""
    loss: str | LossFunction
    train_data: Dataset
    held_out: Dataset | None
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: Schedule
    groups: ParameterGroups | None
    """Parameters that the optimizer treats differently, as `parallelize` takes them."""
    writes_text: bool
    """The model continues byte text and its vocabulary holds ASCII, so that a sample can be shown."""


def prepare(job: Job, *, besides: Sequence[str] = ()) -> Prepared:
    """Build what a job names; raises one error with all its problems, and those found `besides`."""
    parts, problems = build(job)
    if problems := [*besides, *problems]:
        raise JobError(problems)
    described = parts.described
    return Prepared(
        make_model=parts.make_model,
        make_empty=parts.make_empty,
        weights=None if described is None else described.weights,
        new_layers=tuple(job.model.settings.get(_NEW_LAYERS, ())),
        loss=parts.loss,
        train_data=parts.data[0],
        held_out=parts.data[1],
        optimizer=parts.optimizer,
        schedule=parts.schedule,
        groups=make_groups(job),
        writes_text=(job.model.name == "gpt" or (described is not None and described.continues_text))
        and job.dataset.name in ("standard-library", "text")
        and (_sizes_of(job.model)[2] or 0) >= 128,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a job that could be built; None for the others."""

    described: HuggingFaceModel | None
    make_model: Any
    loss: Any
    data: Any
    optimizer: Any
    schedule: Any

    @property
    def make_empty(self) -> Any:
        return self.make_model if self.described is None else self.described.build


def build(job: Job, *, doubtful: Collection[str] = ()) -> tuple[Parts, list[str]]:
    """Build what a job names, as far as that goes, and every problem. Nothing is made of `doubtful` sections."""
    problems: list[str] = []

    def attempt(make: Callable[[], Any], *sections: str) -> Any:
        try:
            return make() if not set(sections) & set(doubtful) else None
        except WeftError as error:
            problems.extend(error.problems)
            return None

    described = attempt(lambda: _hugging_face(job.model), "model")
    make_model: Any = None
    data: Any = None
    if described is not None or job.model.key == "name":
        make: Any = _model if described is None else lambda _: functools.partial(_filled, described)
        make_model = attempt(lambda: make(job.model), "model")
        data = attempt(lambda: _data(job), "model", "dataset")  # which needs the model's sizes
    loss = attempt(lambda: _loss(job.loss), "model")
    optimizer = attempt(lambda: make_optimizer(job.optimizer), "optimizer")
    schedule = attempt(lambda: make_schedule(job), "optimizer", "steps")
    if data is not None and "steps" not in doubtful and len(data[0]) < job.steps.global_batch:
        problems.append(
            f"the training data holds {len(data[0])} samples, one global batch needs {job.steps.global_batch}; "
            "give more data, a smaller [steps] global_batch or a smaller context"
        )
    if job.steps.evaluate_average and "steps" not in doubtful and not (job.plan and job.plan.average.decay):
        problems.append(
            "[steps] evaluate_average = true needs an average of the weights, and the plan keeps none; set [average] "
            "decay in the plan, such as 0.999"
        )
    return Parts(
        described=described, make_model=make_model, loss=loss, data=data, optimizer=optimizer, schedule=schedule
    ), problems


def context_of(job: Job) -> int:
    """Tokens per sample of a text or token dataset."""
    context = job.dataset.settings.get("context", _sizes_of(job.model)[0])
    if isinstance(context, bool) or not isinstance(context, int):
        raise DataError(f"a sample holds {toml(context)} tokens of context; give a whole number")
    return context


def _sizes_of(model: Part) -> tuple[Any, Any, Any]:
    """(default tokens per sample, most tokens, size of the vocabulary), as the job says them; None if unknown."""
    described = _hugging_face(model)
    if described is not None:
        return min(described.longest or _USUAL_CONTEXT, _USUAL_CONTEXT), described.longest, described.vocab_size
    default = {name: one.default for name, one in inspect.signature(GPTConfig).parameters.items()}
    context, vocab_size = (model.settings.get(name, default[name]) for name in ("context", "vocab_size"))
    return (context, context, vocab_size) if model.name == "gpt" else (context, None, None)


def _filled(described: HuggingFaceModel) -> nn.Module:
    model = described.build()
    fill_alone(model, draw_seed(), torch.device("cpu"))
    return model


def _hugging_face(part: Part) -> HuggingFaceModel | None:
    """The description of a Hugging Face model; None for any other model."""
    if part.key != "hf":
        return None
    changes = {name: value for name, value in part.settings.items() if name != _NEW_LAYERS}
    described = read_hugging_face(Path(part.name), changes)
    if (new := part.settings.get(_NEW_LAYERS)) is not None:
        if not isinstance(new, list) or not all(isinstance(name, str) for name in new):
            raise ModelError(f'{statement("model", _NEW_LAYERS, new)} must be a list of names, such as ["score"]')
        NewLayers(described.build(), new, has_weights=described.weights is not None)
    return described


def _model(part: Part) -> Callable[[], nn.Module]:
    if ":" in part.name:
        load_function(part.name, kind=ModelError)
        return functools.partial(call_function, part.name, part.settings, kind=ModelError)
    if part.name not in _MODELS:
        raise ModelError(
            f'[model] name = "{part.name}" is not known; {nearest(part.name, _MODELS)}, or module:function'
        )
    model_class, config_class = _MODELS[part.name]
    if problems := setting_problems(config_class, part.settings, "[model]"):
        raise ModelError(problems)
    return functools.partial(model_class, config_class(**part.settings))


def _loss(name: str) -> str | LossFunction:
    loss = load_function(name, kind=ModelError) if ":" in name else name
    resolve_loss(loss)
    return loss


def _data(job: Job) -> tuple[Dataset, Dataset | None]:
    part = job.dataset
    if ":" in part.name:
        made = call_function(part.name, part.settings, kind=DataError)
        return made if isinstance(made, tuple) else (made, None)
    builders: dict[str, Callable[..., tuple[Dataset, Dataset | None]]] = {
        "standard-library": functools.partial(_standard_library, job),
        "text": functools.partial(_text, job),
        "tokens": functools.partial(_tokens, job),
        "digits": datasets.digits,
    }
    if part.name not in builders:
        raise DataError(
            f'[dataset] name = "{part.name}" is not known; {nearest(part.name, builders)}, or module:function'
        )
    settings = dict(part.settings)
    if part.name != "digits":
        settings.pop("context", None)  # read by context_of
    problems = setting_problems(builders[part.name], settings, "[dataset]")
    for name, value in settings.items():
        kind, words = _DATASET_SETTINGS.get(name, (object, ""))
        if not isinstance(value, kind) or isinstance(value, bool):
            problems.append(f"{statement('dataset', name, value)} must be {words}")
    if problems:
        raise DataError(problems)
    return builders[part.name](**settings)


def _standard_library(job: Job, *, held_out: float = 0.02) -> tuple[Dataset, Dataset]:
    return _windows(job, datasets.standard_library_text(), held_out)


def _text(job: Job, *, files: list[str], held_out: float = 0.02) -> tuple[Dataset, Dataset]:
    if odd := [name for name in files if not isinstance(name, str)]:
        raise DataError(f"{statement('dataset', 'files', odd)} must be a list of file names, in quotes")
    return _windows(job, datasets.text_files(files), held_out)


def _tokens(job: Job, *, file: str, dtype: str = "uint16", held_out: float = 0.02) -> tuple[Dataset, Dataset]:
    return _windows(job, datasets.token_file(Path(file), dtype), held_out)


def _windows(job: Job, tokens: np.ndarray[Any, Any], held_out: float) -> tuple[Dataset, Dataset]:
    context, (_, longest, known), problems = context_of(job), _sizes_of(job.model), []
    if isinstance(longest, int) and context > longest:
        name = "context" if job.model.key == "name" else "max_position_embeddings"
        problems.append(
            f"[dataset] context = {context} is longer than [model] {name} = {longest}; set [dataset] context to "
            f"{longest} or less, or [model] {name} to {context}"
        )
    if isinstance(known, int) and (largest := datasets.max_token(tokens)) >= known:
        problems.append(
            f"the data holds token {largest}, [model] vocab_size = {known} knows 0 to {known - 1}; "
            f"use vocab_size = {largest + 1} or more"
        )
    described = _hugging_face(job.model)
    if described is not None and not described.continues_text:
        problems.append(
            f'[dataset] name = "{job.dataset.name}" has the next token as the target of each, and '
            f"{described.kind.__name__} does not predict it from those before; give a dataset of your own "
            "(module:function)"
        )
    if problems:
        raise DataError(problems)
    train, rest = datasets.split_held_out(tokens, held_out, context)
    return datasets.TokenWindows(train, context), datasets.TokenWindows(rest, context)
