"""Linear layers whose weights are 8-bit integers, each row with a scale of its own: half the bytes of bfloat16 that a step has to fetch. Multiplied
as they are by torch's own product, and by the house's in compiled steps (`microkernel`); nothing but weights is rounded."""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.sampling import near

MOST = 127  # of a weight's size, in units of its row's scale
EVEN = 32  # inputs of a layer divide by it: torch's product reads so many at once, beyond a row's end if need be
PIECE = 256  # rows that are rounded at a time, in float32
log = logging.getLogger("outrider")


class QuantisedLinear(nn.Module):
    """A linear layer in 8 bits. turned int8 [inputs, outputs], each output's in one piece: what Inductor turns itself when it freezes a step, it does
    not keep beside what it has packed. scale [outputs] in the layer's dtype; weight: as others read it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        whole = linear.weight.detach()
        rounded, scales = torch.empty_like(whole, dtype=torch.int8), torch.empty_like(whole[:, 0])
        for at in range(0, len(whole), PIECE):
            rounded[at : at + PIECE], scales[at : at + PIECE] = _rounded(whole[at : at + PIECE].float(), whole.dtype)
        self.turned, self.scale = (nn.Parameter(x, requires_grad=False) for x in (rounded.t(), scales))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], in the layer's dtype: made when it is asked for."""
        return self.turned.t().to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        if not near(x.device.type):
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.turned.t(), self.scale)
        out = out.view(*x.shape[:-1], len(self.scale))
        return out if self.bias is None else out + self.bias


def _rounded(whole: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of float32 as integers and scales; a scale is rounded up, so that a row's largest weight fits."""
    least = whole.abs().amax(1) / MOST
    scale = least.to(dtype)
    scale = torch.where(scale.float() < least, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale[scale == 0] = 1  # a row of zeros
    return (whole / scale.float()[:, None]).round_(), scale


def quantised(module: Any, name: str) -> Any:
    """The module with its linear layers in 8 bits, in place and one after the other, the head included. Embeddings, layers of other than multiples of
    32 inputs and what else holds weights stay whole, which is said where it is most of the model."""
    sizes = {n: m.weight.numel() for n, m in module.named_modules() if type(m) is nn.Linear and m.in_features % EVEN == 0}
    share = sum(sizes.values()) / max(sum(p.numel() for p in module.parameters()), 1)
    for path in sizes:
        module.set_submodule(path, QuantisedLinear(module.get_submodule(path)))
    if share < 0.5:
        log.warning("of the weights of %s no more than %d%% lie in linear layers and are quantised; the others stay whole", name, 100 * share)
    return module
