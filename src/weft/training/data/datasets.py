"""Datasets: token windows, tensors, and the texts and files they are made from.

A dataset is anything with `len(dataset)` and `dataset[index] -> (inputs, targets)`, as torch's map datasets are. weft's
own fetch a whole batch at once with `take`, which for small samples is far faster than one by one; their base class
tells them apart, since other libraries use the name `take` for other things. Nothing is downloaded, and files of tokens
are memory-mapped. `batches.py` decides which rank gets which sample.
"""

from __future__ import annotations

import glob
import os
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weft.errors import DataError, nearest
from weft.training.data.trees import Tree, map_tensors, named_tensors, split_tree, stack_samples

Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.integer[Any]]
Batch = tuple[Tree, Tree]

TOKEN_DTYPES = ("uint8", "uint16", "int16", "uint32", "int32", "int64")
FINGERPRINT_BYTES = 1 << 20
FINGERPRINT_SAMPLES = 1024
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Dataset(Protocol):
    """A map dataset, as `batches` uses it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class BatchDataset(ABC):
    """A dataset that fetches many samples in one call; `batches` uses `take` alone."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Indices) -> Batch:
        """(inputs, targets) of these samples, along dim 0, in this order. Called from a background thread."""

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, targets = map_tensors(lambda tensor: tensor[0], self.take(np.array([index])))
        return inputs, targets


class TokenWindows(BatchDataset):
    """Windows of `context` tokens, one after another; the targets are the inputs shifted by one token."""

    def __init__(self, tokens: npt.ArrayLike, context: int) -> None:
        # asarray leaves a memory map on disk: nothing is read until a window is taken.
        self.tokens: Tokens = np.asarray(tokens)
        self.context = context
        problems = []
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            problems.append(f"tokens are {self.tokens.ndim}-dim {self.tokens.dtype}; give 1-dim integers")
        if context < 1:
            problems.append(f"context is {context}; give at least 1 token")
        elif not problems and len(self) < 1:
            problems.append(
                f"one window of context {context} needs {context + 1} tokens, there are {self.tokens.size}; "
                "give more tokens or a shorter context"
            )
        if problems:
            raise DataError(problems)

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.context

    def take(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        windows = self.tokens[indices[:, None] * self.context + np.arange(self.context + 1)]
        # Two contiguous copies, since a loss may call .view(-1) on its targets.
        inputs, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class TensorSamples(BatchDataset):
    """Samples held in memory along dim 0 of two tensors."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"there are {len(inputs)} inputs and {len(targets)} targets; give as many of each")
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.from_numpy(indices)
        return self.inputs[at], self.targets[at]


def fetch(dataset: Dataset, indices: Indices) -> Batch:
    """(inputs, targets) of these samples. An empty batch has the shapes and dtypes of sample 0."""
    if not len(indices):
        inputs, targets = split_tree(fetch(dataset, np.zeros(1, np.int64)), 0, 0)
        return inputs, targets
    if isinstance(dataset, BatchDataset):
        return dataset.take(indices)
    samples = [_read(dataset, int(index)) for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            length = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            raise DataError(f"sample {index} is a {type(sample).__name__}{length}; give a pair (inputs, targets)")
    inputs, targets = stack_samples(samples)
    return inputs, targets


def _read(dataset: Dataset, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # the user's own, raised as it is: only where it happened is added
        error.add_note(f"while sample {index} of the {type(dataset).__name__} was read")
        raise


def fingerprint(dataset: Dataset, *, before: Callable[[], None] = lambda: None) -> int:
    """A checksum of the length and of evenly spaced samples, by which ranks compare their data.

    About 1 MB of samples are read, at most 1024 and at least 2. If they differ when read again (random augmentation),
    the length alone counts. `before` is called before each reading.
    """
    total = len(dataset)
    length_checksum = zlib.crc32(f"{total} samples".encode())
    if not total:
        return length_checksum
    first = fetch(dataset, np.zeros(1, np.int64))
    sample_bytes = sum(tensor.nbytes for _, tensor in named_tensors(first))
    wanted = min(max(FINGERPRINT_BYTES // max(sample_bytes, 1), 2), FINGERPRINT_SAMPLES, total)
    indices = np.arange(wanted, dtype=np.int64) * (total - 1) // max(wanted - 1, 1)
    checksums = []
    for _ in range(2):
        before()
        checksums.append(_checksum(fetch(dataset, indices), length_checksum))
    return checksums[0] if checksums[0] == checksums[1] else length_checksum


def _checksum(tree: Tree, checksum: int) -> int:
    for path, tensor in named_tensors(tree):
        checksum = zlib.crc32(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        flat = tensor.detach().cpu().contiguous().flatten()
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum)
    return checksum


def standard_library_text() -> npt.NDArray[np.uint8]:
    """The source of this Python's standard library, without its tests, as bytes: a corpus that every machine has."""
    root = sysconfig.get_path("stdlib")
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    # Distributions link sitecustomize.py to a file that may not be installed.
    paths = [path for path in paths if os.path.isfile(path)]
    if not paths:
        raise DataError(f"there is no .py file under {root}; name text files of your own instead")
    return _join(sorted(Path(path) for path in paths))


def text_files(paths: str | Path | Iterable[str | Path]) -> npt.NDArray[np.uint8]:
    """The bytes of these files, in order, joined by newlines; a glob (`**` too) stands for its sorted matches."""
    found: dict[Path, None] = {}  # a file that two globs match is read once
    problems = []
    for given in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(given).expanduser()
        if path.is_file():
            found[path] = None
        elif path.is_dir():
            problems.append(f'"{given}" is a folder; name its files, for instance "{path / "**" / "*.txt"}"')
        else:
            matches = [match for match in sorted(map(Path, glob.glob(str(path), recursive=True))) if match.is_file()]
            found.update(dict.fromkeys(matches))
            if not matches:
                problems.append(f'no file matches "{given}" (in {os.getcwd()}); check the spelling')
    if not problems and not any(path.stat().st_size for path in found):
        problems.append(f"the {len(found)} text files hold 0 bytes; name files with text in them")
    if problems:
        raise DataError(problems)
    return _join(found)


def _join(paths: Iterable[Path]) -> npt.NDArray[np.uint8]:
    contents, problems = [], []
    for path in paths:
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            problems.append(f"{path} cannot be read ({error.strerror}); mend its permissions or leave it out")
    if problems:
        raise DataError(problems)
    return np.frombuffer(b"\n".join(contents), np.uint8)


def token_file(path: str | Path, dtype: str = "uint16") -> Tokens:
    """A memory map of a file that holds little-endian tokens only."""
    if dtype not in TOKEN_DTYPES:
        raise DataError(f'tokens cannot have dtype "{dtype}"; {nearest(dtype, TOKEN_DTYPES)}')
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path} is a folder; name a file" if path.is_dir() else f"there is no token file {path}")
    item = np.dtype(dtype).newbyteorder("<")
    num_bytes = path.stat().st_size
    if num_bytes == 0 or num_bytes % item.itemsize:
        raise DataError(
            f"{path} has {num_bytes} bytes, which is no number of {dtype} tokens of {item.itemsize} bytes each; "
            "check the dtype and that the file is whole"
        )
    return np.memmap(path, item, mode="r")


def max_token(tokens: Tokens, *, chunk_tokens: int = 1 << 24) -> int:
    """The largest token, read in chunks, for comparison with the vocabulary; negative tokens are refused."""
    if not tokens.size:
        raise DataError("there are 0 tokens; give at least 1")
    largest = 0
    for start in range(0, tokens.size, chunk_tokens):
        chunk = tokens[start : start + chunk_tokens]
        if tokens.dtype.kind == "i" and int(chunk.min()) < 0:
            where = start + int(chunk.argmin())
            raise DataError(f"token {int(tokens[where])} at position {where} is negative; check the dtype of the file")
        largest = max(largest, int(chunk.max()))
    return largest


def split_held_out(tokens: Tokens, fraction: float, context: int) -> tuple[Tokens, Tokens]:
    """(train, held out): the last `fraction` of the tokens is held out; both hold at least one window."""
    if not 0 < fraction < 1:
        raise DataError(f"the held-out fraction is {fraction}; give more than 0 and less than 1")
    held_out = int(tokens.size * fraction)
    parts = {"training": tokens.size - held_out, "held-out": held_out}
    problems = [
        f"the {name} part has {size} of {tokens.size} tokens, one window of context {context} needs {context + 1}; "
        "give more tokens, a shorter context or another held-out fraction"
        for name, size in parts.items()
        if size < context + 1
    ]
    if problems:
        raise DataError(problems)
    return tokens[: tokens.size - held_out], tokens[tokens.size - held_out :]


def digits() -> tuple[TensorSamples, TensorSamples]:
    """(train, held out): scikit-learn's 1,797 handwritten digits, images (N, 1, 8, 8) from 0 to 1 and their labels.

    The last 360 are held out and hold every digit about equally. Every fifth would not: labels have period 10.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise DataError("the digits dataset comes with scikit-learn; pip install scikit-learn") from None
    source = load_digits()
    images = torch.from_numpy(source.images).to(torch.float32).div(16).unsqueeze(1)
    labels = torch.from_numpy(source.target).to(torch.int64)
    return TensorSamples(images[:-360], labels[:-360]), TensorSamples(images[-360:], labels[-360:])
