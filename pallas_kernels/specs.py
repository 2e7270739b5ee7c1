"""Named shapes of the ops: what benchmarks time and tuning tunes.

The shapes are those of decode steps and prefill chunks of published models (Qwen3-8B and 4B and Llama-3.1-8B share
their K/V shapes) at the contexts that engines see.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """A ``block_attention``: ``rows`` rows of ``block`` queries, each row behind ``context`` cached tokens;
    ``kv_heads`` KV heads with ``group`` query heads each."""

    name: str
    rows: int
    block: int
    context: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page: int = 16
    causal: bool = True
    window: int | None = None
    dtype: str = "bfloat16"

    @property
    def cached(self) -> int:
        """Cached tokens of a row that a query may see, at most."""
        if self.window is None:
            return self.context
        return min(self.context, self.window - 1)

    @property
    def pool_values(self) -> int:
        """Numbers of K and V that must be read from the pages."""
        return 2 * self.rows * self.cached * self.kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """Numbers that must be moved: pages, K and V in hand, queries, output."""
        in_hand = 2 * self.rows * self.block * self.kv_heads * self.head_dim
        return self.pool_values + in_hand * (1 + self.group)

    @property
    def flops(self) -> float:
        """Operations of both products, over the keys that queries see."""
        seen = self.cached + (self.block + 1) / 2 if self.causal else self.cached + self.block
        return 4.0 * self.rows * self.block * self.kv_heads * self.group * self.head_dim * seen


@dataclass(frozen=True)
class InjectSpec:
    """An ``inject_kv`` of ``tokens`` tokens into ``layers`` layers; ``raw`` keys need their norm and rotation."""

    name: str
    tokens: int
    layers: int
    kv_heads: int = 8
    head_dim: int = 128
    raw: bool = False
    dtype: str = "bfloat16"

    @property
    def values(self) -> int:
        """Numbers that must be moved: every row is read and written."""
        return 2 * self.tokens * self.layers * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LinearSpec:
    """A ``linear`` of ``tokens`` tokens; with ``norm`` a ``linear_and_norm`` onto a residual."""

    name: str
    tokens: int
    features: int
    columns: int
    gated: bool = False
    norm: bool = False
    dtype: str = "bfloat16"

    @property
    def weights(self) -> int:
        """Numbers of the weight."""
        return self.features * self.columns * (2 if self.gated else 1)

    @property
    def values(self) -> int:
        """Numbers that must be moved: weight, input, output; the residual, and the norm's."""
        return self.weights + self.tokens * (self.features + self.columns * (3 if self.norm else 1))

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.tokens * self.weights


QWEN3_8B, SMOLLM2 = (8, 4, 128), (3, 3, 64)  # KV heads, query heads of each, head_dim


def decoding(
    model: str, rows: int, context: int, blocks: tuple[int, ...], shape: tuple[int, int, int] = QWEN3_8B
) -> tuple[AttentionSpec, ...]:
    """The same rows with several blocks."""
    return tuple(AttentionSpec(f"{model} {rows}x{context} T{t}", rows, t, context, *shape) for t in blocks)


DECODE = (
    *decoding("8b", 1, 1024, (1, 16)),
    *decoding("8b", 1, 32768, (1, 8, 16)),
    *decoding("8b", 8, 1024, (1, 16)),
    *decoding("8b", 8, 8192, (1, 16)),
    *decoding("8b", 32, 1024, (1, 8, 16)),
    *decoding("8b", 32, 8192, (1, 8, 16)),
    *decoding("smollm2", 1, 1024, (1, 16), SMOLLM2),
    *decoding("smollm2", 32, 1024, (1, 8, 16), SMOLLM2),
)
DRAFT = (  # a drafter's block sees all of itself
    AttentionSpec("draft 1x1024 T16", 1, 16, 1024, causal=False),
    AttentionSpec("draft 32x1024 T16", 32, 16, 1024, causal=False),
)
WINDOW = (AttentionSpec("8b 32x8192 T16 W1024", 32, 16, 8192, window=1024),)
PREFILL = (
    AttentionSpec("8b prefill 2048 at 0", 1, 2048, 0),
    AttentionSpec("8b prefill 2048 at 2048", 1, 2048, 2048),
    AttentionSpec("smollm2 prefill 2048 at 0", 1, 2048, 0, *SMOLLM2),
)
INJECT = tuple(
    InjectSpec(f"{layers} {'raw' if raw else 'finished'} x {n}", n, layers, raw=raw)
    for layers, raw in ((5, True), (36, False), (1, False))
    for n in (16, 64, 256, 512, 2048)
)


def decoder_maps(model: str, tokens: int, dim: int, width: int, heads: int, qkv: int) -> tuple[LinearSpec, ...]:
    """The four maps of a decoder layer."""
    return (
        LinearSpec(f"{model} qkv x {tokens}", tokens, dim, qkv),
        LinearSpec(f"{model} o x {tokens}", tokens, heads, dim, norm=True),
        LinearSpec(f"{model} gate_up x {tokens}", tokens, dim, width, gated=True),
        LinearSpec(f"{model} down x {tokens}", tokens, width, dim, norm=True),
    )


LINEAR = tuple(
    spec
    for tokens in (16, 32)
    for spec in (
        *decoder_maps("8b", tokens, 4096, 12288, 4096, 6144),
        LinearSpec(f"8b fc x {tokens}", tokens, 5 * 4096, 4096, norm=True),
        LinearSpec(f"8b context x {tokens}", tokens, 4096, 5 * 2048),
        *decoder_maps("4b", tokens, 2560, 9728, 4096, 6144),
        *decoder_maps("smollm2", tokens, 576, 1536, 576, 960),
    )
)
SMALL = (  # what a CPU can time
    AttentionSpec("small 2x64 T1", 2, 1, 64, *SMOLLM2),
    AttentionSpec("small 2x64 T4", 2, 4, 64, *SMOLLM2),
    AttentionSpec("small 2x64 T4 full W16", 2, 4, 64, *SMOLLM2, causal=False, window=16),
    InjectSpec("small 2 raw x 8", 8, 2, 3, 64, raw=True),
    InjectSpec("small 2 finished x 8", 8, 2, 3, 64),
    LinearSpec("small gated x 4", 4, 64, 48, gated=True),
    LinearSpec("small norm x 4", 4, 48, 64, norm=True),
)
SETS: dict[str, tuple[AttentionSpec | InjectSpec | LinearSpec, ...]] = {
    "decode": DECODE,
    "draft": DRAFT,
    "window": WINDOW,
    "prefill": PREFILL,
    "inject": INJECT,
    "linear": LINEAR,
    "small": SMALL,
}
