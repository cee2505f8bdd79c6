"""Tiny random models of Hugging Face families: every part that a family has, at sizes that a laptop does not notice.

    model = tiny("gemma3")
    loss = model(**batch(model)).loss

Biases and gains are random as well: the usual zeros and ones hide a bias that is counted twice, or a lost gradient.
transformers is imported when a model is asked for, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 61,
        "max_position_embeddings": 64,
    }
)
"""The sizes of all families, by their usual names. A family leaves out those that it does not have."""
ODD: Final[Mapping[str, int]] = MappingProxyType(
    {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "intermediate_size": 70,
        "vocab_size": 61,
    }
)
"""Sizes that 2, 3 and 4 do not divide."""
MANY: Final[Mapping[str, int]] = MappingProxyType(
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
)
"""Many query heads for each key/value head: fewer of these than ranks, in groups that 3 and 4 ranks cut."""

LANGUAGE: Final = (
    "AutoModelForCausalLM",
    "AutoModel",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)


@dataclass(frozen=True)
class Family:
    """What is particular to a family of models.

    Attributes:
        note: what its layers have that others do not, in a few words.
        kinds: transformers' Auto classes that it is known in; the first is the usual one.
        own: values of its config that differ from, or add to, `SIZES`.
        names: what it calls one of `SIZES`, where that is not the usual name.
        like: values of its config that follow another one.
        options: which of transformers' implementations to ask for.
    """

    note: str
    kinds: tuple[str, ...] = LANGUAGE
    own: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    like: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)


_IMPLEMENTATIONS: Final = ("attn_implementation", "experts_implementation")
_EAGER: Final = MappingProxyType({"attn_implementation": "eager"})
_EAGER_EXPERTS: Final = MappingProxyType({"experts_implementation": "eager"})  # the fused ones want multiples of 4
_DEEPSEEK: Final = MappingProxyType(
    {
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 22,
    }
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family("grouped key/value heads, rotary positions, SwiGLU"),
        "mistral": Family("as llama, with a sliding window", own={"sliding_window": 8}),
        "qwen2": Family("as llama, with biases on q, k and v"),
        "qwen3": Family("as llama, with norms on the heads of q and k", own={"head_dim": 8}),
        "gemma2": Family(
            "four norms a block, soft caps, every other layer local",
            LANGUAGE[:4],
            own={"head_dim": 8, "sliding_window": 8},
            options=_EAGER,
        ),
        "gemma3_text": Family(
            "as gemma2, with norms on the heads of q and k, and no soft caps",
            LANGUAGE[:3],
            own={"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
        ),
        "phi3": Family("fused [q | k | v] and [gate | up]", LANGUAGE[:4], own={"pad_token_id": 0, "eos_token_id": 2}),
        "gpt2": Family(
            "Conv1D layers, fused [q | k | v], learned positions",
            own={"bos_token_id": 1, "eos_token_id": 2},
            names={"intermediate_size": "n_inner"},
        ),
        "gpt_neox": Family("[q k v] fused head by head, attention and MLP side by side"),
        "opt": Family(
            "learned positions with an offset, ReLU",
            (*LANGUAGE[:3], LANGUAGE[4]),
            own={"pad_token_id": 1},
            names={"intermediate_size": "ffn_dim"},
            like={"word_embed_proj_dim": "hidden_size"},
        ),
        "bloom": Family("ALiBi: a slope for each head; [q k v] fused head by head", options=_EAGER),
        "falcon": Family(
            "[q .. q k v] fused by key/value head, attention and MLP side by side",
            own={"new_decoder_architecture": True, "bias": True},
            names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        ),
        "bert": Family(
            "an encoder, with norms after the residuals",
            ("AutoModelForMaskedLM", *LANGUAGE),
        ),
        "t5": Family(
            "encoder and decoder, attention across, a bias for each head by distance",
            ("AutoModelForSeq2SeqLM", *LANGUAGE[1:]),
            own={"d_kv": 8, "decoder_start_token_id": 0},
            names={"intermediate_size": "d_ff"},
            like={"num_decoder_layers": "num_hidden_layers"},
        ),
        "vit": Family(
            "images: 196 patches and a class token",
            ("AutoModelForImageClassification", "AutoModel"),
            own={"image_size": 224, "patch_size": 16, "num_labels": 3},
        ),
        "mixtral": Family(
            "a mixture of experts, two for each token", own={"num_local_experts": 4}, options=_EAGER_EXPERTS
        ),
        "deepseek_v3": Family(
            "latent attention, a mixture of experts with a shared one after a first dense layer",
            LANGUAGE[:4],
            own=_DEEPSEEK,
            like={"num_key_value_heads": "num_attention_heads"},
            options=_EAGER_EXPERTS,
        ),
    }
)

ALIASES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "gemma3": ("gemma3_text", {}),
        "smollm": (
            "llama",
            {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        ),
    }
)
"""Other names: the family, and what is changed."""


def tiny(family: str, kind: str | None = None, *, dropout: float = 0.0, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny random model.

    Arguments:
        family: a name in `FAMILIES` or `ALIASES`.
        kind: one of transformers' Auto classes; without it, the family's usual one.
        dropout: every probability of dropout that the family has.
        seed: rules the weights.
        changes: other values of its config, by the family's names or those of `SIZES`; and transformers' own
            `attn_implementation` and `experts_implementation`.
    """
    family, changes = resolve_alias(family, changes)
    known = FAMILIES[family]
    options = {name: changes.pop(name) for name in _IMPLEMENTATIONS if name in changes}
    kind = kind or known.kinds[0]
    if kind.endswith("SequenceClassification"):
        changes.setdefault("pad_token_id", 0)  # it looks for a row's last token that is none
    config = tiny_config(family, dropout=dropout, **changes)
    return same_dropout(randomize(from_config(config, kind, **{**known.options, **options}), seed), dropout)


def resolve_alias(name: str, changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family that a name stands for, and all that is changed in it."""
    family, own = ALIASES.get(name, (name, {}))
    return family, {**own, **changes}


def tiny_config(family: str, *, dropout: float = 0.0, **changes: Any) -> Any:
    """The config of a tiny model."""
    from transformers import AutoConfig

    family, changes = resolve_alias(family, changes)
    known, default = FAMILIES[family], AutoConfig.for_model(family)
    values: dict[str, Any] = {}
    for name, value in {**SIZES, **known.own, **changes}.items():
        theirs = known.names.get(name, name)
        if hasattr(default, theirs) or name not in SIZES:
            values[theirs] = value
    own = {name for name in changes if name not in SIZES}  # one of `SIZES` is asked of all families alike
    values |= {name: values[other] for name, other in known.like.items() if name not in own}
    return set_dropout(AutoConfig.for_model(family, **values), dropout)


def from_config(config: Any, kind: str, **options: str) -> nn.Module:
    """A model of a config; `kind` is one of transformers' classes, Auto or not. Auto classes take `options`."""
    import transformers

    found = getattr(transformers, kind)
    return found.from_config(config, **options) if hasattr(found, "from_config") else found(config)


def set_dropout(config: Any, probability: float) -> Any:
    """Set every probability of dropout that a config has, in place, and return it. Layers are never dropped whole."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or "pdrop" in name or "layerdrop" in name) and isinstance(value, int | float):
            setattr(config, name, 0.0 if "layerdrop" in name else probability)
    return config


def same_dropout(model: nn.Module, probability: float) -> nn.Module:
    """Set the probability of every dropout layer, in place: some are written into a model's code, not its config."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
    return model


def randomize(model: nn.Module, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Random weights, biases and gains, in place: none is zero or one, and activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *biases]:
            if not value.is_floating_point():
                continue
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * scale
            if name.endswith("bias"):
                value.copy_(noise)
            elif value.dim() < 2:
                value.copy_(1 + noise)
            else:
                value.copy_(noise / max(1.0, value.shape[-1] ** 0.5 / 2))
    return model


def batch(model: nn.Module, seed: int = 1, shape: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Arguments for a call: two rows of 13 tokens, the first padded on the left, or two images; labels where the class
    of the model has a loss. With a shape, so many rows of so many tokens, without padding."""
    rows, columns = shape or (2, 13)
    config: Any = model.config
    kind, generator = type(model).__name__, torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    if hasattr(config, "image_size"):
        size = config.image_size
        high, wide = (size, size) if isinstance(size, int) else size
        given = {"pixel_values": torch.randn(rows, config.num_channels, high, wide, generator=generator)}
        given["pixel_values"] = given["pixel_values"].to(next(model.parameters()).dtype)
    else:
        ids = torch.randint(config.vocab_size, (rows, columns), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, :3] = int(shape is not None)
        given = {"input_ids": ids, "attention_mask": mask}
        if config.is_encoder_decoder:
            end = config.eos_token_id
            given["input_ids"] = torch.where(ids == end, end + 1, ids)
            given["input_ids"][:, -1] = end  # a classifier of sequences reads the only end of each
            if kind.endswith("Model") and not kind.endswith("EncoderModel"):
                given["decoder_input_ids"] = ids[:, :7]
    if kind.endswith("TokenClassification"):
        given["labels"] = torch.randint(config.num_labels, (rows, columns), generator=generator)
    elif kind.endswith("Classification"):
        given["labels"] = torch.randint(config.num_labels, (rows,), generator=generator)
    elif kind.endswith(("LM", "LMHeadModel", "ForConditionalGeneration")):
        given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    return {name: value.to(device) for name, value in given.items()}
