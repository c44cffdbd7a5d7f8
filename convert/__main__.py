"""`python -m convert` is `kiln`."""

from convert.cli import main

main()
