"""`weft`: the command line. Errors of the user come as one message and exit code 2, with a traceback only if asked."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import metadata

import typer

from weft.cli import lab, profile, train, verify
from weft.cli.reporting import reports_first
from weft.cli.terminal import is_first_rank
from weft.errors import WeftError

app = typer.Typer(
    name="weft",
    help="One plan, any parallelism: train one PyTorch model on many devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Given in words, because typer cuts the first sentence of a docstring where a line of the list ends.
app.command("profile", short_help="Measure devices, links and collectives.")(profile.command)
app.command("lab", context_settings=lab.CONTEXT, short_help="Run on an emulated network.")(lab.command)
app.command("train", short_help="Train a model as a job file says.")(train.command)
app.command("verify", short_help="Compare a plan with one process.")(verify.command)


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """One plan, any parallelism: train one PyTorch model on many devices.

    Example:  weft train
    """
    if version:
        typer.echo(f"weft {metadata.version('weft')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the entry point of the `weft` script."""
    try:
        app()
    except WeftError as error:
        if reports_first(error):
            whose = "weft" if is_first_rank() else f"weft, rank {os.environ['RANK']}"
            if "--traceback" in sys.argv:
                traceback.print_exception(error)
            else:
                print(f"{whose}: {error}" if len(error.problems) == 1 else f"{whose}:\n{error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
