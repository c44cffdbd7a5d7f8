"""Versions of other people's packages that this version was tested with: first and last known good, both included."""

KNOWN_GOOD: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.9"),
    "numpy": ("1.26", "2.3"),
    "safetensors": ("0.5", "0.8"),
    "huggingface-hub": ("1.0", "2.4"),
    "tiktoken": ("0.9", "0.14"),
    "jinja2": ("3.1", "3.1"),
    "pillow": ("11.2", "13.0"),
}
# Packages that exist for one system only.
LINUX_ONLY = ("triton",)
