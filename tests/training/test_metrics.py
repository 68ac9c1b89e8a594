"""metrics.jsonl: one whole line per step, with the promised fields; a resume drops the lines after its checkpoint."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from oracle import data_plan

from weft.mesh import Mesh, make_mesh
from weft.training.run.metrics import MetricsFile, Recorder, StepRecord, peak_memory_bytes, units_of
from weft.world import join_world


def record(step: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        lr=0.1,
        unit="tokens",
        units_per_s=1e3,
        step_s=0.1,
        exchange_s=0.02,
        bubble_s=0.0,
        compute_s=0.08,
        sent_bytes={"data": 8},
        memory_bytes=1,
        grad_norm=None,
        num_skipped=0,
        loss_scale=None,
        spike=None,
    )


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh(data_plan(1), join_world("cpu"))


def add(recorder: Recorder, step: int, *, num_units: int = 100) -> StepRecord | None:
    known = {"step": step, "lr": 0.5, "unit": "tokens", "num_skipped": 0, "loss_scale": None}
    return recorder.add(loss=torch.tensor(float(step)), grad_norm=None, num_units=num_units, **known)


def test_the_fields_are_those_promised() -> None:
    """Loss, speed, seconds of compute and exchange, bytes by axis, memory: later readers rely on the names."""
    names = "step loss lr unit units_per_s step_s exchange_s bubble_s compute_s sent_bytes memory_bytes"
    names += " grad_norm num_skipped loss_scale spike exchanged spread delay staleness num_dropped"
    names += " replica_losses shares straggler"
    assert [field.name for field in fields(StepRecord)] == names.split()


def test_numbers_of_a_device_are_those_of_their_step(mesh: Mesh) -> None:
    """Some plans count skipped steps, and scale the loss, on the device."""
    recorder, skipped = Recorder(mesh), torch.tensor(1.0)
    known = {"step": 3, "lr": 0.5, "unit": "tokens", "loss_scale": torch.tensor(1024.0)}
    recorder.add(loss=torch.tensor(2.5), grad_norm=torch.tensor(0.25), num_units=1, num_skipped=skipped, **known)
    skipped += 1
    record = recorder.flush()
    assert record is not None and (record.loss, record.grad_norm, record.loss_scale) == (2.5, 0.25, 1024.0)
    assert record.num_skipped == 1 and type(record.num_skipped) is int


def test_a_record_comes_one_step_late_and_in_order(mesh: Mesh) -> None:
    recorder = Recorder(mesh)
    assert recorder.flush() is None
    assert add(recorder, 1) is None
    second = add(recorder, 2)
    assert second is not None and (second.step, second.loss, second.lr) == (1, 1.0, 0.5)
    last = recorder.flush()
    assert last is not None and last.step == 2
    assert recorder.flush() is None


def test_seconds_and_bytes_are_those_of_the_step(mesh: Mesh) -> None:
    traffic = mesh.group("data", "gradients").traffic
    traffic.add(sent_bytes=999, wait_s=9.0)  # before the clock starts
    recorder = Recorder(mesh)
    time.sleep(0.02)
    traffic.add(sent_bytes=10, wait_s=0.015)
    add(recorder, 1, num_units=50)
    first = recorder.flush()
    assert first is not None
    assert first.sent_bytes == {"data": 10}
    assert first.exchange_s == pytest.approx(0.015)
    assert first.step_s >= 0.02 and first.compute_s == pytest.approx(first.step_s - 0.015)
    assert first.units_per_s == pytest.approx(50 / first.step_s)
    time.sleep(0.05)
    traffic.add(sent_bytes=5, wait_s=0.01)
    recorder.restart_clock()  # a checkpoint was written meanwhile, which is no part of the next step
    add(recorder, 2)
    second = recorder.flush()
    assert second is not None and second.step_s < 0.05 and second.sent_bytes == {"data": 0}


def test_memory_is_this_processs(mesh: Mesh) -> None:
    assert 10 * 2**20 < peak_memory_bytes(torch.device("cpu")) < 2**40


def test_a_file_has_one_whole_line_per_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, steps_done=0)
    file.write(asdict(record(1)))
    assert json.loads(path.read_text()) == asdict(record(1))  # there at once: a kill loses no finished step
    file.write(asdict(record(2)))
    file.write({"step": 2, "held_out_loss": 0.5})
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [asdict(record(1)), asdict(record(2)), {"step": 2, "held_out_loss": 0.5}]


def test_a_resume_drops_lines_past_its_checkpoint_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, steps_done=0)
    for step in range(1, 6):
        file.write(asdict(record(step)))
        file.write({"step": step, "held_out_loss": 1.0})
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 3, "loss": 1.')
    again = MetricsFile(path, steps_done=3)
    again.write(asdict(record(4, loss=7.0)))
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3, 3, 4]
    assert lines[-1]["loss"] == 7.0
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_starts_anew_drops_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, steps_done=0)
    file.write(asdict(record(1)))
    file.close()
    MetricsFile(path, steps_done=0).close()
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (torch.zeros(4, 8, dtype=torch.int64), ("tokens", 8)),
        (torch.zeros(0, 8, dtype=torch.int64), ("tokens", 0)),
        (torch.zeros(4, dtype=torch.int64), ("samples", 1)),
        (torch.zeros(4, 8), ("samples", 1)),
        ({"a": torch.zeros(4, 2, 3, dtype=torch.int32)}, ("tokens", 6)),
    ],
)
def test_what_is_counted(targets: object, expected: tuple[str, int]) -> None:
    assert units_of(targets) == expected


def test_what_is_not_finite_is_null_and_strict_json(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", steps_done=0)
    metrics.write(asdict(record(1, loss=float("nan"))))
    metrics.write({"step": 1, "held_out_loss": float("inf")})
    metrics.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    first, second = (json.loads(line, parse_constant=refuse) for line in text.splitlines())
    assert first["loss"] is None and first["lr"] == 0.1
    assert second == {"step": 1, "held_out_loss": None}
