"""Models in double throughout: what the comparison of a split model with one process needs to see small faults."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Casts of doubles to fp32, as norms, softmax and rotary positions make them, keep double.

    They cost 1e-8, which would hide a fault of that size; with both models in double throughout, rounding is 1e-15.
    What is made again in backward is made as it was: `active` tells how that was.
    """

    _entered: ContextVar[int] = ContextVar("colrow_keep_double", default=0)

    @classmethod
    def active(cls) -> bool:
        """Whether one is entered."""
        return cls._entered.get() > 0

    def __enter__(self) -> Self:
        self._entered.set(self._entered.get() + 1)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._entered.set(self._entered.get() - 1)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            casts = func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in (*args[1:], *kwargs.values())
            if func is torch.Tensor.float or casts:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)
