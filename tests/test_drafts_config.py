"""Drafts as they are released: configs of every dialect, tensors of every kind, and targets that do not fit."""

import copy
import json
from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from specs.config import read_config
from specs.draft import DraftConfig, check_partner, read_draft_config
from specs.errors import ConfigError, HeaderError
from specs.expand import Expanded, check_header, expand
from specs.fold import unfold
from specs.schema import load
from tests.fullsize import FIXTURES, Header, k26_config

RELEASED: dict[str, Any] = json.loads((FIXTURES / "drafts.json").read_text())
TARGET = read_config(k26_config())
VOCAB = 163_840
TAPS = (1, 29, 57)
Raw = dict[str, Any]


def raw(name: str) -> Raw:
    return copy.deepcopy(RELEASED[name]["config"])


def header(name: str) -> Header:
    return dict(unfold(RELEASED[name]["header"]))


def expanded(config: DraftConfig, names: Header) -> Expanded:
    made = expand(load(config.kind), config, names)
    check_header(made, names)
    return made


def stored(name: str) -> set[str]:
    return {item.name for item in expanded(read_draft_config(raw(name)), header(name)).items}


@pytest.mark.parametrize("name", RELEASED)
def test_a_spec_expands_to_exactly_the_released_tensors(name: str) -> None:
    names = header(name)
    made = expanded(read_draft_config(raw(name)), names)
    assert set(made.expected) == set(names) and not made.dropped
    assert sum(prod(shape) for _, shape in names.values()) == RELEASED[name]["params"]


@pytest.mark.parametrize("outer", ["", "model."])
@pytest.mark.parametrize("layer", ["layers.0.", "midlayer."])
@pytest.mark.parametrize("name", ["eagle3.1-mla", "eagle3-llama"])
def test_every_spelling_of_names_is_read_by_the_same_rows(name: str, layer: str, outer: str) -> None:
    bare = {n.replace("layers.0.", "midlayer."): s for n, s in header(name).items()}
    spelled = {outer + n.replace("midlayer.", layer): s for n, s in bare.items()}
    config = read_draft_config(raw(name))
    assert {i.name for i in expanded(config, spelled).items} == stored(name)
    half = {n.removeprefix("model.") if "lm_head" in n else n: s for n, s in spelled.items()}
    assert {i.name for i in expanded(config, half).items} == stored(name)


def test_dflash_may_have_an_outer_prefix() -> None:
    spelled = {f"model.{n}": s for n, s in header("dflash").items()}
    assert {i.name for i in expanded(read_draft_config(raw("dflash")), spelled).items} == stored("dflash")


@pytest.mark.parametrize("name", RELEASED)
def test_every_tensor_that_is_missing_is_named(name: str) -> None:
    """All but embedding and head, which a file may lack; the two tensors that names are found by say so too."""
    whole = header(name)
    config = read_draft_config(raw(name))
    for gone in whole:
        if gone in ("embed_tokens.weight", "lm_head.weight"):
            continue
        with pytest.raises(HeaderError) as e:
            expanded(config, {n: s for n, s in whole.items() if n != gone})
        assert gone in str(e.value)


def test_what_nobody_reads_is_named() -> None:
    names: Header = {**header("dflash"), "lm_head.weight": ("BF16", (VOCAB, 7168))}
    with pytest.raises(HeaderError, match=r"lm_head.weight: unexpected BF16 \[163840, 7168\]"):
        expanded(read_draft_config(raw("dflash")), names)


def test_norms_of_eagle31_go_with_the_flag() -> None:
    """Flag and weights disagree: neither is dropped in silence."""
    with pytest.raises(HeaderError, match=r"fc_norm.0.weight: unexpected"):
        expanded(read_draft_config(raw("eagle3-mla")), header("eagle3.1-mla"))
    with pytest.raises(HeaderError, match=r"fc_norm.2.weight: missing, expected BF16 \[7168\]"):
        expanded(read_draft_config(raw("eagle3.1-mla")), header("eagle3-mla"))
    alias = raw("eagle3-mla") | {"use_aux_norm": True, "norm_output": True}
    assert read_draft_config(alias) == read_draft_config(raw("eagle3.1-mla"))


def nested(**fields: Any) -> Callable[[Raw], object]:
    return lambda c: c["eagle_config"].update(fields)


def flat(c: Raw) -> None:
    c.update(c.pop("eagle_config"))


def layers(c: Raw, *ids: int) -> None:
    c["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)


def unnamed(c: Raw) -> None:
    del c["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: None, "begin with 1, so they are outputs"),
        (flat, "begin with 1, so they are outputs"),
        (lambda c: layers(c, 2, 30, 58), "begin with 2, so they are inputs"),
        (lambda c: (layers(c, 2, 30, 58), flat(c)), "begin with 2, so they are inputs"),
        (unnamed, "config.json names none: inputs of layers 2, 30, 58, the usual ones of 61"),
        (lambda c: c.pop("eagle_config"), "config.json names none"),
    ],
)
def test_both_conventions_of_layers_lead_to_the_same_states(change: Callable[[Raw], object], said: str) -> None:
    config = raw("eagle3.1-mla")
    change(config)
    read = read_draft_config(config, target_layers=61)
    assert read.taps == TAPS and said in read.taps_said


def test_layers_are_not_guessed() -> None:
    config = raw("eagle3-mla")
    layers(config, 5, 30, 58)
    assert read_draft_config(config).taps == (5, 30, 58)
    assert "neither 1 (outputs) nor 2 (inputs); taken as outputs" in read_draft_config(config).taps_said
    assert read_draft_config(config, taps_are="inputs").taps == (4, 29, 57)
    unnamed(config)
    with pytest.raises(ConfigError, match="names no layers of the target to read, and its layer count is unknown"):
        read_draft_config(config)
    with pytest.raises(ConfigError, match=r"taps layers \[1, 1, 0\], expected rising numbers"):
        read_draft_config(config, target_layers=4)


def test_rope_is_the_drafts_own_in_every_spelling() -> None:
    config = raw("eagle3-mla")
    read = read_draft_config(config)
    assert (read.rope.beta_fast, read.rope.factor, read.rope.theta) == (1.0, 64.0, 50000.0)
    block = config.pop("rope_scaling")
    block["rope_type"] = block.pop("type")
    config["rope_parameters"] = {**block, "rope_theta": config.pop("rope_theta")}
    assert read_draft_config(config) == read
    config["rope_parameters"]["rope_type"] = "deepseek_yarn"
    assert read_draft_config(config) == read
    for name in ("mscale", "mscale_all_dim", "beta_fast"):
        del config["rope_parameters"][name]
    silent = read_draft_config(config)
    assert silent.rope.beta_fast == 32 and "has no beta_fast, mscale, mscale_all_dim; taken as" in silent.warnings[0]
    config["rope_parameters"] = {"rope_theta": 10000.0}
    assert (
        read_draft_config(config).rope.factor == 1
        and "positions are not scaled" in read_draft_config(config).warnings[0]
    )
    config["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "llama3"}
    with pytest.raises(ConfigError, match="only 'yarn', 'deepseek_yarn' and none are supported"):
        read_draft_config(config)


def test_dflash_fields_stand_at_either_level() -> None:
    config = raw("dflash")
    read = read_draft_config(config)
    assert (read.block, read.mask_id, read.taps) == (8, 163_838, (1, 12, 24, 35, 47, 58))
    assert read.windows == (2048,) * 5 + (0,) and read.causal == (False,) * 6
    assert any("nothing of causal attention" in w for w in read.warnings)
    inside = {"block_size": config.pop("block_size"), **config["dflash_config"]}
    assert read_draft_config({**config, "dflash_config": inside}) == read
    assert read_draft_config({**config, **inside, "dflash_config": {}}) == read
    told = read_draft_config({**config, "dflash_config": {**inside, "causal": True}})
    assert told.causal == (True,) * 6 and not told.warnings
    with pytest.raises(ConfigError, match="block_size stand there more than once"):
        read_draft_config({**config, "block_size": 4, "dflash_config": inside})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id: found None, expected a token id"),
        (lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids: found .*expected rising"),
        (lambda c: c.pop("block_size"), "block_size: found None, expected a whole number from 2 up"),
        (lambda c: c.pop("sliding_window"), "sliding_window: not there, but layer_types names sliding layers"),
        (lambda c: c["layer_types"].pop(), "layer_types: found .* expected 6 of full_attention or sliding_attention"),
        (lambda c: c.update(num_key_value_heads=7), "num_key_value_heads: 7 does not divide 64 heads"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings: found True, only False is supported"),
        (lambda c: c.update(architectures=["DFlashForCausalLM"]), "architectures: found .*known drafts are"),
        (lambda c: c.pop("hidden_size"), "hidden_size: found None, expected int >= 1"),
    ],
)
def test_a_dflash_config_is_refused_by_field(change: Callable[[Raw], object], message: str) -> None:
    config = raw("dflash")
    change(config)
    with pytest.raises(ConfigError, match=message):
        read_draft_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nested(use_aux_hidden_state=False), "use_aux_hidden_state is False, only True is supported"),
        (nested(use_mtp_layernorm=True), "use_mtp_layernorm is True, only False is supported"),
        (lambda c: c.update(norm_before_fc=True), "norm_before_fc: found True"),
        (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers: found 2, an EAGLE3 draft has 1"),
        (lambda c: c.update(num_key_value_heads=8), "num_key_value_heads: found 8, MLA wants 64"),
        (lambda c: c.update(fc_norm="yes"), "fc_norm: found 'yes', expected true or false"),
        (lambda c: c.update(fc_norm=True, use_aux_norm=False), "fc_norm and use_aux_norm stand there more than once"),
    ],
)
def test_an_eagle_config_is_refused_by_field(change: Callable[[Raw], object], message: str) -> None:
    config = raw("eagle3-mla")
    change(config)
    with pytest.raises(ConfigError, match=message):
        read_draft_config(config)


def test_a_field_that_nobody_knows_is_told() -> None:
    config = read_draft_config(raw("eagle3-mla") | {"secret_gate": True})
    assert config.warnings == ("draft config.json.secret_gate is not a field of this family; it is ignored",)


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("eagle3.1-mla", "embedding: the target's; the file's own copy is not used", "head: the draft's own"),
        ("eagle3-mla without embedding", "embedding: the target's, the file has none", "head: the draft's own"),
        (
            "eagle3-mla without head",
            "embedding: the target's; the file's own copy is not used",
            "head: the target's, the file has none",
        ),
        ("dflash", "embedding: the target's, the file has none", "head: the target's, the file has none"),
    ],
)
def test_what_is_borrowed_is_told(name: str, embedding: str, head: str) -> None:
    said = check_partner(read_draft_config(raw(name)), TARGET, stored(name))
    assert embedding in said and head in said and "ids: the target's" in said
    assert any("reads the outputs of layers 1, " in line for line in said)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("eagle3-mla", {"hidden_size": 4096}, r"hidden_size 4096, the target's embedding has 7168"),
        ("eagle3-mla", {"target_hidden_size": 4096}, r"states of width 4096, the target's have 7168"),
        ("eagle3-mla", {"vocab_size": 151_936}, r"vocab_size 151936, the target has 163840 tokens"),
        ("dflash", {"num_target_layers": 48}, r"for a target of 48 layers, this one has 61"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [1]}},
            r"mask_token_id 163840 is out",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 61]}},
            r"layers 61, the target's last",
        ),
        ("dflash", {"vocab_size": 32_000}, r"32000 tokens and no output head"),
    ],
)
def test_a_wrong_partner_is_named(name: str, change: Raw, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_partner(read_draft_config(raw(name) | change), TARGET, stored(name))


def small(size: int) -> DraftConfig:
    return read_draft_config(raw("eagle3-mla") | {"draft_vocab_size": size})


def test_a_shorter_vocabulary_with_its_table_works() -> None:
    names = {*stored("eagle3-mla"), "d2t"}
    said = check_partner(small(4), TARGET, names, [0, 5, 5, VOCAB - 4])
    assert "ids: 4 of the target's 163840 tokens, by the file's table" in said
    assert any("its values were not looked at" in line for line in check_partner(small(4), TARGET, names))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0, 0, 0, 0], "d2t: is all zero, but the draft has 4 of 163840 tokens; it was never filled"),
        ([0, 5, 5, VOCAB - 3], "d2t: 1 entries lead outside the target's 163840 tokens, the first is 3: 163840"),
        ([-1, 5, 5, 5], "d2t: 1 entries lead outside .* the first is 0: -1"),
        ([0, 5, 4, 4], "d2t: 1 entries lead to a token that another leads to"),
        ([0, 5, 5], "d2t: has 3 entries, the draft has 4 tokens"),
    ],
)
def test_a_wrong_table_is_refused(table: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_partner(small(4), TARGET, {*stored("eagle3-mla"), "d2t"}, table)


def test_a_shorter_vocabulary_without_table_or_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 of the target's 163840 tokens and no id table \(d2t\)"):
        check_partner(small(4), TARGET, stored("eagle3-mla"))
    with pytest.raises(ConfigError, match=r"has 4 tokens and no output head \(lm_head\)"):
        check_partner(small(4), TARGET, {*stored("eagle3-mla without head"), "d2t"}, [0, 1, 1, 1])


def test_a_padded_vocabulary_is_the_targets_and_needs_no_table() -> None:
    said = check_partner(small(VOCAB + 64), TARGET, stored("eagle3-mla"))
    assert "ids: the target's; the draft's vocabulary is padded to 163904, the rest is never proposed" in said
    zeros = [0] * (VOCAB + 64)
    assert "ids: the target's; the draft's" in str(check_partner(small(len(zeros)), TARGET, {"head", "d2t"}, zeros))
