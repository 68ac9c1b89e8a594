"""Checkpoints that do not know the plan, with a plan-bound part beside them, and nothing ever half-written.

    step-100/
      checkpoint.json                       the index: step, data position, every file's size and checksum
      model-00001-of-00002.safetensors      whole tensors under the unsplit model's names, shared out over the ranks
      model.safetensors.index.json          the same index in Hugging Face's form
      optimizer-00001-of-00002.safetensors  "<parameter>/<state>"
      rank-00000.safetensors                plan-bound: random state, exchange state, buffers a rank keeps for itself

Every rank writes its share under a temporary name; when all of them report success the folder is renamed, so a folder
with its final name is whole. One that it replaces is moved aside first; should the run be killed just then, it is
found there and moved back. Loading checks every file's checksum (once, shared out over the ranks) before it changes
anything. The same plan goes on to the bit; another plan uses the portable part and says so.

Hyperparameters (learning rate, decay) are the run's, not the checkpoint's.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.comm.objects import gather_values
from weft.errors import CheckpointError
from weft.plan.text import format_plan
from weft.training.buffers import persistent_buffers
from weft.training.checkpoint_folders import INDEX, publish, refuse_foreign, restore
from weft.training.portable import Portable
from weft.training.tensor_files import FileRecord, TensorReader, find_damage, seal, share_out, write_tensors

if TYPE_CHECKING:
    from weft.training.trainer import Trainer

FORMAT = 1
_KINDS = _MODEL, _OPTIMIZER = "model", "optimizer"

log = logging.getLogger("weft")


def save(trainer: Trainer, directory: Path) -> None:
    """Write a checkpoint of a trainer; collective. An older one of that name is replaced when the new one is whole."""
    is_first = trainer.mesh.world.rank == 0
    partial = directory.with_name(f".{directory.name}.partial")
    portable = Portable(trainer)

    def prepare() -> None:
        if is_first:
            restore(directory)
            refuse_foreign(directory)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def commit() -> None:
        if is_first:
            model_bytes = sum(share["num_bytes"] for share in written if share["kind"] == _MODEL)
            _write_index(trainer, portable, partial, files, maps, model_bytes)
            publish(partial, directory)

    try:
        _together(trainer, "create", partial, prepare)
        _together(trainer, "reach", partial, lambda: _require_shared(partial))
        written = [
            *_write_kind(trainer, _MODEL, portable.model_sizes(), portable.model_tensors, partial),
            *_write_kind(trainer, _OPTIMIZER, portable.optimizer_sizes(), portable.optimizer_tensors, partial),
            *_together(trainer, "write", partial, lambda: _write_rank_part(trainer, partial)),
        ]
        files = [share["file"] for share in written if share["file"]]
        maps = {
            kind: {n: s["file"]["name"] for s in written if s["kind"] == kind for n in s["names"]} for kind in _KINDS
        }
        _together(trainer, "finish", directory, commit)
    except CheckpointError as error:
        if is_first:
            restore(directory)
            shutil.rmtree(partial, ignore_errors=True)  # where the disk is full, half a checkpoint is in the way
        raise CheckpointError([*error.problems, "nothing was saved; older checkpoints are untouched"]) from error


def load(trainer: Trainer, directory: Path) -> None:
    """Bring a trainer to where a checkpoint was taken; collective. Nothing changes unless the checkpoint is whole."""
    world, portable = trainer.mesh.world, Portable(trainer)
    index: dict[str, Any] = {}

    def find() -> None:
        if world.rank == 0:
            restore(directory)

    def look() -> None:
        index.update(read_index(directory))
        _refuse_other_model(trainer, portable, index, directory)

    _together(trainer, "restore", directory, find)
    _together(trainer, "read", directory, look)
    mine = [FileRecord(**record) for record in index["files"]][world.rank :: world.size]
    damage = [problem for record in mine if (problem := find_damage(directory, record)) is not None]
    problems = [p for part in gather_values(damage, trainer.mesh.everyone("control"), world.device) for p in part]
    if problems:
        raise CheckpointError(
            [*problems, f"{directory} cannot be used; delete it to go on from an older one beside it"]
        )
    portable.load_model(TensorReader(directory, index["tensors"][_MODEL]))
    portable.load_optimizer(TensorReader(directory, index["tensors"][_OPTIMIZER]), list(index["tensors"][_OPTIMIZER]))
    trainer.steps_done = index["step"]
    trainer.data_position = index["data_position"]
    trainer.seeds.base = index.get("dropout_seed", trainer.seeds.base)
    if index["plan"] == format_plan(trainer.plan):
        _read_rank_part(trainer, directory / _rank_file(world.rank))
        return
    if trainer.pipelined is not None:
        trainer.pipelined.load_state({}, {})
    torch.manual_seed(index["seed"] + world.rank)
    if world.rank == 0:
        log.warning("%s was written under another plan: weights, optimizer and data position are used, to rounding; "
                    "random states and exchange states start anew", directory)  # fmt: skip


def read_index(directory: Path) -> dict[str, Any]:
    """The index of a checkpoint, as plain values."""
    try:
        index: dict[str, Any] = json.loads((directory / INDEX).read_text())
    except OSError as error:
        raise CheckpointError(f"{directory} is not a checkpoint: {INDEX} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{directory / INDEX} is damaged: {error}") from error
    if not isinstance(index, dict) or _index_checksum(index) != index.get("crc32"):
        raise CheckpointError(f"{directory / INDEX} is damaged: its checksum does not match its content")
    if index.get("format") != FORMAT:
        raise CheckpointError(f"{directory} has checkpoint format {index.get('format')}, this weft reads {FORMAT}")
    return index


def _together(trainer: Trainer, verb: str, path: Path, action: Callable[[], Any]) -> list[Any]:
    """Do something on every rank; all ranks raise if it failed on any. Returns what it gave on each."""
    world = trainer.mesh.world
    outcome: dict[str, Any] = {"value": None, "problems": []}
    try:
        outcome["value"] = action()
    except CheckpointError as error:
        outcome["problems"] = error.problems
    except OSError as error:
        outcome["problems"] = [f"rank {world.rank} cannot {verb} {error.filename or path}: {error.strerror or error}"]
    outcomes = gather_values(outcome, trainer.mesh.everyone("control"), world.device)
    problems = [problem for outcome in outcomes for problem in outcome["problems"]]
    if problems:
        raise CheckpointError(list(dict.fromkeys(problems)))
    return [outcome["value"] for outcome in outcomes]


def _require_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise FileNotFoundError(
            2, "rank 0 made it, but it is not here: checkpoints need a folder all hosts share", partial
        )


def _write_kind(
    trainer: Trainer,
    kind: str,
    sizes: dict[str, int],
    gather: Callable[[set[str]], dict[str, torch.Tensor]],
    partial: Path,
) -> list[Any]:
    """Share out a stage's whole tensors over its ranks and write them; collective. What each rank wrote."""
    mesh = trainer.mesh
    same = mesh.batch_group("control")
    writer = same.index * mesh.size("tensor") + mesh.index("tensor")
    mine = share_out(sizes, same.size * mesh.size("tensor"))[writer]
    writers = gather_values(bool(mine), trainer.mesh.everyone("control"), trainer.mesh.world.device)
    number = sum(writers[: trainer.mesh.world.rank]) + 1
    tensors = gather(set(mine))
    path = partial / f"{kind}-{number:05d}-of-{max(sum(writers), 1):05d}.safetensors"

    def write() -> dict[str, Any]:
        record = write_tensors(path, {name: tensors[name] for name in mine}, {"format": "pt"}) if mine else None
        num_bytes = sum(sizes[name] for name in mine)
        return {"kind": kind, "file": asdict(record) if record else None, "names": mine, "num_bytes": num_bytes}

    return _together(trainer, "write", partial, write)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_rank_part(trainer: Trainer, partial: Path) -> dict[str, Any]:
    tensors = {"rng/cpu": torch.get_rng_state()}
    if trainer.mesh.world.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    tensors |= {f"buffer/{name}": buffer for name, buffer in persistent_buffers(trainer.named_model).items()}
    in_flight: dict[str, Any] = {}
    if trainer.pipelined is not None:
        kept, in_flight = trainer.pipelined.state()
        tensors |= {f"pipeline/{name}": tensor for name, tensor in kept.items()}
    shared = None if trainer.counts.shared is None else float(trainer.counts.shared)
    values = {
        "sync": trainer.sync.state(),
        "shared_count": shared,
        "update": trainer.update.state(),
        "pipeline": in_flight,
    }
    path = partial / _rank_file(trainer.mesh.world.rank)
    return {"kind": "rank", "file": asdict(write_tensors(path, tensors, {"values": json.dumps(values)})), "names": []}


def _read_rank_part(trainer: Trainer, path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        values = json.loads(file.metadata()["values"])
        torch.set_rng_state(file.get_tensor("rng/cpu"))
        if trainer.mesh.world.device.type == "cuda" and "rng/cuda" in file.keys():  # not if it was written on a CPU
            torch.cuda.set_rng_state(file.get_tensor("rng/cuda"))
        for name, buffer in persistent_buffers(trainer.named_model).items():
            buffer.copy_(file.get_tensor(f"buffer/{name}"))
        kept = {n.removeprefix("pipeline/"): file.get_tensor(n) for n in file.keys() if n.startswith("pipeline/")}
    if trainer.pipelined is not None:
        trainer.pipelined.load_state(kept, values["pipeline"])
    trainer.counts.shared = values["shared_count"]
    trainer.sync.load_state(values["sync"])
    if "update" in values:  # a checkpoint from before there was anything to keep
        trainer.update.load_state(values["update"])


def _write_index(
    trainer: Trainer,
    portable: Portable,
    partial: Path,
    files: list[dict[str, Any]],
    maps: dict[str, dict[str, str]],
    model_bytes: int,
) -> None:
    hugging_face = partial / "model.safetensors.index.json"
    hugging_face.write_text(json.dumps({"metadata": {"total_size": model_bytes}, "weight_map": maps[_MODEL]}, indent=1))
    index: dict[str, Any] = {
        "format": FORMAT,
        "step": trainer.steps_done,
        "data_position": trainer.data_position,
        "seed": zlib.crc32(bytes(torch.get_rng_state().tolist())),
        "dropout_seed": trainer.seeds.base,
        "plan": format_plan(trainer.plan),
        "optimizer": type(trainer.optimizer).__name__,
        "shapes": portable.shapes,
        "tensors": maps,
        "files": [*files, asdict(seal(hugging_face))],
    }
    index["crc32"] = _index_checksum(index)
    path = partial / INDEX
    path.write_text(json.dumps(index, indent=1))
    seal(path)


def _index_checksum(index: dict[str, Any]) -> int:
    content = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _refuse_other_model(trainer: Trainer, portable: Portable, index: dict[str, Any], directory: Path) -> None:
    """Every difference between the checkpoint's model and optimizer and these, in one error."""
    mine, theirs = portable.shapes, index["shapes"]
    problems = [f'"{name}" is missing from the checkpoint' for name in mine if name not in theirs]
    problems += [f'"{name}" of the checkpoint is not in this model' for name in theirs if name not in mine]
    problems += [
        f'"{name}" has shape {mine[name]} here, {theirs[name]} in the checkpoint'
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    ]
    if problems:
        shown, rest = problems[:8], len(problems) - 8
        more = [f"and {rest} more difference{'s' * (rest > 1)}"] if rest > 0 else []
        head = f"{directory} is a checkpoint of another model; use the model it was written with"
        problems = [head, *shown, *more]
    optimizer = type(trainer.optimizer).__name__
    if index["optimizer"] != optimizer:
        problems.append(
            f"{directory} was written with optimizer {index['optimizer']}, this run's is {optimizer}; use it"
        )
    if problems:
        raise CheckpointError(problems)
