"""The one root of everything that can be wrong with what a user gave us."""

from collections.abc import Iterable

SHOWN = 40


class InputError(ValueError):
    """Wrong input. Carries every problem of its kind, one line each: where, found, expected, what to do."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The problems as text, cut to a screenful with a count of the rest."""
        rest = len(self.problems) - SHOWN
        return [*self.problems[:SHOWN], *([f"... and {rest} more like these"] if rest > 0 else [])]

    def __reduce__(self) -> tuple[type["InputError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class SpecError(InputError):
    """A spec YAML is not a valid table of tensors."""


class ConfigError(InputError):
    """config.json describes something this family does not cover."""


class CutError(InputError):
    """A mesh does not divide the model."""


class HeaderError(InputError):
    """Tensors are missing, unexpected, or of another dtype or shape than the spec says."""


class SourceError(InputError):
    """A source file cannot be read as what it claims to be."""


class PlanError(InputError):
    """The plan cannot be carried out here: memory, disk, an occupied output folder."""


class OutputError(InputError):
    """Writing failed: disk full, no permission, a device error."""


class ArtifactError(InputError):
    """An artifact is damaged, unsealed, of another format version, or not the one expected."""
