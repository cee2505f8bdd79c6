"""Text from a model: token by token, all ranks together."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from colrow import comm
from colrow.data import Tokenizer

TEMPERATURE = 0.8
"""Below 1, likely tokens are drawn more often than the model says: a small model's text is then easier to read."""


@torch.no_grad()
def sample(
    model: nn.Module, tokenizer: Tokenizer, mesh: DeviceMesh, context: int, count: int, seed: int, prompt: str = "\n"
) -> str:
    """`count` tokens that the model goes on with after `prompt`. The same text at every degree, up to rounding.

    Cost: a forward pass a token, with nothing kept between them, and a broadcast of eight bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    tokens = tokenizer.encode(prompt.encode()).long().to(comm.device(mesh))
    for _ in range(count):
        logits = model(tokens[None, -context:])[0, -1].double().cpu()
        drawn = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, comm.broadcast(drawn.to(tokens.device), mesh)])  # ranks may round differently
    model.train(training)
    return tokenizer.decode(tokens.tolist()).strip("\n")
