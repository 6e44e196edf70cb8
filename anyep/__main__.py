"""`python -m anyep` is the command `anyep`."""

from anyep.cli.main import main

if __name__ == "__main__":
    main()
