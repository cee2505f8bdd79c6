"""T5: an encoder and a decoder, cross-attention, a bias for each head and distance that the first block computes."""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, blocks, heads, norms, root, there
from colrow.rules import (
    FEATURES,
    HEADS,
    Attention,
    Column,
    Drop,
    Head,
    LastNorm,
    Mlp,
    Plan,
    Replicated,
    Row,
    Sliced,
    Vocab,
)


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family."""
    at = base(model, "shared")
    layer = f"{at}*coder.block.*.layer.*"
    return (
        there(
            model,
            {
                f"{at}shared": Vocab(),
                f"{at}*coder.embed_tokens": Vocab(),
                **norms(f"{layer}.layer_norm"),
                f"{layer}.*Attention": Attention(heads="n_heads", head_dim="key_value_proj_dim", width="inner_dim"),
                f"{layer}.*Attention.[qkv]": Column(HEADS),
                f"{layer}.*Attention.o": Row(HEADS),
                f"{layer}.*Attention.relative_attention_bias": Sliced(1, HEADS, head_dim=1),
                f"{layer}.DenseReluDense": Mlp(),
                f"{layer}.DenseReluDense.wi*": Column(),
                f"{layer}.DenseReluDense.wo": Row(),
                f"{layer}.DenseReluDense.dropout": Drop(FEATURES),
                f"{at}*coder.final_layer_norm": LastNorm(),
                f"{root(at)}lm_head": Head(),
                f"{root(at)}qa_outputs": Replicated(),
                **heads(model, at),
            },
        )
        | blocks(model, f"{at}encoder.block", last_norm=f"{at}encoder.final_layer_norm")
        | blocks(model, f"{at}decoder.block", last_norm=f"{at}decoder.final_layer_norm")
    )
