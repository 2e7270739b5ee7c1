"""How the engine runs, as one frozen value."""

from dataclasses import dataclass

from serving.options import check_kinds


@dataclass(frozen=True)
class EngineConfig:
    """Options of ``LLM``; unknown ones raise.

    dtype: "auto" (as the target's files), "float32" or "bfloat16". block_size: tokens a round, the anchor included
    (None: the drafter's trained size; 1: drafting off). max_model_len: prompt + output tokens (None: the target's
    max_position_embeddings). max_num_seqs: rows decoded together. page_size: tokens a K/V page. prefill_chunk: prompt
    tokens a row and step. kernels: "auto" or an implementation of ``pallas_kernels``. seed: of requests that bring none
    (None: fresh noise every call). tensor_parallel_size: devices that share the model.
    """

    dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    page_size: int = 16
    prefill_chunk: int = 128
    kernels: str = "auto"
    seed: int | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        whole = ("block_size", "max_model_len", "max_num_seqs", "page_size", "prefill_chunk", "seed")
        optional = ("block_size", "max_model_len", "seed")
        check_kinds(self, whole=(*whole, "tensor_parallel_size"), optional=optional)
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        for name in ("max_num_seqs", "page_size", "prefill_chunk", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("block_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
