"""When replicas that differ exchange weights, and which exchanges are merged steps after they were sent.

local       every `every` steps the whole model, merged at once
streaming   local, but a fragment of the model at a time, or merged `delay` steps later, or mixed with own weights
delayed     every `every` steps the whole model, merged `delay` steps later in the place of the own change
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.plan.plan import Data, Plan, said

FIRST_DELAY = 2
"""The delay with which `[data] delay = "auto"` begins, before anything was measured."""


def uses_delayed_averaging(plan: Plan) -> bool:
    """True for delayed averaging with a delay; without one it is local steps."""
    return plan.data.sync == "delayed" and plan.replica_axis is not None and plan.data.delay != 0


def uses_streaming(plan: Plan) -> bool:
    """True for local steps whose exchanges are in fragments, merged steps after they were sent, or mixed."""
    if plan.data.sync != "local" or plan.replica_axis is None:
        return False
    return (plan.data.fragments, plan.data.delay, plan.data.mix) != (1, 0, 0)


def merges_late(plan: Plan) -> bool:
    """True if replicas exchange by the one mechanism of both: changes are sent, and merged later or mixed."""
    return uses_delayed_averaging(plan) or uses_streaming(plan)


def exchanges_after(data: Data, step: int) -> bool:
    """True if replicas exchange weights after this step, counted from 1: all of them, or those of a fragment."""
    return step <= data.switch_step or fragment_after(data, step) is not None


def fragment_after(data: Data, step: int) -> int | None:
    """The fragment that is sent after this step, counted from 1, once local steps have begun; None if there is none."""
    return next((number for number in range(data.fragments) if fragment_sent_after(data, number, step)), None)


def fragment_sent_after(data: Data, fragment: int, step: int) -> bool:
    """True if a fragment is sent after this step, counted from 1: fragments take turns, evenly spread over `every`
    steps."""
    since = step - data.switch_step
    return since > 0 and (since - fragment * data.every // data.fragments) % data.every == 0


def max_in_flight(data: Data) -> int:
    """Exchanges, or fragments of one, that are under way at once at most."""
    delay = data.delay if isinstance(data.delay, int) else FIRST_DELAY
    if data.sync == "delayed":
        return -(-delay // data.every)
    sent = [step for step in range(1, 3 * data.every + 1) if fragment_after(data, data.switch_step + step) is not None]
    return max((sum(now - max(delay, 1) < step <= now for step in sent) for now in sent), default=0)


def steps_to_verify(plan: Plan) -> int:
    """The steps of a run in which an exchange is merged that was sent after a merge: what a merge leaves wrong, in an
    anchor, a momentum or a codec, shows then and not before. 1 where nothing is merged later."""
    data = plan.data
    if not merges_late(plan):
        return 1
    delay = data.delay if isinstance(data.delay, int) else FIRST_DELAY  # two phases, as measured ones have
    if uses_streaming(plan):
        return data.switch_step + 2 * data.every + delay
    return -(-(data.every + delay) // data.every) * data.every + delay


def late_merge_problems(plan: Plan, *, total_steps: int) -> Iterator[str]:
    """Why no exchange of a run of so many steps would be merged before its end."""
    if not merges_late(plan) or not isinstance(plan.data.delay, int):
        return
    sent = next(step for step in range(1, plan.data.switch_step + plan.data.every + 1) if _sends(plan.data, step))
    first = sent + plan.data.delay
    if plan.data.delay and first > total_steps:
        sooner = total_steps - sent
        remedy = f"set [data] delay to {sooner} or less" if sooner > 0 else "set [data] every lower"
        yield (
            f"{said(plan, 'data.delay')} merges after step {first} what is first sent after step {sent}, and the run "
            f"has {total_steps} steps; {remedy}, or train for {first} steps or more"
        )


def _sends(data: Data, step: int) -> bool:
    return step > data.switch_step and fragment_after(data, step) is not None
