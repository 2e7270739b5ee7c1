"""A DFlash drafter in PyTorch with dense masks, written from the method's paper: the reference of the tiny cases."""

import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

FULL, SLIDING = "full_attention", "sliding_attention"
MASK = 95


def rms(x, weight, eps=1e-6):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def turn(x, cos, sin):
    """x [T, heads, h], half-split pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class Draft:
    """A DFlash drafter with dense masks: every block is computed from all of its context at once."""

    def __init__(self, target, spec, generator):
        self.target, self.spec = target, spec
        cfg = target.config
        self.dim, self.heads, self.kv, self.head, self.width = cfg.hidden_size, 4, 2, 12, 40
        self.types = spec.get("types", [FULL] * spec["layers"])
        self.window = spec.get("window")
        rope = {"rope_theta": 50000.0, **spec.get("rope", {"rope_type": "default"})}
        shape = {"hidden_size": self.dim, "num_attention_heads": self.heads, "num_key_value_heads": self.kv}
        config = AutoConfig.for_model(
            "qwen3", **shape, head_dim=self.head, rope_parameters=rope, max_position_embeddings=4096
        )
        self.rotary = Qwen3RotaryEmbedding(config)
        self.hf_rope = rope
        self.causal = [self.rule(kind) for kind in self.types]

        def make(*shape, scale=1.0):
            return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

        dim, ids = self.dim, spec["ids"]
        w = {"fc.weight": make(dim, len(ids) * dim)}
        w |= {n: 1 + 0.2 * torch.randn(dim, generator=generator) for n in ("hidden_norm.weight", "norm.weight")}
        for i in range(spec["layers"]):
            sizes = {"q": self.heads * self.head, "k": self.kv * self.head, "v": self.kv * self.head}
            at = f"layers.{i}."
            w |= {f"{at}self_attn.{n}_proj.weight": make(size, dim) for n, size in sizes.items()}
            w[f"{at}self_attn.o_proj.weight"] = make(dim, sizes["q"])
            w |= {f"{at}mlp.{n}_proj.weight": make(self.width, dim) for n in ("gate", "up")}
            w[f"{at}mlp.down_proj.weight"] = make(dim, self.width)
            if spec.get("bias"):
                sizes["o"] = dim
                w |= {
                    f"{at}self_attn.{n}_proj.bias": 0.3 * torch.randn(size, generator=generator)
                    for n, size in sizes.items()
                }
            for n in ("q", "k"):
                w[f"{at}self_attn.{n}_norm.weight"] = 1 + 0.2 * torch.randn(self.head, generator=generator)
            for n in ("input_layernorm", "post_attention_layernorm"):
                w[f"{at}{n}.weight"] = 1 + 0.2 * torch.randn(dim, generator=generator)
        self.w = w
        self.ids = None  # target ids of the reduced vocabulary

    def rule(self, kind):
        for name in ("is_causal", "causal"):
            if name in self.spec:
                return self.spec[name]
        return kind == SLIDING and not self.spec.get("non_causal", False)

    def linear(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def tables(self, positions):
        cos, sin = self.rotary(torch.zeros(1, 1), positions[None])
        return cos[0], sin[0]

    def keys_values(self, i, x, positions):
        at, n = f"layers.{i}.self_attn", len(positions)
        k = rms(self.linear(x, f"{at}.k_proj").view(n, self.kv, self.head), self.w[f"{at}.k_norm.weight"])
        return turn(k, *self.tables(positions)), self.linear(x, f"{at}.v_proj").view(n, self.kv, self.head)

    def context(self, features):
        return rms(self.linear(features, "fc"), self.w["hidden_norm.weight"])

    def block(self, features, tokens):
        """Residual after every layer [L, B, D], hidden, logits [B, V] of a block behind ``features`` [S, K * D]."""
        count, size = len(features), len(tokens)
        before, here = torch.arange(count), torch.arange(count, count + size)
        context, x, residuals = self.context(features), self.target.model.embed_tokens(torch.tensor(tokens)), []
        for i, kind in enumerate(self.types):
            at = f"layers.{i}"
            u = rms(x, self.w[f"{at}.input_layernorm.weight"])
            q = self.linear(u, f"{at}.self_attn.q_proj").view(size, self.heads, self.head)
            q = turn(rms(q, self.w[f"{at}.self_attn.q_norm.weight"]), *self.tables(here))
            parts = [self.keys_values(i, context, before), self.keys_values(i, u, here)]
            k, v = (
                torch.cat(pair).repeat_interleave(self.heads // self.kv, dim=1) for pair in zip(*parts, strict=True)
            )
            t, s = torch.cat([before, here])[None], here[:, None]
            seen = (t < count) | (t <= s if self.causal[i] else torch.ones_like(t <= s))
            if kind == SLIDING:
                seen = seen & (t > s - self.window)
            scores = torch.einsum("qhd,khd->hqk", q, k) / self.head**0.5
            weights = scores.masked_fill(~seen[None], -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(size, -1)
            x = x + self.linear(mixed, f"{at}.self_attn.o_proj")
            u = rms(x, self.w[f"{at}.post_attention_layernorm.weight"])
            gated = F.silu(self.linear(u, f"{at}.mlp.gate_proj")) * self.linear(u, f"{at}.mlp.up_proj")
            x = x + self.linear(gated, f"{at}.mlp.down_proj")
            residuals.append(x)
        hidden = rms(x, self.w["norm.weight"])
        logits = F.linear(hidden, self.target.lm_head.weight)
        if self.ids is not None:
            logits = torch.full_like(logits, -torch.inf).index_copy(1, self.ids, logits[:, self.ids])
        return torch.stack(residuals), hidden, logits

    def fit(self, texts, steps=150):
        """A moment of training on random blocks of the target's texts [(ids, features)]."""
        for weight in self.w.values():
            weight.requires_grad_()
        optimiser, generator = torch.optim.Adam(self.w.values(), 4e-3), torch.Generator().manual_seed(3)
        for _ in range(steps):
            loss = 0.0
            for ids, features in texts:
                anchor = int(torch.randint(9, len(ids) - 12, (), generator=generator))
                size = self.spec["block"] if self.spec["block"] > 4 else 8
                size = min(size, len(ids) - anchor)
                logits = self.block(features[:anchor], [ids[anchor], *[MASK] * (size - 1)])[2]
                labels = torch.tensor(ids[anchor + 1 : anchor + size])
                known = logits[1:].gather(1, labels[:, None])[:, 0] > -torch.inf
                if known.any():
                    loss = loss + F.cross_entropy(logits[1:][known], labels[known])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        self.w = {n: t.detach() for n, t in self.w.items()}

    def config(self, spec):
        """config.json of a drafter in one of its spellings."""
        hf = {
            "vocab_size": 96,
            "hidden_size": self.dim,
            "intermediate_size": self.width,
            "num_hidden_layers": spec["layers"],
        }
        hf |= {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "head_dim": self.head,
            "hidden_act": "silu",
        }
        hf |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "attention_bias": spec.get("bias", False)}
        hf |= {"model_type": "qwen3", "layer_types": self.types, "sliding_window": self.window}
        hf |= {"use_sliding_window": self.window is not None, "tie_word_embeddings": False}
        if spec.get("style") == "speculators":
            hf["rope_parameters"] = self.hf_rope
            return {
                "architectures": ["DFlashSpeculator"],
                "speculators_model_type": "dflash",
                "aux_hidden_state_layer_ids": [i + 1 for i in spec["ids"]],
                "block_size": spec["block"],
                "draft_vocab_size": spec["reduced"],
                "mask_token_id": MASK,
                "sample_from_anchor": False,
                "sliding_window_non_causal": spec.get("non_causal", False),
                "target_hidden_size": None,
                "transformer_layer_config": hf,
            }
        hf |= {"architectures": ["DFlashDraftModel"], "num_target_layers": self.target.config.num_hidden_layers}
        options = {"mask_token_id": MASK, "target_layer_ids": spec["ids"]}
        if spec.get("style") == "new":
            hf["rope_parameters"] = self.hf_rope
            options["block_size"] = spec["block"]
        else:
            scaling = {n: v for n, v in self.hf_rope.items() if n != "rope_theta"}
            hf |= {"rope_theta": self.hf_rope["rope_theta"], "block_size": spec["block"]}
            hf["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
        hf |= {"is_causal": spec["is_causal"]} if "is_causal" in spec else {}
        options |= {"causal": spec["causal"]} if "causal" in spec else {}
        return {**hf, "dflash_config": options}
