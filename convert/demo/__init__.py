"""A small random checkpoint in the real format, for tests and for trying the tools out."""
