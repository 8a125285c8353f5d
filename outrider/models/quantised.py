"""Linear layers whose weights are integers: of 8 bits, each row with a scale of its own, half the bytes of bfloat16 that a step has to fetch, or of 4
bits, 32 inputs of a row with a scale and a zero of their own, a third of them. Multiplied as they are by torch's own products, and by the house's in
compiled steps (`microkernel`, `four_bits`)."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.sampling import near
from outrider.models.four_bits import BLOCK, GROUP, MARK

MOST = 127  # of a weight's size, in units of its row's scale
EVEN = 32  # inputs of a layer divide by it: torch's product reads so many at once, beyond a row's end if need be
PIECE = 256  # rows that are rounded at a time, in float32; a multiple of BLOCK
log = logging.getLogger("outrider")


class QuantisedLinear(nn.Module):
    """A linear layer in 8 bits. turned int8 [inputs, outputs], each output's in one piece: what Inductor turns itself when it freezes a step, it does
    not keep beside what it has packed. scale [outputs] in the layer's dtype; weight: as others read it."""

    KEPT = READ = 1.0  # bytes a weight on disk, and of a step

    def __init__(self, linear: nn.Linear, held: dict[str, Tensor] | None = None) -> None:
        """held: what `rounded` made of it before."""
        super().__init__()
        held = held or self.rounded(linear)
        self.turned, self.scale = (nn.Parameter(x, requires_grad=False) for x in (held["rounded"].t(), held["scale"]))
        self.bias, self.out_features = linear.bias, linear.out_features

    @staticmethod
    def rounded(linear: nn.Linear) -> dict[str, Tensor]:
        whole = linear.weight.detach()
        rounded, scale = whole.new_empty(whole.shape, dtype=torch.int8), whole.new_empty(len(whole))
        for at in range(0, len(whole), PIECE):
            rounded[at : at + PIECE], scale[at : at + PIECE] = _rounded(whole[at : at + PIECE].float(), whole.dtype)
        return {"rounded": rounded, "scale": scale}

    @staticmethod
    def fit(linear: nn.Linear, held: dict[str, Tensor]) -> bool:
        """May `rounded` have made this of such a layer? No scale is 0, which is what a disk gives that has lost what was written."""
        return _shapes(held) == {"rounded": linear.weight.shape, "scale": linear.weight.shape[:1]} and bool((held["scale"] != 0).all())

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


def _shapes(held: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in held.items()}


def _rounded(whole: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of float32 as integers and scales; a scale is rounded up, so that a row's largest weight fits."""
    least = whole.abs().amax(1) / MOST
    scale = least.to(dtype)
    scale = torch.where(scale.float() < least, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale[scale == 0] = 1  # a row of zeros
    return (whole / scale.float()[:, None]).round_(), scale


class FourBits(nn.Module):
    """A linear layer in 4 bits: a weight is (number - 8) * scale + zero. blocks uint8 [outputs, inputs / 2] and scales bfloat16 [inputs / 32, outputs, 2]
    as the house's product reads them, from end to end (that is the shape torch asks for, and not how they lie); packed and packed_scales the same as
    torch's does; weight: as others read it. What is multiplied is rounded, too: by torch to bfloat16, by the house to 8 bits, 32 inputs at a time.
    `built`: a step with the house's product is being built."""

    packed: Tensor
    packed_scales: Tensor
    KEPT, READ = 10 / 8, 5 / 8  # what is packed is for eager steps alone

    def __init__(self, linear: nn.Linear, held: dict[str, Tensor] | None = None) -> None:
        """held: what `rounded` made of it before."""
        super().__init__()
        held = held or self.rounded(linear)
        self.blocks, self.scales = (nn.Parameter(held[name], requires_grad=False) for name in ("blocks", "scales"))
        for name in ("packed", "packed_scales"):
            self.register_buffer(name, held[name], persistent=False)
        self.bias, self.dtype, self.built = linear.bias, linear.weight.dtype, False

    @staticmethod
    def rounded(linear: nn.Linear) -> dict[str, Tensor]:
        whole = linear.weight.detach()
        numbers, scales = torch.empty(whole.shape, dtype=torch.uint8), torch.empty(len(whole), whole.shape[1] // GROUP, 2, dtype=torch.bfloat16)
        for at in range(0, len(whole), PIECE):
            numbers[at : at + PIECE], scales[at : at + PIECE] = _rounded_by_group(whole[at : at + PIECE].float())
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
        by_group = scales.transpose(0, 1).contiguous()
        return {"blocks": _in_blocks(numbers), "scales": _beside_blocks(by_group), "packed": packed, "packed_scales": by_group}

    @staticmethod
    def fit(linear: nn.Linear, held: dict[str, Tensor]) -> bool:
        """As of 8 bits."""
        outputs, inputs = linear.weight.shape
        numbers, scales = (outputs, inputs // 2), (inputs // GROUP, outputs, 2)
        wanted = {"blocks": numbers, "scales": scales, "packed": numbers, "packed_scales": scales}
        return _shapes(held) == wanted and bool((held["scales"][..., 0] != 0).all())

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], in the dtype of the layer that it was: made when it is asked for."""
        numbers = _of_blocks(self.blocks).unflatten(1, (-1, GROUP))
        scale, zero = _by_output(self.scales).float().split(1, -1)
        whole: Tensor = (numbers.float() - 8) * scale + zero
        return whole.flatten(1).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        rows, product = x.reshape(-1, x.shape[-1]), torch.ops.aten._weight_int4pack_mm_for_cpu
        if self.built:
            out: Tensor = product(rows, self.blocks, MARK, self.scales)
        else:
            out = product(rows.bfloat16(), self.packed, GROUP, self.packed_scales).to(x.dtype)
        out = out.view(*x.shape[:-1], len(self.blocks))
        return out if self.bias is None else out + self.bias


@contextlib.contextmanager
def house_products(module: nn.Module, on: bool) -> Iterator[None]:
    """Steps that are exported meanwhile have the house's products of weights in 4 bits, if `on`; else torch's, of what it has packed."""
    layers = [part for part in module.modules() if isinstance(part, FourBits)]
    for layer in layers:
        layer.built = on
    try:
        yield
    finally:
        for layer in layers:
            layer.built = False


def inexact(module: nn.Module) -> bool:
    """Does it round what it multiplies?"""
    return any(isinstance(part, FourBits) for part in module.modules())


def _in_blocks(numbers: Tensor) -> Tensor:
    """uint8 [outputs, inputs] -> [outputs, inputs / 2]: by 16 outputs, by 4 inputs; the later eight of the outputs lie in the upper four bits."""
    halves = numbers.view(-1, 2, BLOCK // 2, numbers.shape[1] // 4, 4).transpose(2, 3)
    return (halves[:, 0] | halves[:, 1] << 4).reshape(len(numbers), -1)


def _of_blocks(blocks: Tensor) -> Tensor:
    """The way back."""
    both = blocks.view(-1, blocks.shape[1] // 2, BLOCK // 2, 4)
    return torch.stack([both & 15, both >> 4], 1).transpose(2, 3).reshape(len(blocks), -1)


def _beside_blocks(scales: Tensor) -> Tensor:
    """[groups, outputs, 2], in the same shape as their blocks are read: by 16 outputs, by group. Lines of one page each, as far apart as a row of groups
    is long, would drive one another out of the cache. Always a copy: of a single group both orders are one, and no file holds a tensor twice."""
    return scales.view(len(scales), -1, BLOCK, 2).transpose(0, 1).clone(memory_format=torch.contiguous_format).view(scales.shape)


def _by_output(scales: Tensor) -> Tensor:
    """The way back, to [outputs, groups, 2]."""
    return scales.view(-1, len(scales), BLOCK, 2).transpose(1, 2).reshape(scales.shape[1], len(scales), 2)


def _rounded_by_group(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of float32 as numbers from 0 to 15, and [rows, groups, 2] scales and zeros: of each group the better of two ways, by its largest and its
    least, or by the larger of them alone and no zero, as Q4_0 does, whose numbers are found again."""
    groups = whole.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    between, alone = (
        _fitted(groups, (high - low) / 15, low + (high - low) * (8 / 15)),
        _fitted(groups, torch.where(high > -low, high, low) / -8, 0 * low),
    )
    better = between[2] <= alone[2]
    return torch.where(better[..., None], between[0], alone[0]).flatten(1), torch.where(better[..., None], between[1], alone[1]).bfloat16()


def _fitted(groups: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers by a scale and a zero; twice those that fit the numbers best (least squares), and the numbers anew. -> numbers, [..., 2] both, how far the
    weights are off."""
    mean = groups.mean(-1)
    for more in (True, True, False):
        scale, zero = scale.bfloat16().float(), zero.bfloat16().float()
        scale[scale == 0] = 1  # a group of equals
        numbers = ((groups - zero[..., None]) / scale[..., None]).round_().clamp_(-8, 7)
        if more:
            middle = numbers.mean(-1)
            apart = numbers - middle[..., None]
            spread = apart.square().sum(-1)
            scale = torch.where(spread > 0, (apart * groups).sum(-1) / spread, scale)
            zero = mean - scale * middle
    off = (numbers * scale[..., None] + zero[..., None] - groups).square().sum(-1)
    return numbers + 8, torch.stack([scale, zero], -1), off


Layer = type[QuantisedLinear] | type[FourBits]
Held = dict[str, Tensor]
Keeper = Callable[[str, Callable[[], Held], Callable[[Held], bool]], Held]  # a layer's integers, by its name, what makes them and what knows them


def layers_of(module: Any, kind: str) -> dict[str, Layer]:
    """What each linear layer becomes, by its name. The head is of 8 bits in any case, and so is what does not divide into blocks of 4 bits; layers of other
    than multiples of 32 inputs stay whole."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return {
        name: FourBits if kind == "int4" and layer is not head and layer.out_features % BLOCK == 0 else QuantisedLinear
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and layer.in_features % EVEN == 0
    }


def kept_bytes(module: Any, kind: str) -> int:
    """Of the integers of all layers."""
    return sum(int(module.get_submodule(name).weight.numel() * made.KEPT) for name, made in layers_of(module, kind).items())


def held_bytes(module: Any, kind: str, each: int, kept: bool) -> int:
    """Of all weights, when the module is quantised: as compiled steps read them, and the embedding; of integers that are not kept on disk all. Each number
    that stays whole has `each`. Needs no weights."""
    layers = {module.get_submodule(name): made.READ if kept else made.KEPT for name, made in layers_of(module, kind).items()}
    whole = {p for part in module.modules() for n, p in part.named_parameters(recurse=False) if part not in layers or n != "weight"}
    less: int = sum(int(part.weight.numel() * size) for part, size in layers.items())
    return less + each * sum([int(p.numel()) for p in whole])


def quantised(module: Any, name: str, kind: str, keep: Keeper | None = None) -> Any:
    """The module with its linear layers in 8 or 4 bits, in place and one after the other, their integers made anew or as they are kept. Embeddings and what
    else holds weights stay whole, which is said where it is most of the model."""
    layers, numbers = layers_of(module, kind), sum(p.numel() for p in module.parameters())
    share = sum(module.get_submodule(path).weight.numel() for path in layers) / max(numbers, 1)
    for path, made in layers.items():
        layer = module.get_submodule(path)
        held = keep(path, functools.partial(made.rounded, layer), functools.partial(made.fit, layer)) if keep else None
        module.set_submodule(path, made(layer, held))
    if share < 0.5:
        log.warning("of the weights of %s no more than %d%% lie in linear layers and are quantised; the others stay whole", name, 100 * share)
    return module
