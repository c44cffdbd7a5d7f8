"""config.json of every known draft -> DraftConfig, and whether a draft fits its target.

Read, never guessed: what the files leave open is a default that is reported, or refused.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specs.config import Fields
from specs.dialect import Both, count, layer_ids, rope
from specs.dims import Mla, ModelConfig, Yarn
from specs.errors import ConfigError

Kind = Literal["eagle3_mla", "eagle3_llama", "dflash"]
TapsAre = Literal["outputs", "inputs"]
KINDS: dict[str, Kind] = {
    "Eagle3DeepseekV2ForCausalLM": "eagle3_mla",
    "LlamaForCausalLMEagle3": "eagle3_llama",
    "DFlashDraftModel": "dflash",
}
# Fields that must hold exactly this value (or be absent, which means the same).
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
}
EAGLE_FIXED: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(Mla):
    """One draft as its config.json states it. Specs refer to these fields and properties by name.

    vocab: rows of the draft's own head, if it has one. embed_vocab: rows of its own embedding. Sizes of MLA are 0
    where the attention is not MLA, `kv_heads` and `head_dim` are what a dense attention has. taps: layers of the
    target whose OUTPUT (residual stream, 0-based, low to high) the draft reads; taps_said: how that was found out.
    norm_output, fc_norm: EAGLE3.1. block, mask_id: DFlash. windows: per layer, 0 is full attention. causal: per layer,
    inside the block of a DFlash draft. rope_amplitude multiplies cos and sin beyond what `rope` says.
    """

    kind: Kind
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    embed_vocab: int
    target_hidden: int
    q_lora: int = 0
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head: int = 0
    norm_eps: float
    rope: Yarn
    rope_amplitude: float = 1.0
    taps: tuple[int, ...]
    taps_said: str
    norm_output: bool = False
    fc_norm: bool = False
    block: int = 0
    mask_id: int | None = None
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    target_layers: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, "DraftConfig | None"]:
        """Sizes by the parts of the spec."""
        return {"draft": self}

    @property
    def states(self) -> int:
        """Width of the concatenated target states that `fc` reads."""
        return len(self.taps) * self.target_hidden

    @property
    def fc_norms(self) -> int:
        """How many norms the states pass before `fc`: one a tap in EAGLE3.1, else none."""
        return len(self.taps) if self.fc_norm else 0

    @property
    def pair(self) -> int:
        """Width of an EAGLE3 layer's input: token embedding beside hidden stream."""
        return 2 * self.hidden


def read_draft_config(
    raw: Mapping[str, Any], target_layers: int | None = None, taps_are: TapsAre | None = None
) -> DraftConfig:
    """The draft of a parsed config.json; raises ConfigError with every problem at once.

    target_layers: layers of the target, for an EAGLE3 file that names no layers. taps_are: what the layer ids mean,
    where the rule (ids that begin with 1 are outputs, with 2 inputs) is known to be wrong.
    """
    problems: list[str] = []
    names = raw.get("architectures")
    kind = KINDS.get(names[0]) if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    if kind is None:
        raise ConfigError(f"draft config.json.architectures: found {names!r}, known drafts are {', '.join(KINDS)}")
    inner_name = "dflash_config" if kind == "dflash" else "eagle_config"
    both = Both("draft config.json", raw, inner_name, problems)
    both.top.fixed(FIXED)
    hidden = both.top.number("hidden_size", int, low=1)
    vocab = both.top.number("vocab_size", int, low=1)
    facts = dict(
        kind=kind,
        hidden=hidden,
        layers=both.top.number("num_hidden_layers", int, low=1),
        heads=both.top.number("num_attention_heads", int, low=1),
        ff=both.top.number("intermediate_size", int, low=1),
        embed_vocab=vocab,
        target_hidden=both.top.number("target_hidden_size", int, default=hidden, low=1),
        norm_eps=both.top.number("rms_norm_eps", float),
        target_layers=count(both, "num_target_layers"),
    )
    facts |= _mla(both.top, facts["heads"]) if kind == "eagle3_mla" else _dense(both.top, facts["heads"], hidden)
    facts["rope"], warnings = rope(both.top)
    if kind == "dflash":
        facts |= _dflash(both, facts["layers"], vocab, warnings)
    else:
        facts |= _eagle(both, facts["layers"], vocab, target_layers, taps_are)
    if problems:
        raise ConfigError(problems)
    return DraftConfig(**facts, warnings=(*warnings, *both.unknown()))


def _mla(f: Fields, heads: int) -> dict[str, int]:
    sizes = {
        "q_lora": f.number("q_lora_rank", int, low=1),
        "kv_lora": f.number("kv_lora_rank", int, low=1),
        "qk_nope": f.number("qk_nope_head_dim", int, low=1),
        "qk_rope": f.number("qk_rope_head_dim", int, low=2),
        "v_head": f.number("v_head_dim", int, low=1),
    }
    if f.get("num_key_value_heads", heads) != heads:
        f.problems.append(f"{f.where}.num_key_value_heads: found {f.get('num_key_value_heads')}, MLA wants {heads}")
    if sizes["qk_rope"] % 2:
        f.problems.append(f"{f.where}.qk_rope_head_dim: {sizes['qk_rope']} is odd, rotary pairs want an even number")
    return {**sizes, "kv_heads": 0, "head_dim": 0}


def _dense(f: Fields, heads: int, hidden: int) -> dict[str, int]:
    kv_heads = f.number("num_key_value_heads", int, default=heads, low=1)
    head_dim = f.number("head_dim", int, default=hidden // heads, low=2)
    if heads % kv_heads:
        f.problems.append(f"{f.where}.num_key_value_heads: {kv_heads} does not divide {heads} heads")
    if head_dim % 2:
        f.problems.append(f"{f.where}.head_dim: {head_dim} is odd, rotary pairs want an even number")
    return {"kv_heads": kv_heads, "head_dim": head_dim}


def _eagle(both: Both, layers: int, vocab: int, target_layers: int | None, taps_are: TapsAre | None) -> dict[str, Any]:
    if layers != 1:
        both.problems.append(f"{both.top.where}.num_hidden_layers: found {layers}, an EAGLE3 draft has 1")
    for name, value in EAGLE_FIXED.items():
        if (found := both.get(name, default=value)) != value:
            both.problems.append(f"{both.top.where}: {name} is {found!r}, only {value!r} is supported")
    ids = layer_ids(both, "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    n = both.get("num_target_layers", default=target_layers)
    if ids is None and isinstance(n, int):
        ids, taps_are = (2, n // 2, n - 3), taps_are or "inputs"
        why = f"config.json names none: inputs of layers {_spell(ids)}, the usual ones of {n}"
    elif ids is None:
        both.problems.append(f"{both.top.where}: names no layers of the target to read, and its layer count is unknown")
        ids, why = (1,), ""
    elif taps_are is not None:
        why = f"ids {list(ids)} were said to be {taps_are}"
    elif ids[:1] == (2,):
        taps_are, why = "inputs", f"ids {list(ids)} begin with 2, so they are inputs of layers"
    elif ids[:1] == (1,):
        why = f"ids {list(ids)} begin with 1, so they are outputs of layers"
    else:
        why = f"ids {list(ids)} begin with neither 1 (outputs) nor 2 (inputs); taken as outputs"
    taps = tuple(i - 1 for i in ids) if taps_are == "inputs" else ids
    if any(a >= b for a, b in zip((-1, *taps), taps, strict=False)):
        both.problems.append(f"{both.top.where}: taps layers {list(taps)}, expected rising numbers from 0 up")
    return {
        "vocab": count(both, "draft_vocab_size") or vocab,
        "taps": taps,
        "taps_said": f"reads the outputs of layers {_spell(taps)} ({why})",
        "fc_norm": both.flag("fc_norm", "use_aux_norm"),
        "norm_output": both.flag("norm_output"),
        "windows": (0,),
        "causal": (True,),
    }


def _dflash(both: Both, layers: int, vocab: int, warnings: list[str]) -> dict[str, Any]:
    taps = layer_ids(both, "target_layer_ids") or ()
    if not taps or any(a >= b for a, b in zip((-1, *taps), taps, strict=False)):
        both.problems.append(
            f"{both.top.where}.target_layer_ids: found {list(taps)}, expected rising numbers from 0 up"
        )
    block, mask = count(both, "block_size"), both.get("mask_token_id")
    if block is None or block < 2:
        both.problems.append(f"{both.top.where}.block_size: found {block!r}, expected a whole number from 2 up")
    if type(mask) is not int or mask < 0:
        both.problems.append(f"{both.top.where}.mask_token_id: found {mask!r}, expected a token id")
    causal = both.get("causal", "is_causal")
    if causal is None:
        warnings.append(f"{both.top.where}: says nothing of causal attention inside a block; taken as non-causal")
    return {
        "vocab": vocab,
        "taps": taps,
        "taps_said": f"reads the outputs of layers {_spell(taps)} (target_layer_ids are outputs)",
        "block": block or 0,
        "mask_id": mask,
        "windows": _windows(both, layers, warnings),
        "causal": (causal is True,) * layers,
    }


def _windows(both: Both, layers: int, warnings: list[str]) -> tuple[int, ...]:
    """Per layer, how far back it sees; 0 is all the way."""
    kinds, window = both.get("layer_types"), count(both, "sliding_window")
    if kinds is None:
        warnings.append(f"{both.top.where}: names no layer_types; every layer is taken to see the whole context")
        return (0,) * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        both.problems.append(
            f"{both.top.where}.layer_types: found {kinds!r}, expected {layers} of {' or '.join(known)}"
        )
        return (0,) * layers
    if window is None and known[1] in kinds:
        both.problems.append(f"{both.top.where}.sliding_window: not there, but layer_types names sliding layers")
    return tuple((window or 0) if k == known[1] else 0 for k in kinds)


def _spell(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def check_partner(
    draft: DraftConfig, target: ModelConfig, stored: Collection[str], table: Sequence[int] | None = None
) -> list[str]:
    """One line each on what a draft with this target does, to print at start; ConfigError if they do not fit.

    stored: the draft's tensors by their names in the artifact (`embed`, `head`, `d2t`, ...). table: the values of
    `d2t`; None if there is none, or if only headers are at hand. The target's embedding is used: drafts are trained
    with it frozen, and a copy in the draft's file only costs memory.
    """
    text, where = target.text, "draft config.json"
    problems = []
    if draft.target_hidden != text.hidden:
        problems.append(f"{where}: reads states of width {draft.target_hidden}, the target's have {text.hidden}")
    if draft.hidden != text.hidden:
        problems.append(f"{where}: hidden_size {draft.hidden}, the target's embedding has {text.hidden}")
    if draft.embed_vocab < text.vocab:
        problems.append(f"{where}: vocab_size {draft.embed_vocab}, the target has {text.vocab} tokens")
    if draft.target_layers not in (None, text.layers):
        problems.append(f"{where}: is for a target of {draft.target_layers} layers, this one has {text.layers}")
    if outside := [t for t in draft.taps if t >= text.layers]:
        problems.append(
            f"{where}: reads the outputs of layers {_spell(outside)}, the target's last is {text.layers - 1}"
        )
    if draft.mask_id is not None and draft.mask_id >= text.vocab:
        problems.append(f"{where}: mask_token_id {draft.mask_id} is outside the target's {text.vocab} tokens")
    problems += _table_problems(draft, text.vocab, stored, table)
    if problems:
        raise ConfigError([*problems, "is this draft for another target?"])
    return [
        f"{draft.kind}: {draft.taps_said}",
        "embedding: the target's"
        + ("; the file's own copy is not used" if "embed" in stored else ", the file has none"),
        "head: " + ("the draft's own" if "head" in stored else "the target's, the file has none"),
        f"ids: {_ids_said(draft, text.vocab, stored, table)}",
        *(_dflash_said(draft) if draft.kind == "dflash" else ()),
        *draft.warnings,
    ]


def _table_problems(draft: DraftConfig, vocab: int, stored: Collection[str], table: Sequence[int] | None) -> list[str]:
    """A shorter draft vocabulary needs a table of differences; whatever table there is must lead to distinct tokens."""
    small = draft.vocab < vocab
    if small and "head" not in stored:
        return [f"the draft has {draft.vocab} tokens and no output head (lm_head); the target's has {vocab}"]
    if small and "d2t" not in stored:
        return [f"the draft has {draft.vocab} of the target's {vocab} tokens and no id table (d2t) that says which"]
    if table is None:
        return []
    if len(table) != draft.vocab:
        return [f"d2t: has {len(table)} entries, the draft has {draft.vocab} tokens"]
    if not any(table):
        return [f"d2t: is all zero, but the draft has {draft.vocab} of {vocab} tokens; it was never filled"] * small
    ids = [i + int(d) for i, d in enumerate(table)]
    if bad := [i for i, t in enumerate(ids) if not 0 <= t < vocab]:
        return [
            f"d2t: {len(bad)} entries lead outside the target's {vocab} tokens, the first is {bad[0]}: {ids[bad[0]]}"
        ]
    if len(set(ids)) < len(ids):
        return [f"d2t: {len(ids) - len(set(ids))} entries lead to a token that another leads to"]
    return []


def _ids_said(draft: DraftConfig, vocab: int, stored: Collection[str], table: Sequence[int] | None) -> str:
    if table is not None and any(table):
        return f"{draft.vocab} of the target's {vocab} tokens, by the file's table"
    if table is None and "d2t" in stored and draft.vocab < vocab:
        return f"{draft.vocab} of the target's {vocab} tokens, by the file's table; its values were not looked at"
    if "head" in stored and draft.vocab > vocab:
        return f"the target's; the draft's vocabulary is padded to {draft.vocab}, the rest is never proposed"
    return "the target's"


def _dflash_said(draft: DraftConfig) -> list[str]:
    windows = ", ".join(str(w) if w else "all" for w in draft.windows)
    causal = "causal" if draft.causal[0] else "non-causal"
    return [f"block: {draft.block} tokens, mask token {draft.mask_id}, {causal}; layers see {windows} tokens back"]
