"""`weft lab`: run a command's ranks on the hosts of an emulated network, or measure that network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.terminal import Traceback, print_table
from weft.errors import LaunchError

if TYPE_CHECKING:
    from weft.lab.check import Finding
    from weft.lab.counters import SwitchCount

CONTEXT = {"allow_interspersed_args": False}
"""Flags after the command's first word are the command's own."""
_LATE_SHARE, _FEW_PACKETS = 0.01, 10


def command(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The command that every rank runs.")
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Emulated hosts; default 2.")] = None,
    ranks_per_host: Annotated[int | None, typer.Option(help="Ranks on each host; default 1.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help='Rate of each host\'s line, each way: "100Mbit", "unlimited".')
    ] = None,
    delay: Annotated[str | None, typer.Option(help='One-way delay between two hosts: "25ms".')] = None,
    jitter: Annotated[str | None, typer.Option(help='Variation of the delay: "2ms".')] = None,
    loss: Annotated[str | None, typer.Option(help='Share of packets lost: "0.1%".')] = None,
    preset: Annotated[str | None, typer.Option(help="A network by name; default 1GbE.")] = None,
    topology: Annotated[Path | None, typer.Option(metavar="FILE", help="A network from a file.")] = None,
    per_host: Annotated[bool, typer.Option("--per-host", help="Run the command once per host: for torchrun.")] = False,
    counters: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the packets and bytes that crossed the switch, as JSON.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure the network instead, and compare with what was asked for.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Run a command on emulated hosts: every rank with torchrun's variables, every packet through a switch.

    Example:  weft lab --hosts 4 --bandwidth 100Mbit --delay 25ms -- weft verify
    """
    del traceback  # read by main()
    from weft.lab.namespaces import missing_here
    from weft.lab.run import run_lab
    from weft.lab.topology import make_network
    from weft.plan.text import write_text

    problems = (
        [] if bool(command) != check else ["give a command after --, or --check to measure the network, not both"]
    )
    given = {"hosts": hosts, "ranks": ranks_per_host, "bandwidth": bandwidth, "delay": delay, "jitter": jitter}
    flags = {name: value for name, value in {**given, "loss": loss}.items() if value is not None}
    try:
        network = make_network(preset=preset, topology=topology, flags=flags)
    except LaunchError as error:
        problems += error.problems
    if counters is not None and not counters.parent.is_dir():
        problems.append(f"{counters}: there is no folder {counters.parent} to write it in")
    if problems := problems + missing_here():
        raise LaunchError(problems)
    outcome = run_lab(network, command or (), per_host=per_host)
    if counters is not None:
        write_text(counters, outcome.counters, kind=LaunchError)
    if check:
        _print(outcome.findings)
        raise typer.Exit(int(not all(finding.ok for finding in outcome.findings)))
    if outcome.switch is not None:
        _warn_if_late(outcome.switch)
    if outcome.failure:
        print(f"weft: {outcome.failure}; that ended the lab", file=sys.stderr)
    raise typer.Exit(outcome.code)


def _warn_if_late(switch: SwitchCount) -> None:
    if switch.late_packets > max(_FEW_PACKETS, _LATE_SHARE * switch.packets):
        print(
            f"weft: the switch delivered {switch.late_packets / switch.packets:.1%} of {switch.packets} packets more "
            f"than 1 ms late, the worst by {switch.late_ns / 1e6:.0f} ms: this machine was too busy, and the network "
            f"slower than asked; use fewer ranks or a slower network",
            file=sys.stderr,
        )


def _print(findings: tuple[Finding, ...]) -> None:
    from rich.console import Console

    from weft.lab.quantities import format_rate
    from weft.units import format_seconds

    show: dict[str, Callable[[float], str]] = {
        "rate": format_rate,
        "delay": format_seconds,
        "compute": "{:.3g} cores".format,
    }
    rows = []
    for each in findings:
        verdict = "-" if not each.asked else f"{each.error:+.1%}" + ("" if each.ok else "  too much")
        rows.append((each.what, each.where, show[each.what](each.asked), show[each.what](each.measured), verdict))
    print_table(Console(), ("", "where", "asked", "measured", "off by"), rows)
