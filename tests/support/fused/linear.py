"""The linear layer in 8-bit integers by its definition, on a CPU."""

from torch import Tensor

from pascal_attn_core.fused.launch.linear import LinearCall
from pascal_attn_core.reference.int8_rows import quantize_rows


def before_activation(call: LinearCall) -> Tensor:
    """float32 ``[M, N or 2 N]``, each step rounded on its own."""
    weight, x = call.weight, quantize_rows(call.x.cpu(), call.weight.rotation)
    sums = (x.codes.double() @ weight.codes.cpu().double().T).float()  # whole numbers below 2**53
    y = sums * (x.scales[:, None] * weight.scales.cpu())
    return y if call.bias is None else y + call.bias.cpu().float()
