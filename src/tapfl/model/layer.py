"""A frozen transformer layer, taken from a layer of the transformers library.

The library's modules are kept as they are (so every weight, name and checkpoint is its own); what
is ours is the forward pass: packed projections, fused attention, masks, several streams at once,
LoRA and adapters. On a GPU the same steps run through kernels (``fast``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from tapfl.errors import TapflError
from tapfl.model.lora import Factors, branch

# What the library calls the parts of a layer, over the model families and its own versions.
_ROLES = {
    "query": ("attention.attention.query", "attention.self.query", "attention.q_proj",
              "attention.q_lin"),
    "key": ("attention.attention.key", "attention.self.key", "attention.k_proj",
            "attention.k_lin"),
    "value": ("attention.attention.value", "attention.self.value", "attention.v_proj",
              "attention.v_lin"),
    "out": ("attention.output.dense", "attention.o_proj", "attention.out_lin"),
    "up": ("intermediate.dense", "mlp.fc1", "ffn.lin1"),
    "down": ("output.dense", "mlp.fc2", "ffn.lin2"),
}
_PRE_NORM = {"norm1": ("layernorm_before", "norm1"), "norm2": ("layernorm_after", "norm2")}
_POST_NORM = {"norm1": ("attention.output.LayerNorm", "sa_layer_norm"),
              "norm2": ("output.LayerNorm", "output_layer_norm")}


MAX_COLUMNS = 64  # of LoRA, for one branch; the kernels are made for small ranks
Packed = tuple[Tensor, Tensor | None]  # the weight and bias of query, key and value


@dataclass(frozen=True)
class Residual:
    """Tokens ``(streams, batch, tokens, width)`` as a sum that is still to be taken.

    What a layer adds stays apart: the next one takes the sum together with its norm. ``added`` may
    have more streams than ``x``: they branch. Where the kernels compute a layer whose norm comes
    after the sum, that ``norm`` is still to be taken, too.
    """

    x: Tensor
    added: Tensor | None = None
    norm: nn.LayerNorm | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the sum."""
        return self.x.shape if self.added is None else self.added.shape

    def total(self) -> Tensor:
        """Return the sum, after its norm."""
        if self.added is None:
            return self.x
        if self.norm is not None:
            from tapfl.model import fast

            return fast.total(self)
        return branch(self.x, self.added.shape[0] // self.x.shape[0]) + self.added

    def first(self) -> Tensor:
        """Return the first stream of the sum."""
        added = None if self.added is None else self.added[:1]
        return Residual(self.x[:1], added, self.norm).total()[0]


@dataclass(frozen=True)
class Keys:
    """Which keys a query may attend to.

    ``mask (batch, tokens)`` is true on real tokens; None means that nothing is padded. Of
    ``streams``, the first ``privates`` attend within a modality only: the tokens before ``cut``, or
    those from there on.
    """

    mask: Tensor | None = None
    cut: int = 0
    privates: int = 0

    def dense(self, streams: int, like: Tensor) -> Tensor | None:
        """Return the mask in full, for the library's kernels; broadcasts over the heads."""
        real = None if self.mask is None else self.mask[None, :, None, None, :]
        if not self.privates:
            return real
        late = torch.arange(like.shape[2], device=like.device) >= self.cut
        own = ~(late[:, None] ^ late[None, :])  # torch.compile cannot compare booleans
        shared = torch.arange(streams, device=like.device) >= self.privates
        may = own[None, None, None] | shared[:, None, None, None, None]
        return may if real is None else may & real


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward network over ``(streams, batch, tokens, width)``.

    ``prefix`` is the layer's path in the library's model; with it ``names`` says where the query
    and value projections are.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    up: nn.Linear
    down: nn.Linear
    norm1: nn.LayerNorm
    norm2: nn.LayerNorm

    def __init__(self, source: nn.Module, config: Any, prefix: str) -> None:
        super().__init__()
        modules = dict(source.named_modules())
        self.names: dict[str, str] = {}
        self.pre_norm = any(name in modules for name in _PRE_NORM["norm1"])
        for role, candidates in (_ROLES | (_PRE_NORM if self.pre_norm else _POST_NORM)).items():
            name = next((c for c in candidates if c in modules), None)
            if name is None:
                raise TapflError(
                    f"{config.model_type}: its layers have no {role} that tapfl supports; expected "
                    "a ViT-like image encoder or a BERT-like text encoder"
                )
            self.names[role] = f"{prefix}.{name}"
            self.add_module(role, modules[name])
        _fold(modules.get("layer_scale1"), self.out)
        _fold(modules.get("layer_scale2"), self.down)
        act = getattr(config, "hidden_act", None) or config.activation
        self.activation = ACT2FN[act]
        self.heads = int(config.num_attention_heads)
        # Whether kernels support layers of this kind, and what is to be used.
        self.suits_kernels = act == "gelu"
        self.fast = self.compiled = self.checkpointing = False
        self._packed: Packed | None = None

    @property
    def width(self) -> int:
        """Size of a token."""
        return int(self.out.weight.shape[0])

    @property
    def hidden(self) -> int:
        """Size of the feed-forward network's inner layer."""
        return int(self.up.weight.shape[0])

    def packed(self) -> Packed:
        """Return query, key and value as one weight and bias; the library's become views of it."""
        parts = (self.query, self.key, self.value)
        trains = any(p.weight.requires_grad for p in parts)  # in pre-training, with every step
        if not trains and self._packed is not None and (
                self._packed[0].data_ptr() == self.query.weight.data_ptr()):
            return self._packed  # neither moved nor cast since; captured steps read it
        weight = torch.cat(tuple(p.weight for p in parts))
        # Some models have no bias on the key, or none at all.
        biases = (weight.new_zeros(self.width) if p.bias is None else p.bias for p in parts)
        bias = None if self.query.bias is None else torch.cat(tuple(biases))
        if not trains:
            for index, part in enumerate(parts):
                part.weight.data = weight.chunk(3)[index]
                if bias is not None and part.bias is not None:
                    part.bias.data = bias.chunk(3)[index]
            self._packed = weight, bias
        return weight, bias

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the layer's output as the library computes it, ``(batch, tokens, width)``."""
        tokens = self.attend(Residual(x.unsqueeze(0)), Keys(mask))
        return self.feed_forward(tokens).first()

    def attend(self, tokens: Residual, keys: Keys, lora: Factors | None = None) -> Residual:
        """Self-attention; LoRA acts on the packed query, key and value."""
        return self._run("attend", tokens, keys, lora, self.packed())

    def _attend(self, tokens: Residual, keys: Keys, lora: Factors | None,
                packed: Packed) -> Residual:
        x = tokens.total()
        h = self.norm1(x) if self.pre_norm else x
        qkv = lora.linear(h, *packed) if lora else F.linear(h, *packed)
        out = self.out(attend_packed(qkv, keys, self.heads))
        return self._residual(x, out, self.norm1)

    def feed_forward(
        self, tokens: Residual, up: Factors | None = None, down: Factors | None = None,
        adapter: Callable[[Tensor], Tensor] | None = None,
    ) -> Residual:
        """Feed-forward network; ``adapter`` acts on the network's output."""
        return self._run("feed_forward", tokens, up, down, adapter)

    def _feed_forward(self, tokens: Residual, up: Factors | None, down: Factors | None,
                      adapter: Callable[[Tensor], Tensor] | None) -> Residual:
        x = tokens.total()
        h = self.norm2(x) if self.pre_norm else x
        inner = up.linear(h, self.up.weight, self.up.bias) if up else self.up(h)
        inner = self.activation(inner)
        out = down.linear(inner, self.down.weight, self.down.bias) if down else self.down(inner)
        if adapter is not None:
            out = adapter(out)
        return self._residual(x, out, self.norm2)

    def _run(self, step: str, tokens: Residual, *arguments: Any) -> Residual:
        """Do a step as the layer is set to: through kernels, compiled, or as it is."""
        quick = self.fast and not _too_many_columns(arguments)
        function = functools.partial(self._way(step, quick), self)
        if tokens.norm is not None and not (quick and not self.pre_norm):
            tokens = Residual(tokens.total())
        if not self.checkpointing or not torch.is_grad_enabled():
            return function(tokens, *arguments)
        norm = tokens.norm

        def again(x: Tensor, added: Tensor | None) -> Residual:
            return function(Residual(x, added, norm), *arguments)

        # The kernels draw dropout from seeds and need no generator to be restored.
        out: Residual = checkpoint(again, tokens.x, tokens.added, use_reentrant=False,
                                   preserve_rng_state=not quick)
        return out

    def _way(self, step: str, quick: bool) -> Callable[..., Residual]:
        if quick:
            from tapfl.model import fast

            kernels: Callable[..., Residual] = getattr(fast, step)
            return kernels
        plain: Callable[..., Residual] = getattr(TransformerLayer, f"_{step}")
        return _compiled(plain) if self.compiled else plain

    def _residual(self, x: Tensor, out: Tensor, norm: nn.Module) -> Residual:
        residual = Residual(x, out)
        return residual if self.pre_norm else Residual(norm(residual.total()))


@torch.no_grad()
def _fold(scale: nn.Module | None, linear: nn.Linear) -> None:
    """Multiply a frozen layer by the scale that DINOv2 puts after it, and set that to one."""
    factor = getattr(scale, "lambda1", None)
    if factor is not None:
        linear.weight.mul_(factor[:, None])
        linear.bias.mul_(factor)
        factor.fill_(1.0)


def _too_many_columns(arguments: Sequence[Any]) -> bool:
    return any(isinstance(a, Factors) and a.a.shape[1] > MAX_COLUMNS for a in arguments)


@functools.cache
def _compiled(function: Callable[..., Residual]) -> Callable[..., Residual]:
    """Compile once for all layers and shapes."""
    # Streams, branches, segments and gradients make a few dozen variants, all of them needed.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=True)


def attend_packed(qkv: Tensor, keys: Keys, heads: int) -> Tensor:
    """Multi-head attention from ``(streams, batch, tokens, 3 width)``, by the library's kernels."""
    streams, batch, tokens, packed = qkv.shape
    q, k, v = qkv.reshape(streams * batch, tokens, 3, heads, -1).transpose(1, 3).unbind(2)
    mask = keys.dense(streams, qkv)
    if mask is not None:
        # SDPA's kernels take one batch axis.
        mask = mask.expand(streams, batch, *mask.shape[2:]).flatten(0, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(streams, batch, tokens, packed // 3)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: int) -> Tensor:
    """Multi-head attention of queries to other tokens' keys, ``(batch, tokens, width)``."""
    def split(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    out = F.scaled_dot_product_attention(split(q), split(k), split(v), attn_mask=mask)
    return out.transpose(1, 2).flatten(2)
