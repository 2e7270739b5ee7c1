"""Plain decoding by Hugging Face transformers: the baseline of ``benchmark.py step``, in a process of its own.

PyTorch and JAX would share the GPU's memory badly, so ``step`` runs this file, which ends before JAX takes the device.
Arguments: a JSON object (see ``Job``) and "any" or "gpu", the device that it needs. Prints a JSON list of milliseconds,
one a case, or null where there is no such device.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

AHEAD, REPEATS = (16, 7) if torch.cuda.is_available() else (2, 3)


@dataclass(frozen=True)
class Job:
    """A config's fields, the weights' dtype, cases (rows, cached tokens)."""

    model_type: str
    config: dict[str, Any]
    dtype: str
    cases: list[tuple[int, int]]


def wait() -> None:
    """Until the device has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cache_of(config: Any, rows: int, context: int, dtype: torch.dtype) -> Any:
    """``context`` random tokens of every row."""
    cache = DynamicCache()
    shape = (rows, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), layer)
    return cache


def step_ms(model: Any, rows: int, context: int) -> float:
    """Milliseconds of a greedy step that feeds its own tokens: the median of rounds that are waited for."""
    cache = cache_of(model.config, rows, context, model.dtype)
    times = []
    for _ in range(REPEATS + 1):
        tokens = torch.randint(model.config.vocab_size, (rows, 1))
        wait()
        start = time.perf_counter()
        for _ in range(AHEAD):
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            tokens = out.logits[:, -1:].argmax(dim=-1)
        wait()
        times.append((time.perf_counter() - start) / AHEAD)
        cache.crop(-AHEAD)
    return 1e3 * statistics.median(times[1:])


@torch.inference_mode()
def main(job: Job, needs: str) -> list[float] | None:
    """Every case with one model of random weights."""
    gpu = torch.cuda.is_available()
    if needs == "gpu" and not gpu:
        return None
    torch.set_default_device("cuda" if gpu else "cpu")
    config = AutoConfig.for_model(job.model_type, **job.config)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.dtype), attn_implementation="sdpa").eval()
    return [step_ms(model, rows, context) for rows, context in job.cases]


if __name__ == "__main__":
    print(json.dumps(main(Job(**json.loads(sys.argv[1])), sys.argv[2])))
