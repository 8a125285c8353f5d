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
log = logging.getLogger("outrider")


class QuantisedLinear(nn.Module):
    """A linear layer in 8 bits. weight int8 [outputs, inputs], scale [outputs] in the layer's dtype, and its bias. Kept turned, a row in one piece:
    what Inductor turns itself when it freezes a step, it does not keep beside what it has packed."""

    turned: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        whole, dtype = linear.weight.detach().float(), linear.weight.dtype
        least = whole.abs().amax(1) / MOST
        scale = least.to(dtype)
        scale = torch.where(scale.float() < least, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)  # a row's largest weight fits
        scale[scale == 0] = 1  # a row of zeros
        self.register_buffer("turned", (whole / scale.float()[:, None]).round_().to(torch.int8).t())
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        return self.turned.t()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        if near(x.device.type):
            out: Tensor = torch.ops.aten._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.weight, self.scale)
            out = out.view(*x.shape[:-1], len(self.scale))
        else:
            out = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return out if self.bias is None else out + self.bias


def quantised(module: Any, name: str) -> Any:
    """The module with all its linear layers in 8 bits, in place, the head included; embeddings and what else holds weights stay whole."""
    linear = {n: m for n, m in module.named_modules() if type(m) is nn.Linear and m.in_features % EVEN == 0}
    share = sum(m.weight.numel() for m in linear.values()) / max(sum(p.numel() for p in module.parameters()), 1)
    for path, layer in linear.items():
        module.set_submodule(path, QuantisedLinear(layer))
    if share < 0.5:
        log.warning("of the weights of %s no more than %d%% lie in linear layers and are quantised; the others stay whole", name, 100 * share)
    return module
