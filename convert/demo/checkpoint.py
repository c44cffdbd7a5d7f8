"""Writes a demo checkpoint: weights and index in the release's layout, and every file that lies beside them."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from convert.demo.filler import Filler
from convert.demo.geometry import DIALECTS, DemoError, Dialect, Geometry, config, template
from convert.demo.inventory import TensorSpec, shards
from convert.demo.stream import write_file, write_text
from convert.demo.tokenizer import rank_file, tokenizer_config
from specs.errors import PlanError

MARGIN_BYTES = 256 << 20
Payloads = Callable[[Sequence[TensorSpec]], Iterable[Iterator[memoryview]]]


def write_demo(out: Path, geometry: Geometry, seed: int = 0, *, dialect: Dialect = "k2.6") -> None:
    """Writes the checkpoint of `geometry` into `out`, which must be empty or absent. Same arguments, same bytes.

    Raises PlanError for an occupied folder or a full disk, DemoError for an unknown dialect. The index is written last:
    a folder without one is unfinished.
    """
    if dialect not in DIALECTS:
        raise DemoError(f"demo dialect: found {dialect!r}, expected one of {', '.join(DIALECTS)}; choose one of them")
    stated = config(geometry, dialect)
    beside = siblings(geometry, dialect, stated, rank_file(geometry.ranks))
    write_checkpoint(out, shards(geometry, dialect), beside, lambda: _source(geometry, seed, stated))


def write_checkpoint(
    out: Path, parts: Sequence[Sequence[TensorSpec]], beside: Iterable[tuple[str, str]], source: Callable[[], Payloads]
) -> None:
    """Writes files of weights, the texts beside them and the index, which is last. Raises PlanError as `write_demo`."""
    total = sum(spec.nbytes for part in parts for spec in part)
    check_room(out, total)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in beside:
        write_text(out / name, text)
    weight_map: dict[str, str] = {}
    payloads = source()
    with tqdm(total=total, unit="B", unit_scale=True, desc="demo weights", disable=None) as bar:
        for i, part in enumerate(parts, start=1):
            name = f"model-{i:05d}-of-{len(parts):06d}.safetensors"
            write_file(out / name, part, payloads(part), bar.update)
            weight_map |= dict.fromkeys((spec.name for spec in part), name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(out / "model.safetensors.index.json", as_json(index))


def siblings(geometry: Geometry, dialect: Dialect, stated: dict[str, Any], ranks: str) -> Iterator[tuple[str, str]]:
    """Name and text of every file beside the weights, given the config.json that states the model, and its ranks."""
    yield "config.json", as_json(stated)
    eos: int = stated["eos_token_id"]
    yield "generation_config.json", as_json({"max_length": 262144, "eos_token_id": eos})
    yield "tiktoken.model", ranks
    yield "tokenizer_config.json", as_json(tokenizer_config(geometry, eos))
    yield "chat_template.jinja", template("chat_template.jinja")
    yield "LICENSE", template("LICENSE")
    if dialect != "k2-thinking":
        images: dict[str, Any] = json.loads(template("preprocessor_config.json"))
        images["media_proc_cfg"] |= {"patch_size": geometry.patch, "merge_kernel_size": geometry.merge_height}
        yield "preprocessor_config.json", as_json(images)


def _source(geometry: Geometry, seed: int, stated: dict[str, Any]) -> Payloads:
    """What turns one file's specs into bytes."""
    if geometry.weights == "filler":
        return Filler(seed).payloads
    # The quantizing library takes seconds and 400 MB to import, which the full-size filler must not pay.
    from convert.demo import weights

    how = weights.scheme(stated.get("text_config", stated)["quantization_config"])
    return lambda specs: weights.payloads(specs, seed, how)


def check_room(out: Path, total: int) -> None:
    """Raises PlanError unless `out` is empty or absent, and its disk has room for `total` bytes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PlanError(f"{out}: already holds files, expected a new or empty folder; choose another or remove it")
    disk = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(disk).free
    if free < total + MARGIN_BYTES:
        raise PlanError(
            f"{out}: {free / 1e9:.1f} GB free, the demo needs {(total + MARGIN_BYTES) / 1e9:.1f} GB; "
            "ask for fewer layers or choose another disk"
        )


def as_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
