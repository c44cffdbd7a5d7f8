"""The demo checkpoint against the release's format, the quantizing library, and the published template rules."""

import json
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import DIALECTS, K26, TINY, DemoError, Dialect, Geometry, config, k26, template
from convert.demo.inventory import shards
from convert.demo.tokenizer import ranks
from convert.demo.weights import scheme
from specs.config import read_config
from specs.errors import PlanError

# Names and shapes; {l} is any layer, {d} a dense one, {m} one of experts {e}, {b} a vision block.
LAYER, ATTN, MLP, BLOCK = "model.layers.{l}", "model.layers.{l}.self_attn", "model.layers.{m}.mlp", "encoder.blocks.{b}"
TEXT = [
    ("model.embed_tokens.weight", (768, 256)),
    ("model.norm.weight", (256,)),
    ("lm_head.weight", (768, 256)),
    (f"{LAYER}.input_layernorm.weight", (256,)),
    (f"{LAYER}.post_attention_layernorm.weight", (256,)),
    (f"{ATTN}.q_a_proj.weight", (128, 256)),
    (f"{ATTN}.q_a_layernorm.weight", (128,)),
    (f"{ATTN}.q_b_proj.weight", (512, 128)),
    (f"{ATTN}.kv_a_proj_with_mqa.weight", (96, 256)),
    (f"{ATTN}.kv_a_layernorm.weight", (64,)),
    (f"{ATTN}.kv_b_proj.weight", (512, 64)),
    (f"{ATTN}.o_proj.weight", (256, 256)),
    ("model.layers.{d}.mlp.gate_proj.weight", (512, 256)),
    ("model.layers.{d}.mlp.up_proj.weight", (512, 256)),
    ("model.layers.{d}.mlp.down_proj.weight", (256, 512)),
    (f"{MLP}.gate.weight", (16, 256)),
    (f"{MLP}.gate.e_score_correction_bias", (16,)),
    *((f"{MLP}.shared_experts.{p}_proj.weight", (256, 256)) for p in ("gate", "up", "down")),
    *(
        (f"{MLP}.experts.{{e}}.{p}_proj.weight_{part}", shape)
        for p in ("gate", "up", "down")
        for part, shape in (("packed", (256, 32)), ("scale", (256, 8)), ("shape", (2,)))
    ),
]
DTYPES = {"packed": "I32", "shape": "I32", "bias": "F32"}
VISION = [
    *((f"mm_projector.pre_norm.{p}", (64,)) for p in ("weight", "bias")),
    *((f"mm_projector.proj.{i}.{p}", shape) for i in (0, 2) for p, shape in (("weight", (256, 256)), ("bias", (256,)))),
    ("vision_tower.patch_embed.proj.weight", (64, 3, 14, 14)),
    ("vision_tower.patch_embed.proj.bias", (64,)),
    ("vision_tower.patch_embed.pos_emb.weight", (8, 8, 64)),
    *((f"vision_tower.{BLOCK}.norm{i}.{p}", (64,)) for i in (0, 1) for p in ("weight", "bias")),
    *(
        (f"vision_tower.{BLOCK}.{m}.{p}", shape)
        for m, full in (("wqkv", (192, 64)), ("wo", (64, 64)), ("mlp.fc0", (128, 64)), ("mlp.fc1", (64, 128)))
        for p, shape in (("weight", full), ("bias", full[:1]))
    ),
    ("vision_tower.encoder.final_layernorm.weight", (64,)),
    ("vision_tower.encoder.final_layernorm.bias", (64,)),
]
RANGES = {"{l}": range(3), "{d}": range(1), "{m}": range(1, 3), "{e}": range(16), "{b}": range(2)}
LOOK = ("look ", "", "and")
SYSTEM_TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "SYS"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
    {"role": "user", "content": [{"type": "text", "text": t} if t else {"type": "image"} for t in LOOK]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "R2",
        "tool_calls": [{"id": "functions.f:0", "function": {"name": "f", "arguments": '{"a":1}'}}],
    },
    {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "out"},
]
START = "<|im_assistant|>assistant<|im_middle|><think>"
GOLDEN = (
    "<|im_system|>system<|im_middle|>SYS<|im_end|><|im_user|>user<|im_middle|>U1<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think></think>A1<|im_end|><|im_user|>user<|im_middle|>look "
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\nand<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think>R2</think><|tool_calls_section_begin|><|tool_call_begin|>"
    'functions.f:0<|tool_call_argument_begin|>{"a":1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    "<|im_system|>f<|im_middle|>## Return of functions.f:0\nout<|im_end|>"
) + START
WORD = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{WORD}*[\p{{Ll}}{WORD}+{END}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{WORD}+[\p{{Ll}}{WORD}*{END}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def expand(name: str) -> Iterator[str]:
    """Every name that a pattern with ranges stands for."""
    for mark, values in RANGES.items():
        if mark in name:
            for value in values:
                yield from expand(name.replace(mark, str(value)))
            return
    yield name


def expected(prefix: str, vision: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    table = {prefix + n: (shape, DTYPES.get(n.split("_")[-1], "BF16")) for name, shape in TEXT for n in expand(name)}
    return table | ({n: (shape, "BF16") for name, shape in VISION for n in expand(name)} if vision else {})


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "tiny"
    write_demo(out, TINY)
    return out


@pytest.fixture(scope="module")
def tensors(tiny: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(tiny.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_names_dtypes_shapes_index(tmp_path: Path, dialect: Dialect) -> None:
    write_demo(tmp_path, TINY, dialect=dialect)
    text_only = dialect == "k2-thinking"
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}
    found, sizes = {}, 0
    index = read(tmp_path, "model.safetensors.index.json")
    for name in dict.fromkeys(index["weight_map"].values()):
        for key, tensor in load_file(tmp_path / name).items():
            assert index["weight_map"][key] == name
            found[key] = (tuple(tensor.shape), names[tensor.dtype])
            sizes += tensor.nbytes
    assert found == expected("" if text_only else "language_model.", vision=not text_only)
    assert index["weight_map"].keys() == found.keys() and index["metadata"]["total_size"] == sizes
    count = 4 if text_only else 6
    files = {f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)}
    assert files == set(index["weight_map"].values()) == {p.name for p in tmp_path.glob("model-*")}
    assert (tmp_path / "preprocessor_config.json").exists() != text_only


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialect_config(dialect: Dialect) -> None:
    raw = config(TINY, dialect)
    model = read_config(raw)
    assert (model.vision is None) == (dialect == "k2-thinking") == ("quantization_config" in raw)
    assert model.ids.eos == ((513,) if dialect == "k2.5" else (514,))
    assert (model.ids.bos, model.ids.pad, model.text.vocab) == (512, 767, 768)
    text = raw.get("text_config", raw)
    assert text["model_type"] == "kimi_k2" and text["rope_scaling"]["factor"] == 64
    ignore = text["quantization_config"]["ignore"]
    assert len(ignore) == {"k2.5": 4, "k2-thinking": 4}.get(dialect, 6)
    assert (ignore[0] == "lm_head") == (dialect == "k2.5")
    assert "media_placeholder_token_id" not in raw or raw["media_placeholder_token_id"] == 533


def test_full_geometry_is_the_release() -> None:
    release = json.dumps(config(K26), indent=2).encode()
    assert sha256(release).hexdigest() == "85825ca6e18cbe539eb83ee09eedfb3f4222265929f06e9f535a6d9364f55899"
    parts = shards(K26)
    assert sum(map(len, parts)) == 208_550
    sizes = [995_000_320, *[9_808_554_496] * 60, 4_697_634_816, 108_555_776, 833_732_064]
    assert [sum(t.nbytes for t in part) for part in parts] == sizes
    assert [len(part) for part in shards(k26(2))] == [12, 3470, 3, 6, 329]
    assert config(k26(2))["text_config"]["num_hidden_layers"] == 2


def test_experts_dequantize_as_the_library_says(tiny: Path, tensors: dict[str, torch.Tensor]) -> None:
    how = scheme(read(tiny, "config.json")["text_config"]["quantization_config"])
    counts = torch.zeros(16, dtype=torch.int64)
    modules = [name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")]
    for module in modules:
        packed, scale, shape = (tensors[f"{module}_{part}"] for part in ("packed", "scale", "shape"))
        nibbles = torch.stack([(packed >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(1)  # [O, I]
        assert list(nibbles.shape) == shape.tolist() and shape.dtype == torch.int32
        formula = (nibbles - 8).float() * scale.float().repeat_interleave(32, dim=1)
        whole = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
        library = PackedQuantizationCompressor.decompress(whole, how)["weight"]
        assert torch.equal(library, formula.to(torch.bfloat16))
        assert 0.8 < float(formula.std()) * formula.shape[1] ** 0.5 < 1.2
        counts += torch.bincount(nibbles.flatten(), minlength=16)
    assert len(modules) == 96 and int(counts.min()) > 1000, "every code occurs, -8 (stored as 0) among them"


def test_weights_are_finite_and_router_bias_matters(tensors: dict[str, torch.Tensor]) -> None:
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors.values())
    at = "language_model.model.layers.1.mlp.gate"
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    scores = (x @ tensors[f"{at}.weight"].float().T).sigmoid()  # [T, E]
    plain = scores.topk(4).indices.sort().values
    biased = (scores + tensors[f"{at}.e_score_correction_bias"]).topk(4).indices.sort().values
    assert 0.1 < float((plain != biased).any(-1).float().mean()) < 0.9


def test_same_seed_same_bytes(tiny: Path, tmp_path: Path) -> None:
    write_demo(tmp_path / "again", TINY)
    write_demo(tmp_path / "other", TINY, seed=1)
    first, again, other = (
        {p.name: p.read_bytes() for p in out.iterdir()} for out in (tiny, tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.startswith("model-")}


def test_filler_is_valid_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from convert.demo.checkpoint import write_demo; from convert.demo.geometry import TINY\n"
        "write_demo(Path(sys.argv[1]), replace(TINY, weights='filler')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "sub")], check=True, cwd=Path(__file__).parents[1])
    write_demo(tmp_path / "own", replace(TINY, weights="filler"))
    for path in (tmp_path / "own").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "sub" / path.name).read_bytes()
        for name, tensor in load_file(path).items():
            assert bool(torch.isfinite(tensor.float()).all()), name
            if name.endswith("weight_scale"):
                assert float(tensor.min()) > 0.004 and float(tensor.max()) < 0.021
            if name.endswith("weight_shape"):
                assert tensor.tolist() == [256, 256]


def test_wrong_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(PlanError, match="choose another or remove it"):
        write_demo(tmp_path, TINY)
    with pytest.raises(DemoError, match=r"'k3'.*choose one"):
        write_demo(tmp_path / "new", TINY, dialect="k3")  # type: ignore[arg-type]
    with monkeypatch.context() as patch, pytest.raises(PlanError, match=r"1\.0 GB free.*6\.9 GB.*ask for fewer layers"):
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
        write_demo(tmp_path / "new", k26(1))
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
    with pytest.raises(DemoError, match=r"hidden: found 100.*\n.*layers: found 0"):
        Geometry(hidden=100, layers=0)


def test_rank_file_round_trips_and_every_merge_is_reachable(tiny: Path) -> None:
    lines = [line.split() for line in (tiny / "tiktoken.model").read_text().splitlines()]
    table = {b64decode(token): int(rank) for token, rank in lines}
    assert list(table.values()) == list(range(512))
    specials = {a["content"]: int(i) for i, a in read(tiny, "tokenizer_config.json")["added_tokens_decoder"].items()}
    encoding = tiktoken.Encoding("demo", pat_str=SPLIT, mergeable_ranks=table, special_tokens=specials)
    for text in ("What is the capital of France?", "Ünïcode 中文 \r\n 12345 it's", template("words.txt")):
        assert encoding.decode(encoding.encode(text)) == text
    assert len(encoding.encode(template("words.txt"))) < 0.6 * len(template("words.txt"))
    for count in (512, 1024):
        tokens = {token: rank for rank, token in enumerate(ranks(count))}
        assert all(bpe(token, tokens) == [token] for token in tokens)


def bpe(text: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """`text` merged pair by pair, lowest rank first."""
    parts = [bytes([b]) for b in text]
    while True:
        known = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not known:
            return parts
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_special_tokens(tiny: Path) -> None:
    stated = read(tiny, "tokenizer_config.json")
    added = {int(i): a for i, a in stated["added_tokens_decoder"].items()}
    assert list(added) == list(range(512, 768)) and "chat_template" not in stated
    names = {i - 512: a["content"] for i, a in added.items()}
    some = {0: "[BOS]", 2: "<|im_end|>", 5: "<|reserved_token_517|>", 21: "<|media_pad|>", 22: "<think>", 255: "[PAD]"}
    assert some.items() <= names.items() and len(set(names.values())) == 256
    assert [a["content"] for a in added.values() if not a["special"]] == ["<think>", "</think>"]
    assert read(tiny, "generation_config.json") == {"max_length": 262144, "eos_token_id": 514}
    assert read(tiny, "preprocessor_config.json")["media_proc_cfg"]["merge_kernel_size"] == 2


def render(messages: list[dict[str, Any]], **variables: Any) -> str:
    loops = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
    environment.filters["tojson"] = lambda v, separators=None: json.dumps(v, ensure_ascii=False, separators=separators)
    source = environment.from_string(template("chat_template.jinja"))
    return source.render(messages=messages, **{"add_generation_prompt": True} | variables)


def test_template_golden() -> None:
    assert render(SYSTEM_TURNS) == GOLDEN
    assert render(SYSTEM_TURNS, thinking=False) == GOLDEN.replace("R2", "") + "</think>"
    kept = GOLDEN.replace("<think></think>A1", "<think>R1</think>A1")
    assert render(SYSTEM_TURNS, preserve_thinking=True) == kept
    assert render(SYSTEM_TURNS, add_generation_prompt=False) + START == GOLDEN


def test_template_tools_names_video() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "a < b"}}]
    say = [{"role": "user", "name": "Ann", "content": [{"type": "video_url"}, {"type": "text", "text": "<b>"}]}]
    user = "<|im_user|>Ann<|im_middle|><|kimi_k25_video_placeholder|>\n<b><|im_end|>"
    declared = '[{"type":"function","function":{"name":"f","description":"a < b"}}]'
    assert render(say, tools=tools) == f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|>{user}{START}"
    typed = render(say, tools=tools, tools_ts_str="# Tools\n")
    assert typed == f"<|im_system|>tool_declare<|im_middle|># Tools\n<|im_end|>{user}{START}"
    call = {"id": "functions.g:1", "function": {"name": "g", "arguments": {"a": 1, "b": "é"}}}
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    turn = render([calls, {"role": "tool", "tool_call_id": "x"}])
    one = '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"a": 1, "b": "é"}<|tool_call_end|>'
    assert f"<think></think><|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|><|im_end|>" in turn
    assert "<|im_system|>tool<|im_middle|>## Return of x\n<|im_end|>" in turn
