"""BERT: norms after the residuals, no norm after the last block, a head for masked words with a bias of its own."""

from __future__ import annotations

from torch import nn

from colrow.errors import PlanError
from colrow.families.hf import base, blocks, config_of, heads, norms, root, there
from colrow.rules import HEADS, Attention, Column, Drop, Head, Plan, Replicated, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family, as an encoder or a decoder, with cross-attention too."""
    at, config = base(model, "encoder"), config_of(model)
    if config.chunk_size_feed_forward:
        given = f"config.chunk_size_feed_forward = {config.chunk_size_feed_forward}"
        raise PlanError("bert", given, "it cuts the sequence, which is split by tokens already", "Set it to 0")
    layer, words = f"{at}encoder.layer.*", f"{root(at)}cls.predictions"
    attention = Attention(heads="num_attention_heads", head_dim="attention_head_size", width="all_head_size")
    return there(
        model,
        {
            f"{at}embeddings.word_embeddings": Vocab(),
            f"{at}embeddings.[pt]*_embeddings": Replicated(),
            **norms(f"{at}embeddings.LayerNorm", f"{layer}.*attention.output.LayerNorm", f"{layer}.output.LayerNorm"),
            f"{layer}.*attention.self": attention,
            f"{layer}.*attention.self.query": Column(HEADS),
            f"{layer}.*attention.self.key": Column(HEADS),
            f"{layer}.*attention.self.value": Column(HEADS),
            f"{layer}.*attention.self.dropout": Drop(HEADS),
            f"{layer}.*attention.output.dense": Row(HEADS),
            f"{layer}.intermediate.dense": Column(),
            f"{layer}.output.dense": Row(),
            f"{at}pooler.dense": Replicated(),
            **heads(model, at),
            **({f"{words}.decoder": Head(), f"{words}.bias": Head()} if at else {}),
        },
    ) | blocks(model, f"{at}encoder.layer")
