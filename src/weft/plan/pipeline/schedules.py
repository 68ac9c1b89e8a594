"""Pipeline schedules: each is a pure function to one list of compute actions per rank.

    one_f_one_b                          1F1B, the default
    gpipe, naive                         its simpler relatives
    interleaved, zero_bubble             1F1B with a smaller bubble
    pipedream, two_bw                    1F1B without a flush between steps
    forward_only                         evaluation

They do not know messages, replicas or ZeRO, which `communication.py` adds in the same way to every schedule, nor how
long an action takes: a rank starts the next action of its list as soon as its input is there.

In the drawings time runs to the right, one column per action, a dot is idle. F, B, I, W: forward, backward, and its two
halves input-grad and weight-grad; the number is the microbatch. `planning/simulate.py` gives these drawings if every
action takes one second. p is the number of stages (or ranks), i a stage, m the number of microbatches.

The flush schedules leave out the update, which follows everything else. The flush-free ones number microbatches from
the start of training: a call feeds some from `first` on, `start` is the first that was fed since the pipeline was last
empty, and `drain` empties it at the end. The concatenated lists of consecutive calls are the list of one call for all
their microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from weft.plan.pipeline.actions import Action, Kind, Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush): GPipe's bubble, but a stage holds the activations of only min(p−i, m) microbatches.

    Warm-up of p−1−i forwards, then forward and backward in turn, then the remaining backwards.

    stage 0 | F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
    stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .
    stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .
    """
    return tuple(_one_stage(i, num_microbatches, num_warmup=num_stages - 1 - i) for i in range(num_stages))


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward, then all backward: the bubble is (p−1)(t_F+t_B), and a stage holds all m microbatches.

    stage 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    stage 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    stage 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    """
    return tuple(_one_stage(i, num_microbatches, num_warmup=num_microbatches) for i in range(num_stages))


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """Model parallelism without a pipeline: each microbatch goes forward and back before the next one starts.

    stage 0 | F0 .  .  .  .  B0 F1 .  .  .  .  B1
    stage 1 | .  F0 .  .  B0 .  .  F1 .  .  B1 .
    stage 2 | .  .  F0 B0 .  .  .  .  F1 B1 .  .
    """
    return tuple(_one_stage(i, num_microbatches, num_warmup=0) for i in range(num_stages))


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Megatron's 1F1B with v chunks of the model on each rank: the bubble is v times smaller, the traffic v times more.

    Microbatches go in rounds of p: a round passes the first chunk, then the second, ...; backward in reverse order.
    Those that do not fill a round make others longer: in a shorter one a rank would wait for its own next chunk, which
    may never come. Rank i warms up with (v−1)r + 2(p−1−i) forwards; r is the length of the first round, the longest.
    Lower-case letters are the second chunk, stages 2 and 3 of four.

    rank 0 | F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
    rank 1 | .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    begins = [-(-number * num_microbatches // num_rounds) for number in range(num_rounds + 1)]
    upward = _in_rounds(begins, num_chunks)
    ranks = []
    for rank in range(num_ranks):
        num_warmup = (num_chunks - 1) * begins[1] + 2 * (num_ranks - 1 - rank)
        forwards = [_action("forward", chunk * num_ranks + rank, k) for chunk, k in upward]
        backwards = [_action("backward", (num_chunks - 1 - chunk) * num_ranks + rank, k) for chunk, k in upward]
        ranks.append(tuple(_in_turn(forwards, backwards, num_warmup)))
    return tuple(ranks)


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose backward is split, so that weight gradients, which no stage waits for, fill the bubble.

    Forward and input-grad go as in 1F1B. Stage i begins weight-grads after its input-grad number i, so that no stage
    holds more than the p microbatches that the first stage of 1F1B holds, in flight or deferred. (Holding only p−i on
    stage i, as 1F1B does, would leave the last stage none to defer, and cost a bubble of (p−1)(T_F+T_I).) The
    bubble is (p−1)(T_F+T_I−T_W) instead of (p−1)(T_F+T_I+T_W), exactly so for m ≥ p and T_W ≤ T_F, T_I.

    stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    """
    ranks = []
    for i in range(num_stages):
        actions: list[Action] = []
        for action in _one_stage(i, num_microbatches, num_warmup=num_stages - 1 - i, backward="input-grad"):
            actions.append(action)
            if action.kind == "input-grad" and action.microbatch >= i:
                actions.append(_action("weight-grad", i, action.microbatch - i))
        deferred = range(max(num_microbatches - i, 0), num_microbatches)
        actions += [_action("weight-grad", i, k) for k in deferred]
        ranks.append(tuple(actions))
    return tuple(ranks)


def pipedream(
    num_stages: int,
    num_microbatches: int,
    *,
    first: int = 0,
    start: int = 0,
    drain: bool = True,
    vertical_sync: bool = False,
) -> Schedule:
    """No flush: endless 1F1B, with an update after each backward. After the slash: the weight version that is used.

    Stage i runs microbatch k forward with its newest version, k−(p−1−i), and stashes that for the backward: p−i
    versions. With vertical sync every stage uses the first stage's version, k−(p−1), and keeps up to p.

    stage 0 | F0/0 F1/0 F2/0 .    .    B0/0 F3/1 B1/0 F4/2 B2/0 .    B3/1 .    B4/2
    stage 1 | .    F0/0 F1/0 .    B0/0 F2/1 B1/0 F3/2 B2/1 F4/3 B3/2 .    B4/3 .
    stage 2 | .    .    F0/0 B0/0 F1/1 B1/1 F2/2 B2/2 F3/3 B3/3 F4/4 B4/4 .    .
    """
    ranks = []
    for i in range(num_stages):
        delay = num_stages - 1 if vertical_sync else num_stages - 1 - i
        actions: list[Action] = []
        for kind, k in _stream(num_stages - 1 - i, num_microbatches, first=first, start=start, drain=drain):
            actions.append(_action(kind, i, k, version=max(start, k - delay)))
            if kind == "backward":
                actions.append(_action("update", i, k, version=k + 1))
        ranks.append(tuple(actions))
    return tuple(ranks)


def two_bw(
    num_stages: int,
    num_microbatches: int,
    *,
    num_batches: int = 1,
    first: int = 0,
    start: int = 0,
    drain: bool = True,
    together: bool = False,
) -> Schedule:
    """PipeDream-2BW: no flush, an update after each m ≥ p microbatches, and two weight versions on every stage.

    All m microbatches of batch t use version t−1 on every stage (the first batch 0), forward and backward, even if the
    pipeline was drained and version t exists: results must not depend on when the pipeline is drained.

    No stage needs version t+1 before batch t+2. Where stages must update `together` (for a norm over all of them, or a
    weight that two share) they all do when the first stage can, so that no stage waits for another's next step.

    stage 0 | F0/0 F1/0 .    B0/0 F2/0 B1/0 F3/0 B2/0 F4/1 B3/0 F5/1 B4/1 .    B5/1
    stage 1 | .    F0/0 B0/0 F1/0 B1/0 F2/0 B2/0 F3/0 B3/0 F4/1 B4/1 F5/1 B5/1 .
    """
    m = num_microbatches
    assert m >= num_stages, f"two weight versions are too few for {m} microbatches per batch in {num_stages} stages"
    assert first % m == start % m == 0, f"microbatches {first} and {start} do not begin a batch of {m}"
    ranks = []
    for i in range(num_stages):
        actions: list[Action] = []
        lag = num_stages - 1 if together else num_stages - 1 - i
        done = first - lag
        for kind, k in _stream(num_stages - 1 - i, m * num_batches, first=first, start=start, drain=drain):
            if kind == "forward" and actions:
                done = _update_when_done(actions, i, done, m, start)
            actions.append(_action(kind, i, k, version=max(0, k // m - 1)))
        end = first + m * num_batches
        while done < (end if drain else end - lag):
            done = _update_when_done(actions, i, done, m, start)
        ranks.append(tuple(actions))
    return tuple(ranks)


def _update_when_done(actions: list[Action], stage: int, done: int, num_microbatches: int, start: int) -> int:
    """Append an update if microbatch `done`, complete on every stage, ends a batch. Returns the next microbatch."""
    batch, place = divmod(done, num_microbatches)
    if done >= start and place == num_microbatches - 1:
        actions.append(Action(kind="update", stage=stage, version=batch + 1))
    return done + 1


def version_slots(schedule: str, num_stages: int, stage: int, *, vertical_sync: bool = False) -> tuple[int, int]:
    """The number of weight versions a stage keeps, and how many versions behind the newest a new pass may use."""
    if schedule == "2bw":
        return 2, 1
    if schedule == "pipedream":
        return (num_stages, stage) if vertical_sync else (num_stages - stage, 0)
    return 1, 0


def forward_only(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Evaluation: microbatches go in rounds of p, as in `interleaved`; the last round may be short.

    rank 0 | F0 F1 f0 f1 F2 .  f2 .
    rank 1 | .  F0 F1 f0 f1 F2 .  f2
    """
    begins = [*range(0, num_microbatches, num_ranks), num_microbatches]
    return tuple(
        tuple(_action("forward", chunk * num_ranks + rank, k) for chunk, k in _in_rounds(begins, num_chunks))
        for rank in range(num_ranks)
    )


def live_activations(schedule: Schedule) -> tuple[int, ...]:
    """The most microbatches whose activations each rank holds at once; a microbatch counts once per stage.

    Activations are held from the forward until the backward, or until the weight-grad if the backward is split.
    """
    most = []
    for actions in schedule:
        peak = live = 0
        for action in actions:
            live += (action.kind == "forward") - (action.kind in ("backward", "weight-grad"))
            peak = max(peak, live)
        most.append(peak)
    return tuple(most)


def _action(kind: Kind, stage: int, microbatch: int, *, version: int = 0) -> Action:
    return Action(kind=kind, stage=stage, microbatch=microbatch, version=version)


def _one_stage(
    stage: int, num_microbatches: int, *, num_warmup: int, backward: Kind = "backward"
) -> tuple[Action, ...]:
    forwards = [_action("forward", stage, k) for k in range(num_microbatches)]
    backwards = [_action(backward, stage, k) for k in range(num_microbatches)]
    return tuple(_in_turn(forwards, backwards, num_warmup))


def _in_turn(forwards: list[Action], backwards: list[Action], num_warmup: int) -> Iterable[Action]:
    """Warm-up forwards, then forward and backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    yield from forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        yield from pair
    yield from backwards[len(forwards) - num_warmup :]


def _in_rounds(begins: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order of the interleaved schedule: each round chunk by chunk. `begins` ends with m."""
    return [
        (chunk, k)
        for begin, end in itertools.pairwise(begins)
        for chunk in range(num_chunks)
        for k in range(begin, end)
    ]


def _stream(lag: int, num_microbatches: int, *, first: int, start: int, drain: bool) -> Iterable[tuple[Kind, int]]:
    """The forward of each microbatch, followed by the backward of the one fed `lag` microbatches before."""
    assert start <= first, f"the pipeline was empty before microbatch {start}, and is fed {first} before that"
    for k in range(first, first + num_microbatches):
        yield "forward", k
        if k - lag >= start:
            yield "backward", k - lag
    if drain:
        end = first + num_microbatches
        yield from (("backward", k) for k in range(max(start, end - lag), end))
