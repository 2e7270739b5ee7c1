"""How the engine runs, as one frozen value."""

from dataclasses import dataclass

from serving.options import check_kinds


@dataclass(frozen=True)
class EngineConfig:
    """Options of ``LLM``; unknown ones raise.

    dtype: "auto" (as the target's files), "float32" or "bfloat16". block_size: tokens a round, the anchor included
    (None: up to the drafter's trained size, by what pays; 1: drafting off). max_model_len: prompt + output tokens
    (None: the target's max_position_embeddings). max_num_seqs: rows decoded together. page_size: tokens a K/V page.
    num_pages: of the pool (None: what max_num_seqs rows of max_model_len tokens need, if memory has it); a pool of less
    than max_model_len tokens ends prompts and outputs earlier.
    prefill_chunk: prompt tokens a prefill step, over all rows. prefix_cache: keep the K/V of finished requests for
    prompts that begin alike. overlap: plan a step while the one before runs. kernels: "auto" or an implementation of
    ``pallas_kernels``. seed: of requests that bring none (None: fresh noise every call). tensor_parallel_size: devices
    that share the model.
    """

    dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    page_size: int = 16
    num_pages: int | None = None
    prefill_chunk: int = 512
    prefix_cache: bool = True
    overlap: bool = True
    kernels: str = "auto"
    seed: int | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        sizes = ("block_size", "max_model_len", "max_num_seqs", "page_size", "num_pages", "prefill_chunk")
        optional = ("block_size", "max_model_len", "num_pages", "seed")
        whole = (*sizes, "seed", "tensor_parallel_size")
        check_kinds(self, whole=whole, flags=("prefix_cache", "overlap"), optional=optional)
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        for name in (*sizes, "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
