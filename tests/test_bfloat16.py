"""bfloat16: a block and single tokens round differently; ids may part, but only where the target hardly prefers one."""

from pathlib import Path

import pytest

from serving import LLM, SamplingParams

PAIR = Path(__file__).parent / "golden" / "pairs" / "trained_pair"
TEXTS = ("Q: add 18 and 19\nA:", "Q: count from 11 to 16\nA:", "Q: tell me about sam and the red bike\nA:")
# bfloat16 keeps 8 bits: log-probabilities of logits near 16 move by up to 2^-4 or so on each path.
MARGIN = 0.25


def parting(fast: tuple[int, ...], slow: tuple[int, ...]) -> int | None:
    """The first index at which two outputs differ."""
    return next((i for i, (a, b) in enumerate(zip(fast, slow, strict=True)) if a != b), None)


@pytest.mark.parametrize("block_size", [4, 8])
def test_ids_part_only_at_near_ties(block_size: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)
    prompts = [[ord(c) for c in text] for text in TEXTS]
    fast = LLM(PAIR / "target", PAIR / "draft", block_size=block_size).generate(prompts, params)
    slow = LLM(PAIR / "target").generate(prompts, params)
    for f, s in zip(fast, slow, strict=True):
        at = parting(f.token_ids, s.token_ids)
        if at is not None:
            assert s.logprobs is not None
            best, second = sorted(s.logprobs[at].values(), reverse=True)[:2]
            assert best - second < MARGIN
    assert all(f.acceptance_length > 2 for f in fast)
