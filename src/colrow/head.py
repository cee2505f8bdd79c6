"""The output projection, split over the vocabulary."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from colrow.context import current, require_whole
from colrow.linear import ColumnLinear
from colrow.loss import SplitLogits


class VocabHead(ColumnLinear):
    """The output projection, split over the vocabulary: a `ColumnLinear` that says what its logits are.

    Shapes: input (..., in), `src`; output a DTensor of the true global shape (..., vocabulary), `Shard(-1)`. What
    `vocab_cross_entropy` takes as it is; `.full_tensor()` makes it whole.
    """

    def forward(self, input: Tensor) -> Tensor:
        require_whole(type(self).__name__)
        call = current()
        if call is not None and call.until_done is not None and not call.split_logits:
            call.until_done.enter_context(SplitLogits())
            call.split_logits = True
        y = super().forward(input)
        shape = torch.Size((*y.shape[:-1], self.splits["weight"].true_size))
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(y, self.mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)
