"""Specs expand to exactly the tensors of their checkpoints; broken specs and configs are refused by path."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specs.config import read_config
from specs.errors import ConfigError, HeaderError, SpecError
from specs.expand import check_header, expand
from specs.fold import count, fold, unfold
from specs.schema import archs, load, names, parse
from tests.fullsize import FIXTURES, Header, k26_config, k26_header

SPEC = load("kimi_k2_6")
YAML = (Path(__file__).parent.parent / "specs" / "kimi_k2_6.yaml").read_text()


@pytest.fixture(scope="module")
def header() -> Header:
    return k26_header()


def test_the_spec_expands_to_the_real_header(header: Header) -> None:
    assert len(header) == 208_550
    expanded = expand(SPEC, read_config(k26_config()), header)
    check_header(expanded, header)
    assert set(expanded.expected) == set(header)
    assert [len({i.name for i in expanded.items if i.family.part == p}) for p in ("text", "vision")] == [914, 335]


def test_the_fixture_is_folded_without_loss(header: Header) -> None:
    folded = json.loads((FIXTURES / "kimi_k2_6.header.json").read_text())
    assert sum(map(count, folded)) == len(header)
    assert fold(header) == folded


def test_fold_keeps_names_that_are_no_product() -> None:
    header: Header = {
        "a.1.b.2": ("BF16", (3,)),
        "a.1.b.3": ("BF16", (3,)),
        "a.2.b.2": ("BF16", (3,)),
        "a.01": ("F32", ()),
    }
    assert dict(unfold(fold(header))) == header


def without_prefix(header: Header) -> Header:
    return {n.removeprefix("language_model."): s for n, s in header.items() if n.startswith("language_model.")}


def test_k2_thinking_naming_is_read_by_the_same_rows(header: Header) -> None:
    flat = dict(k26_config()["text_config"])  # type: ignore[call-overload]
    bare = without_prefix(header)
    expanded = expand(SPEC, read_config(flat), bare)
    check_header(expanded, bare)
    assert {i.family.part for i in expanded.items} == {"text"}


def test_weight_shape_may_be_int64(header: Header) -> None:
    wide = {n: ("I64", s) if n.endswith("weight_shape") else (d, s) for n, (d, s) in header.items()}
    check_header(expand(SPEC, read_config(k26_config()), wide), wide)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda h: h.pop("language_model.model.layers.12.mlp.experts.37.down_proj.weight_scale"),
            "layers.12.mlp.experts.37.down_proj.weight_scale: missing, expected BF16 [7168, 64]",
        ),
        (lambda h: h.update({"foo.bar": ("BF16", (3,))}), "foo.bar: unexpected BF16 [3]"),
        (
            lambda h: h.update({"language_model.model.layers.1.mlp.experts.0.up_proj.weight_g_idx": ("I32", (7168,))}),
            "only symmetric INT4 without g_idx or zero points",
        ),
        (
            lambda h: h.update(
                {"language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale": ("F16", (2048, 224))}
            ),
            "found F16 [2048, 224], expected BF16 [2048, 224]",
        ),
        (
            lambda h: h.update({"language_model.model.norm.weight": ("BF16", (7169,))}),
            "found BF16 [7169], expected BF16 [7168]",
        ),
        (
            lambda h: h.update({"language_model.model.layers.1.mlp.gate.e_score_correction_bias": ("BF16", (384,))}),
            "expected F32 [384]",
        ),
        (
            lambda h: h.pop("language_model.model.embed_tokens.weight"),
            "none of language_model.model.embed_tokens.weight",
        ),
        (lambda h: h.update({"model.embed_tokens.weight": ("BF16", (163840, 7168))}), "more than one of"),
    ],
)
def test_a_header_that_differs_is_refused_by_name(header: Header, change: Callable[[Header], Any], said: str) -> None:
    broken = dict(header)
    change(broken)
    with pytest.raises(HeaderError) as caught:
        check_header(expand(SPEC, read_config(k26_config()), broken), broken)
    assert said in str(caught.value)


def test_all_problems_are_listed_at_once(header: Header) -> None:
    broken = {n: s for n, s in header.items() if ".layers.5.mlp.experts." not in n}
    with pytest.raises(HeaderError) as caught:
        check_header(expand(SPEC, read_config(k26_config()), broken), broken)
    assert len(caught.value.problems) == 3456
    assert "and 3416 more like these" in str(caught.value)


def test_config_numbers() -> None:
    c = read_config(k26_config())
    assert (c.text.layers, c.text.hidden, c.text.experts, c.text.kv_a, c.text.qk_head) == (61, 7168, 384, 576, 192)
    assert (c.text.rope.theta, c.text.rope.factor, c.text.rope.original) == (50000.0, 64.0, 4096)
    assert c.ids.eos == (163586,) and c.vision is not None and c.warnings == ()


def nested(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    config = copy.deepcopy(k26_config())
    change(config)
    return config


def rope_parameters(config: dict[str, Any]) -> None:
    text = config["text_config"]
    old = text.pop("rope_scaling")
    text["rope_parameters"] = {**old, "rope_type": old.pop("type"), "rope_theta": text.pop("rope_theta")}
    del text["rope_parameters"]["type"]


def hoisted(config: dict[str, Any]) -> None:
    config["quantization_config"] = config["text_config"].pop("quantization_config")


def torch_dtype(config: dict[str, Any]) -> None:
    for block in (config, config["text_config"]):
        block["torch_dtype"] = block.pop("dtype")


def rope_type(config: dict[str, Any]) -> None:
    block = config["text_config"]["rope_scaling"]
    block["rope_type"] = block.pop("type")


@pytest.mark.parametrize("dialect", [rope_parameters, hoisted, torch_dtype, rope_type])
def test_every_config_dialect_reads_to_the_same_thing(dialect: Callable[[dict[str, Any]], None]) -> None:
    assert read_config(nested(dialect)) == read_config(k26_config())


def test_an_unknown_config_key_warns_once() -> None:
    config = nested(lambda c: c["text_config"].update(brand_new=1))
    assert read_config(config).warnings == (
        "config.json.text_config.brand_new is not a field of this family; it is ignored",
    )


def weights(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: weights(c).update(group_size=64), "group_0.weights.group_size: found 64, only 32 is supported"),
        (lambda c: weights(c).update(num_bits=8), "num_bits: found 8, only 4"),
        (lambda c: weights(c).update(symmetric=False), "symmetric: found False, only True"),
        (lambda c: weights(c).update(actorder="group"), "actorder: found 'group', only None"),
        (
            lambda c: c["text_config"]["quantization_config"].update(format="nvfp4-pack-quantized"),
            "only 'pack-quantized'",
        ),
        (lambda c: c["text_config"].update(n_group=8), "text_config.n_group: found 8, only 1 is supported"),
        (lambda c: c["text_config"].update(num_nextn_predict_layers=1), "num_nextn_predict_layers: found 1, only 0"),
        (lambda c: c["text_config"].update(hidden_size="big"), "hidden_size: found 'big', expected int"),
        (lambda c: c["text_config"].update(tie_word_embeddings=True), "tie_word_embeddings: found True, only False"),
        (lambda c: c["text_config"].pop("kv_lora_rank"), "kv_lora_rank: found None, expected int"),
        (lambda c: c["text_config"].update(num_experts_per_tok=400), "400 is more than 384 experts"),
        (lambda c: c["text_config"]["rope_scaling"].update(type="linear"), "found 'linear', only 'yarn' is supported"),
        (lambda c: c["vision_config"].update(merge_type="other"), "vision_config.merge_type: found 'other'"),
        (lambda c: c.update(model_type="llama"), "config.json.model_type: found 'llama'"),
    ],
)
def test_a_config_outside_the_family_is_refused_by_field(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(nested(change))
    assert said in str(caught.value)


def spec_with(change: Callable[[dict[str, Any]], Any]) -> str:
    value = yaml.safe_load(YAML)
    change(value)
    return yaml.safe_dump(value, sort_keys=False)


def row(value: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in value["parts"]["text"]["tensors"] if r["to"] == name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: row(v, "embed").update(colour="red"), "tensors[0]: unknown key 'colour'"),
        (lambda v: row(v, "embed").pop("split"), "tensors[0]: missing key 'split'"),
        (
            lambda v: row(v, "embed").update(split={"tp": "outs"}),
            "tensors[0].split.tp: 'outs' is not an axis of this row: out, in",
        ),
        (lambda v: row(v, "embed").update(split={"pp": "out"}), "'pp' is not a mesh axis"),
        (lambda v: row(v, "embed").update(layout="marlin"), "layout: found 'marlin', expected one of plain, int4_tile"),
        (lambda v: row(v, "embed").update({"from": "x.{z}.y"}), "index {z} has no range"),
        (
            lambda v: row(v, "layers.{l}.attn.w_uv").update(take={"out": ["v_head", "qk_nope_v"]}),
            "expected all of 0..qk_nope_v",
        ),
        (lambda v: v["parts"]["text"]["tensors"].append(row(v, "embed")), "'embed' is already made by tensors[0]"),
        (lambda v: v.update(famly="x"), "unknown key 'famly'"),
        (lambda v: row(v, "layers.{l}.attn.o").update(merge=["out in"]), "are not neighbouring axes"),
    ],
)
def test_a_broken_spec_is_refused_with_its_path(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse("broken", spec_with(change))
    assert said in str(caught.value)


def test_names_and_archs() -> None:
    assert names() == ["dflash", "eagle3_llama", "eagle3_mla", "kimi_k2_6"]
    assert archs()["sm120"]["shared_bytes"] == 101_376
    with pytest.raises(SpecError, match="no spec named"):
        load("gpt")
