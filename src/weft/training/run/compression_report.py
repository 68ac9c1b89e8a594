"""How much a run has compressed what its replicas exchange, for the report at its end: whole run, warm-up included.

On real ranks what was sent is counted: rank 0's bytes of every step, which `metrics.jsonl` has, also of the steps
before a resume. Where ranks are played in one process nothing is sent, and the bytes of real ranks are worked out.
"""

from __future__ import annotations

from pathlib import Path

from weft.comm.objects import gather_values
from weft.plan.exchange.compression import Compression, between_replicas, dense_bytes
from weft.plan.partition.one_worker import is_served
from weft.training.exchanged_bytes import predicted_compression
from weft.training.run.metrics import read_lines
from weft.training.trainer import Trainer


def compression_of_run(trainer: Trainer, metrics: Path) -> Compression | None:
    """That of the steps so far, the same on every rank; None without a codec, or if nothing was sent. Collective."""
    plan, everyone = trainer.plan, trainer.mesh.everyone("control")
    if plan.codec.name == "none":
        return None
    if everyone.size < plan.axes.num_ranks and not is_served(plan):
        found = predicted_compression(trainer.parts, num_steps=trainer.steps_done)
        return found if found.sent_bytes else None
    counted = [0, 0]
    if everyone.index == 0:
        steps = [line["sent_bytes"] for line in read_lines(metrics) if "sent_bytes" in line]
        counted = [len(steps), sum(between_replicas(sent, plan) for sent in steps)]
    num_steps, sent = gather_values(counted, everyone)[0]
    numel = gather_values(sum(piece.tensor.numel() for piece in trainer.sync.pieces), everyone)[0]
    if not sent:
        return None
    dense = dense_bytes(numel, plan, num_steps=num_steps, hosts=trainer.mesh.world.hosts)
    return Compression(dense_bytes=dense, sent_bytes=sent, is_served=is_served(plan))
