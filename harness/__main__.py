"""`python -m harness` is the command `rosetta`."""

from harness.cli import main

main()
