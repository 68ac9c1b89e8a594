"""`python -m weft`, also for `torchrun ... -m weft train`: the command line without the installed script."""

from weft.cli.main import main

main()
