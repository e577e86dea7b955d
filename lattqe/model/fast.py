"""Inference: the weights of `LAttQE`, equal to the module's within 1e-4 (float32), as fast as its matrix products.

Measured at the paper's size, what counts is to keep everything around the products small: batches of about a
thousand tokens (more do not make the products faster, and fall out of the cache), fused attention without a mask where
nothing is masked, in-place sums. Packed weights gained nothing over torch's own product. In the last encoder
nothing can be left out: the cosine needs q̃ and every d̃_i whole, and LayerNorm needs all columns of each.

For database rows the products of the first encoder are shared: W(d + p) = W d + W p, and W d is the same in all
(about k) lists a row appears in. `shared_rows` computes it once for each row.

int8 halves the time of the linear layers on CPUs, for a rounding that the weights hardly feel.
"""

import copy
import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from lattqe.errors import LattqeError
from lattqe.model.encoder import Encoder
from lattqe.model.gated import WholeList
from lattqe.model.network import LAttQE, LAttQEConfig

# Activations use 7 bits: CPUs without VNNI add pairs of products in 16 bits, and 2 × 127 × 127 is what fits there.
LEVELS = 63
ZERO = 64


class Int8Linear:
    """y = x Wᵀ + b with W in int8 (a scale for each output) and x in 7 bits (a scale for each row, found on the fly).

    A scale for each row, where torch's dynamic quantisation has one for the tensor: a row's result must not depend on
    the rows that happen to be computed with it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        if not hasattr(torch.ops.onednn, "qlinear_pointwise") or not torch.backends.mkldnn.is_available():
            raise LattqeError("precision int8 needs a torch built with oneDNN: use float32")
        weight = linear.weight.detach().float().cpu()
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        quantised = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(quantised, None)
        self.scale = scale
        self.zeros = torch.zeros(len(scale), dtype=torch.long)
        self.bias = None if linear.bias is None else linear.bias.detach().float().cpu()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (m, in) float32 to (m, out) float32."""
        size = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
        size /= LEVELS
        # Truncation of what is positive, half a step up, is rounding.
        rounded = torch.div(x, size).add_(ZERO + 0.5).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, ZERO, self.weight, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(size) if self.bias is None else torch.addcmul(self.bias, y, size)


PRECISIONS = ("float32", "int8", "half")
TOKENS = 1024  # tokens computed at once on a CPU: products at full speed, activations within the cache
TOKENS_OF_LISTS = 4096  # the same for relational networks, whose tokens are narrow
TOKENS_GPU = 16384  # enough work for a GPU, some hundred megabytes

Dense = Callable[[torch.Tensor], torch.Tensor]


class FastEncoder:
    """One encoder without autograd, on tokens (n * t, W)."""

    def __init__(self, encoder: Encoder, dense: Callable[[torch.nn.Linear], Dense]) -> None:
        self.encoder = encoder
        self.up, self.down = dense(encoder.up), dense(encoder.down)
        if encoder.has_attention:
            self.qkv, self.out = dense(encoder.qkv), dense(encoder.out)

    def __call__(
        self, x: torch.Tensor, n: int, bias: torch.Tensor | None, qkv: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tokens after this encoder; `bias` None: nothing is masked; `qkv` (n * t, 3 W) where it is already known."""
        encoder = self.encoder
        if encoder.has_attention:
            if qkv is None:
                qkv = self.qkv(encoder.norm_attention(x) if encoder.pre else x)
            q, k, v = qkv.view(n, len(x) // n, 3, encoder.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = self.out(mixed.transpose(1, 2).reshape(x.shape)).add_(x)
            if not encoder.pre:
                x = encoder.norm_attention(x)
        hidden = self.up(encoder.norm_ffn(x) if encoder.pre else x)
        hidden = F.relu_(hidden) if encoder.activation is F.relu else encoder.activation(hidden)
        x = self.down(hidden).add_(x)
        return x if encoder.pre else encoder.norm_ffn(x)


class FastLAttQE:
    """Weights of a trained network for many lists, batch by batch.

    precision: "float32"; "int8", linear layers with 8-bit weights (CPU); "half", everything in float16 (GPU).
    The network is moved to the device and set to eval mode, not copied; int8 and half keep its weights of that moment.
    """

    def __init__(self, network: LAttQE, precision: str = "float32", device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        check_precision(precision, self.device)
        self.precision = precision
        self.dtype = torch.float16 if precision == "half" else torch.float32
        self.config = network.config
        self.network = network.to(self.device).eval()
        self.head = self.network.head  # in float32 always: the cosines are where digits are lost
        if precision == "half" and not self.config.relational:
            self.network = copy.deepcopy(self.network).half()
        dense: Callable[[torch.nn.Linear], Dense] = Int8Linear if precision == "int8" else lambda linear: linear
        self._projected: dict[int, torch.Tensor] = {}
        self.encoders = [FastEncoder(cast(Encoder, encoder), dense) for encoder in self.network.stack.encoders]

    def weights(
        self,
        items: torch.Tensor,
        valid: torch.Tensor,
        dba: bool = False,
        shared: Callable[[slice], torch.Tensor] | None = None,
        k: int | None = None,
    ) -> torch.Tensor:
        """Weights (n, t) float32 of items (n, t, D) with valid (n, t) bool, as `LAttQE.forward` gives them.

        shared: for a slice of the lists, the rows of `shared_rows` of their items (n', t, S), in any float type.
        """
        self.network.check_width(items.shape[-1])
        if self.config.relational:
            return self._relational(items, valid, dba, k)
        n, t = items.shape[:2]
        most = max(1, (TOKENS_GPU if self.device.type == "cuda" else TOKENS) // t)
        step = math.ceil(n / math.ceil(n / most)) if n else 1  # batches of equal size, the last not a remnant
        result = torch.empty((n, t), dtype=torch.float32, device=self.device)
        with torch.inference_mode():
            for start in range(0, n, step):
                rows = slice(start, start + step)
                known = None if shared is None else shared(rows).to(self.device, self.dtype)
                result[rows] = self._batch(items[rows].to(self.dtype), valid[rows], dba, known)
        return result

    def _relational(self, items: torch.Tensor, valid: torch.Tensor, dba: bool, k: int | None) -> torch.Tensor:
        """The relational network as it is: its products are small beside the similarities, which stay in float32."""
        step = max(1, (TOKENS_GPU if self.device.type == "cuda" else TOKENS_OF_LISTS) // items.shape[1])
        parts = [torch.empty((0, items.shape[1]), device=self.device)]
        with torch.inference_mode():
            for rows in range(0, len(items), step):
                part = slice(rows, rows + step)
                parts.append(self.network(items[part].float(), valid[part], dba, k).weights)
        return torch.cat(parts)

    def weights_of_rows(self, items: torch.Tensor, valid: torch.Tensor, whole: WholeList) -> torch.Tensor:
        """Weights (n, t) of database rows' lists by a relational network, from the k vectors that are weighed, items
        (n, 1 + k, D), and what is known of the rest of their lists: as `weights` with dba gives from all vectors.
        """
        self.network.check_width(items.shape[-1])
        step = max(1, (TOKENS_GPU if self.device.type == "cuda" else TOKENS_OF_LISTS) // items.shape[1])
        parts = [torch.empty((0, items.shape[1]), device=self.device)]
        with torch.inference_mode():
            for start in range(0, len(items), step):
                part = slice(start, start + step)
                known = WholeList(*(each[part] for each in whole))
                parts.append(self.network.weigh(items[part], valid[part], known, dba=True)[0].weights)
        return torch.cat(parts)

    def _batch(self, items: torch.Tensor, valid: torch.Tensor, dba: bool, shared: torch.Tensor | None) -> torch.Tensor:
        n, t = items.shape[:2]
        width = self.config.token_width
        tokens = self.network.tokens
        relations, qkv = tokens.relations(items), None
        if shared is None:
            x = tokens(items, valid).tokens.reshape(n * t, width)
        else:
            content = items if self.config.width is None else shared[..., 3 * width :]
            x = (content + tokens.context(items)).view(n * t, width)
            qkv = (shared[..., : 3 * width] + self._project_positions(t)).view(n * t, 3 * width)
        everything = bool(valid.all())
        for fast in self.encoders:
            bias = None if everything and relations is None else fast.encoder.attention_bias(valid, relations)
            x = fast(x, n, bias, qkv)
            qkv = None
        transformed = self.network.stack.final(x).view(n, t, width).float()
        return self.head(transformed, valid, dba).weights

    @property
    def shared_width(self) -> int:
        """Floats a database row needs for sharing; 0 where this network has nothing to share."""
        return shared_width(self.config)

    def shared_rows(self, x: torch.Tensor) -> torch.Tensor:
        """What all lists share of database rows x (n, D): W d + b (and the token), (n, shared_width) float32."""
        if not self.shared_width:
            raise LattqeError("this network has nothing to share between lists: shared_width is 0, use expand")
        parts = [torch.empty((0, self.shared_width), device=self.device)]
        with torch.inference_mode():
            for block in x.to(self.device, self.dtype).split(TOKENS):
                content = self.network.tokens.content(block)
                qkv = self.encoders[0].qkv(content)
                parts.append((qkv if self.config.width is None else torch.cat([qkv, content], dim=1)).float())
        return torch.cat(parts)

    def _project_positions(self, t: int) -> torch.Tensor:
        """W p of the first encoder for the first t ranks, (t, 3 W): what sharing adds to W d + b."""
        if t not in self._projected:
            weight = self.encoders[0].encoder.qkv.weight
            positions = self.network.tokens.context(weight.new_empty(0, t, self.config.dim))
            self._projected[t] = F.linear(positions, weight)
        return self._projected[t]


def shared_width(config: LAttQEConfig) -> int:
    """Floats that all lists share of a database row; 0 where a network has nothing to share.

    3 W for q, k and v, and W more for the token itself where the vectors are projected. Pre-LN normalises d + p
    before the product, the similarity to the query differs from list to list, and without attention or content
    there is no such product: these share nothing.
    """
    c = config
    if c.direct or c.relational or c.norm != "post" or not c.attention or not c.visual or c.similarity:
        return 0
    return (3 if c.width is None else 4) * c.token_width


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that is unknown, or that the device computes slowly or not at all."""
    if precision not in PRECISIONS:
        raise LattqeError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if precision == "half" and device.type != "cuda":
        raise LattqeError("precision half needs a GPU: on a CPU use int8 or float32")
    if precision == "int8" and device.type != "cpu":
        raise LattqeError(f"precision int8 is for CPUs, not {device.type}: use half or float32")
