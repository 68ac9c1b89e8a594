"""`python -m weft`, and so `torchrun ... -m weft train`: the command line without its script."""

from weft.cli.main import main

main()
