"""`python -m runtime_min` is `kiln-run`."""

from runtime_min.cli import main

main()
