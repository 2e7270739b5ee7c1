"""Floors of steps and ops: against counts by hand, and against the project's own table of an H200; sums of traces."""

import pytest
from benchmarks.floors import decode_phases, floor_of, head_of, kv_values, prefill_phases, weights_of
from benchmarks.measuring import Kernel, Span, idle_share, kernels_of
from benchmarks.shapes import TARGETS, dense, drafter_of
from benchmarks.step import Case

from pallas_kernels.specs import AttentionSpec, InjectSpec

BANDWIDTH, RATE = 4.3e12, 790e12  # one H200
TABLE = {  # rows: ms of a plain step, of a cycle with block 16, with block 8; Qwen3-8B behind 1,024 tokens
    1: (3.56, 4.34, 4.34),
    4: (3.66, 4.46, 4.46),
    8: (3.80, 4.62, 4.62),
    16: (4.08, 5.99, 4.94),
    32: (4.64, 11.98, 5.99),
}
TARGET, DRAFTER = TARGETS["qwen3-8b"], drafter_of("qwen3-8b")


def test_a_tiny_target_by_hand() -> None:
    tiny = dense("llama", layers=2, dim=8, width=16, heads=4, kv_heads=2, head_dim=4, vocab=10)
    attention = 8 * 16 + 2 * 8 * 8 + 16 * 8
    assert weights_of(tiny) == 2 * (attention + 3 * 8 * 16 + 2 * 8) + 8
    assert head_of(tiny) == 80
    assert kv_values(tiny) == 2 * 2 * 2 * 4
    (phase,) = decode_phases(tiny, None, rows=3, block=1, context=5, kept=1, itemsize=2)
    weights = weights_of(tiny) + 80
    assert phase.bytes == 2 * (weights + 3 * 6 * 32)
    assert phase.flops == 2 * weights * 3
    (phase,) = prefill_phases(tiny, None, rows=1, chunk=7, context=5, itemsize=2)
    assert phase.bytes == 2 * (weights + 12 * 32)
    assert phase.flops == 2 * (weights_of(tiny) * 7 + 80)


def test_bytes_of_an_8b_step() -> None:
    (plain,) = decode_phases(TARGET, None, 1, 1, 1024, 1, 2)
    assert plain.bytes == pytest.approx(15.3e9, rel=0.003)
    cycle = decode_phases(TARGET, DRAFTER, 1, 16, 1024, 1, 2)
    assert [phase.name for phase in cycle] == ["draft", "verify"]
    assert sum(phase.bytes for phase in cycle) == pytest.approx(18.7e9, rel=0.003)


@pytest.mark.parametrize("rows", TABLE)
def test_the_table_of_floors(rows: int) -> None:
    cases = [(None, 1), (DRAFTER, 16), (DRAFTER, 8)]
    phases = [decode_phases(TARGET, drafter, rows, block, 1024, 1, 2) for drafter, block in cases]
    ms = [1e3 * floor_of(p, BANDWIDTH, RATE) for p in phases]
    assert ms == pytest.approx(TABLE[rows], abs=0.006)


def test_injection_in_a_prefill_chunk() -> None:
    _, inject = prefill_phases(TARGET, DRAFTER, rows=1, chunk=512, context=0, itemsize=2)
    weights = 5 * 4096 * 4096 + 4096 + 4096 * 5 * 2 * 1024
    assert inject.bytes == 2 * (weights + 512 * 5 * 2 * 1024)
    assert inject.flops == 2 * weights * 512


@pytest.mark.parametrize("context", [0, 10, 1024])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_lengths_of_a_case_meet_its_context_and_stay_in_its_pages(context: int, tokens: int) -> None:
    case = Case("dflash" if tokens > 1 else "plain", 2, tokens, context, rate=6.5, ahead=16)
    assert case.kept == min(6.5, tokens)
    lengths = [case.start + case.kept * i for i in range(case.ahead)]
    assert sum(lengths) / len(lengths) == pytest.approx(context, abs=0.5) or case.start == 0
    assert lengths[-1] + tokens <= 16 * case.pages


def test_values_of_an_attention() -> None:
    spec = AttentionSpec("", rows=2, block=3, context=32, kv_heads=2, group=4, head_dim=8)
    pages, in_hand, queries = 2 * 32 * 2 * 2 * 8, 2 * 3 * 2 * 2 * 8, 2 * 3 * 8 * 8
    assert spec.values == pages + in_hand + 2 * queries
    assert spec.flops == 2 * 2 * 2 * 8 * 8 * (33 + 34 + 35)
    windowed = AttentionSpec("", rows=1, block=1, context=32, kv_heads=1, group=1, head_dim=8, window=5)
    assert windowed.pool_values == 2 * 4 * 8


def test_values_of_an_injection() -> None:
    assert InjectSpec("", tokens=3, layers=5, kv_heads=2, head_dim=8).values == 2 * 3 * 5 * 2 * 2 * 8


def test_sums_of_a_trace() -> None:
    spans = [Span("a", 0, 10e3), Span("b", 10e3, 30e3), Span("a", 80e3, 90e3), Span("b", 85e3, 100e3)]
    assert idle_share(spans) == pytest.approx(0.5)
    assert idle_share(spans, gap_us=60) == 0
    assert idle_share([]) is None
    assert kernels_of(spans, steps=2) == [Kernel("b", 1, 17.5, 35 / 55), Kernel("a", 1, 10, 20 / 55)]
