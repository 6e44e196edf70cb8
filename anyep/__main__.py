"""`python -m anyep` is the command `anyep`."""

from anyep.cli.main import main

main()
