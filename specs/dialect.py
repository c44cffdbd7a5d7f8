"""What the dialects of drafts' config.json differ in: where a field stands, what it is called, how rope is said."""

from collections.abc import Mapping
from typing import Any

from specs.config import Fields
from specs.dims import Yarn

# Fields that change nothing in a draft's tensors or forward pass: the embedding's and the trainer's, not the layer's.
IGNORED = frozenset(
    [
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_position_embeddings",
        "max_window_layers",
        "num_nextn_predict_layers",
        "rope_interleave",
        "use_sliding_window",
        "parallel_drafting",
        "use_swa",
    ]
)


class Both:
    """A field that stands at the top level in one dialect and in a nested object in another."""

    def __init__(self, where: str, raw: Mapping[str, Any], nested: str, problems: list[str]) -> None:
        self.top = Fields(where, raw, problems)
        self.inner = self.top.object(nested) if nested in raw else Fields(f"{where}.{nested}", {}, problems)
        self.problems = problems

    def get(self, *names: str, default: Any = None) -> Any:
        """The value under any of the names at either level; a problem if two are there and differ."""
        found = [v for f in (self.inner, self.top) for n in names if (v := f.get(n)) is not None]
        if any(v != found[0] for v in found):
            self.problems.append(f"{self.top.where}: {' and '.join(names)} stand there more than once: {found}")
        return found[0] if found else default

    def flag(self, *names: str) -> bool:
        value = self.get(*names, default=False)
        if not isinstance(value, bool):
            self.problems.append(f"{self.top.where}.{names[0]}: found {value!r}, expected true or false")
        return value is True

    def unknown(self) -> list[str]:
        self.top.seen |= IGNORED
        self.inner.seen |= IGNORED
        return self.top.unknown() + self.inner.unknown()


def count(both: Both, name: str) -> int | None:
    value = both.get(name)
    if value is not None and (type(value) is not int or value < 1):
        both.problems.append(f"{both.top.where}.{name}: found {value!r}, expected a whole number from 1 up")
        return None
    return value


def layer_ids(both: Both, *names: str) -> tuple[int, ...] | None:
    value = both.get(*names)
    if value is None:
        return None
    if not isinstance(value, list) or not value or any(type(v) is not int for v in value):
        both.problems.append(f"{both.top.where}.{names[0]}: found {value!r}, expected a list of layer numbers")
        return (1,)
    return tuple(value)


def rope(f: Fields) -> tuple[Yarn, list[str]]:
    """The draft's own rotary block. Without one the frequencies are unscaled, which is YaRN of factor 1."""
    old, new = f.get("rope_scaling"), f.get("rope_parameters")
    name = "rope_scaling" if old else "rope_parameters"
    if old and new and any(new.get(k, v) != v for k, v in old.items() if k != "type"):
        f.problems.append(f"{f.where}: rope_scaling and rope_parameters disagree: {old} and {new}")
    block = f.object(name) if old or new else Fields(f"{f.where}.{name}", {}, f.problems)
    theta = block.get("rope_theta", f.get("rope_theta"))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        f.problems.append(f"{f.where}.rope_theta: found {theta!r}, expected a positive number")
        theta = 1.0
    kind = block.get("rope_type", block.get("type", "default"))
    block.seen.add("type")
    plain = kind == "default"
    if not plain and kind not in ("yarn", "deepseek_yarn"):
        f.problems.append(f"{block.where}.type: found {kind!r}, only 'yarn', 'deepseek_yarn' and none are supported")
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    silent = [n for n in usual if n not in block.values]
    said = f"{block.where}: has no {', '.join(silent)}; taken as {', '.join(f'{usual[n]:g}' for n in silent)}"
    said = f"{f.where}: names no rope scaling; positions are not scaled" if plain else said
    original = block.number("original_max_position_embeddings", int, default=1 if plain else None, low=1)
    yarn = Yarn(
        theta=float(theta),
        factor=block.number("factor", float, default=1.0 if plain else None),
        original=original,
        beta_fast=block.number("beta_fast", float, default=usual["beta_fast"]),
        beta_slow=block.number("beta_slow", float, default=usual["beta_slow"]),
        mscale=block.number("mscale", float, default=usual["mscale"]),
        mscale_all_dim=block.number("mscale_all_dim", float, default=usual["mscale_all_dim"]),
    )
    return yarn, [said] if plain or silent else []
