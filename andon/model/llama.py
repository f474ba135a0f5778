"""A Llama-shaped decoder. It knows nothing of ranks, slots or devices.

Modules carry Hugging Face's names, so a state dict is a checkpoint. A block has nine components: q, k, v, o, gate, up,
down and two norms. Shapes in comments: B windows, T tokens, H heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andon.model.layers import Embedding, Head, Linear, as_f32
from andon.model.shape import Shape


@dataclass(frozen=True)
class Kernels:
    """Functions that compiled blocks call on a GPU, for whole windows in training."""

    attend: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    """Causal attention with rotary positions: (queries, keys and values side by side, cos, sin, K) → B T H D."""
    product: Callable[..., Tensor]
    """(inputs, weights …) → the outputs, side by side."""
    gated: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(inputs, gate, up, down) → the feed-forward layer's output."""


class Cache:
    """Keys and values of the tokens seen so far, for sampling; `length` counts the tokens."""

    def __init__(self, model: "Llama", batch: int) -> None:
        shape = model.shape
        size = (2, shape.layers, batch, shape.kv_heads, shape.context, shape.head_dim)
        self.keys, self.values = torch.empty(size, device=model.cos.device, dtype=model.compute)
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values (B K T D); returns all so far."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class RMSNorm(nn.Module):
    """Scale by the root mean square, computed in f32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), as_f32(self.weight), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden)
        self.kernels: Kernels | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        if self.kernels and cache is None and torch.is_grad_enabled():
            return self._over_windows(x, cos, sin, self.kernels)
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim)  # B T H D
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)  # B T K D
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)  # B K T D
        q, k = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        y = attend(q, k, v)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _over_windows(self, x: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels) -> Tensor:
        """The same with less memory traffic: queries, keys and values stay side by side, as one product writes them."""
        batch, length, _ = x.shape
        heads = kernels.product(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        y = kernels.attend(heads.view(batch, length, -1, self.head_dim), cos, sin, self.kv_heads)
        return kernels.product(y.reshape(batch, length, -1), self.o_proj.weight)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; a single query sees all keys."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)  # B H T D
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)
        self.kernels: Kernels | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels and torch.is_grad_enabled():
            return self.kernels.gated(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = SwiGLU(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    """Blocks that follow each other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)


class Llama(nn.Module):
    """The language model: tokens to logits, or to the summed loss of given targets."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.compute = torch.float32
        """The dtype of hidden states and products; norms and the loss are always computed in f32."""
        self.stacks: list[Stack] = []
        """The compiled blocks, a few in each stack; empty if they are not compiled. Only training calls them."""
        self.model = Decoder(shape)
        self.lm_head = Head(shape.hidden, shape.vocab)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        cos, sin = rotations(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """B T tokens to hidden states; with a cache, the tokens follow those seen so far."""
        start = cache.length if cache else 0
        end = start + tokens.shape[1]
        if end > self.shape.context:
            raise ValueError(f"{end} tokens do not fit the context of {self.shape.context}")
        x = self.model.embed_tokens(tokens).to(self.compute)
        cos, sin = self.cos[start:end], self.sin[start:end]
        if cache is None and torch.is_grad_enabled():
            for part in self.stacks or self.model.layers:
                x = part(x, cos, sin)
        else:
            for block in self.model.layers:
                x = block(x, cos, sin, cache)
        if cache:
            cache.length = end
        out: Tensor = self.model.norm(x)
        return out

    @property
    def compiled(self) -> bool:
        """Whether training calls compiled blocks."""
        return bool(self.stacks)

    def logits(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """B T tokens to B T V logits."""
        out: Tensor = self.lm_head(self.hidden(tokens, cache))
        return out

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The cross entropy in nats, summed over all targets; a target of -100 does not count."""
        loss: Tensor = self.lm_head(self.hidden(tokens), targets)
        return loss

    def initialise(self, seed: int) -> None:
        """Draw all weights from `seed`: normal, std 0.02, smaller for the matrices that add to the residual."""
        generator = torch.Generator().manual_seed(seed)
        narrow = 0.02 / (2 * self.shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                width = narrow if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, width, generator=generator))
            else:
                parameter.data.fill_(1.0)

    def hold_weights_in(self, dtype: torch.dtype) -> None:
        """Convert only the weights: the rotary tables stay f32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)


def rotations(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, T x D."""
    frequency = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angle = torch.outer(torch.arange(shape.context, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of a head by its position's angle; `x` is B T H D, `cos` and `sin` are T D.

    It comes before the transpose to B H T D: `cat` returns contiguous memory, attention's output has the layout of its
    queries, and so the next layer needs no copy."""
    left, right = x.chunk(2, -1)
    half = left.shape[-1]
    cos, sin = cos[:, None, :half], sin[:, None, :half]  # the other half is the same
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
