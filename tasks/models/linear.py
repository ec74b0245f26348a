"""Float32 on a CPU by oneDNN: torch itself takes MKL, whose kernels for AMD's processors use half the vector width.

Shapes: _N rows, _I inputs and _O outputs of a linear layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [N, K] @ b [K, M]: [N, M], in the dtype of both. Not differentiable."""
    return _onednn(a, b.t()) if _fits_onednn(a) else a @ b


class Linear(nn.Linear):
    """nn.Linear with its three products by oneDNN, in float32 on a CPU."""

    @classmethod
    def replace(cls, model: nn.Module) -> None:
        """Makes this the class of a model's linear layers; the parameters stay the same objects."""
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = cls

    def forward(self, input: Tensor) -> Tensor:
        if not _fits_onednn(input) or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        out_NO: Tensor = _Linear.apply(input.flatten(0, -2), self.weight, self.bias)
        return out_NO.unflatten(0, input.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return _onednn(x_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _onednn(grad_NO, weight_OI.t()) if of_x else None,
            _onednn(grad_NO.t(), x_NI.t()) if of_weight else None,
            grad_NO.sum(0) if of_bias else None,
        )


def _fits_onednn(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _onednn(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    out_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return out_NO
