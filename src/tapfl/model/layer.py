"""A frozen transformer layer, taken from a layer of the transformers library.

The library's modules are kept as they are (so every weight, name and checkpoint is its own); what
is ours is the forward pass: fused attention, masks, several streams at once, LoRA and adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tapfl.errors import TapflError
from tapfl.model.lora import Routing, branch

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


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward network over ``(streams, batch, tokens, width)``.

    ``prefix`` is the layer's path in the library's model; with it ``names`` tells where the query
    and value projections stand there.
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
                    f"{config.model_type}: its layers have no {role} that tapfl knows; expected "
                    "a ViT-like image encoder or a BERT-like text encoder"
                )
            self.names[role] = f"{prefix}.{name}"
            self.add_module(role, modules[name])
        self.scale1 = getattr(modules.get("layer_scale1"), "lambda1", None)
        self.scale2 = getattr(modules.get("layer_scale2"), "lambda1", None)
        self.activation = ACT2FN[getattr(config, "hidden_act", None) or config.activation]
        self.heads = int(config.num_attention_heads)

    @property
    def width(self) -> int:
        """Size of a token."""
        return int(self.out.weight.shape[0])

    @property
    def hidden(self) -> int:
        """Size of the feed-forward network's inner layer."""
        return int(self.up.weight.shape[0])

    def attend(self, x: Tensor, mask: Tensor | None, lora: Routing | None = None) -> Tensor:
        """Self-attention with its residual.

        ``mask`` is boolean, true where a token may be attended to, and broadcasts over
        ``(streams, batch, heads, tokens, tokens)``.
        """
        h = self.norm1(x) if self.pre_norm else x
        q, k, v = self.query(h), self.key(h), self.value(h)
        if lora is not None:
            dropped = lora.drop(h)
            q, v = lora.add(q, dropped, "query"), lora.add(v, dropped, "value")
            branches = q.shape[0] // x.shape[0]
            k, x = branch(k, branches), branch(x, branches)
        out = self.out(attention(q, k, v, mask, self.heads))
        return self._residual(x, out, self.norm1, self.scale1)

    def feed_forward(
        self, x: Tensor, up: Routing | None = None, down: Routing | None = None,
        adapter: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Feed-forward network with its residual; ``adapter`` acts on the network's output."""
        h = self.norm2(x) if self.pre_norm else x
        inner = self.up(h)
        if up is not None:
            inner = up.add(inner, up.drop(h), "up")
            x = branch(x, inner.shape[0] // x.shape[0])
        inner = self.activation(inner)
        out = self.down(inner)
        if down is not None:
            out = down.add(out, down.drop(inner), "down")
        if adapter is not None:
            out = adapter(out)
        return self._residual(x, out, self.norm2, self.scale2)

    def _residual(self, x: Tensor, out: Tensor, norm: nn.Module, scale: Tensor | None) -> Tensor:
        if scale is not None:
            out = out * scale
        result: Tensor = x + out if self.pre_norm else norm(x + out)
        return result


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: int) -> Tensor:
    """Multi-head attention over the last two axes; any number of leading ones."""
    lead, width = q.shape[:-2], q.shape[-1]

    def split(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-2], heads, width // heads).transpose(1, 2)

    if mask is not None:
        # SDPA's kernels take one batch axis.
        mask = mask.expand(*lead, *mask.shape[len(lead):]).flatten(0, len(lead) - 1)
    out = F.scaled_dot_product_attention(split(q), split(k), split(v), attn_mask=mask)
    return out.transpose(1, 2).reshape(*lead, q.shape[-2], width)
