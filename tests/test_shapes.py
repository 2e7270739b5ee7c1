"""Shapes: every step finds one that holds it, warm-up knows them all, and nothing compiles for a tighter fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.shapes import DecodeShape, PrefillShape, Shapes, at_least, size, sizes, useful

TABLES = st.builds(
    Shapes,
    max_rows=st.integers(1, 40),
    max_pages=st.integers(1, 300),
    chunk=st.integers(1, 600),
    page_size=st.sampled_from([1, 16, 64]),
    narrow=st.booleans(),
)


@given(shapes=TABLES, data=st.data())
def test_after_warm_up_every_step_has_a_compiled_shape_that_holds_it(shapes: Shapes, data: st.DataObject) -> None:
    blocks = {n: [1, 8] for n in shapes.rows}
    shapes.ready |= set(shapes.all(blocks))
    rows = data.draw(st.integers(1, shapes.max_rows))
    pages = data.draw(st.integers(1, shapes.max_pages))
    ahead = data.draw(st.integers(rows, shapes.max_rows)), data.draw(st.integers(pages, shapes.max_pages))
    shape = shapes.decode(rows, data.draw(st.sampled_from([1, 8])), pages, ahead)
    assert shape in shapes.ready
    assert shape.rows >= rows
    assert shape.pages >= pages
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=shapes.max_rows))
    prefill = shapes.prefill(lengths, pages, ahead[1])
    assert prefill in shapes.ready
    assert prefill.pages >= pages
    assert 1 <= prefill.rows <= shapes.max_rows
    # No other shape would get more of these prompts done.
    assert useful(lengths, (prefill.rows, prefill.chunk)) >= max(useful(lengths, piece) for piece in shapes.pieces)


@given(shapes=TABLES, data=st.data())
def test_without_warm_up_the_first_shape_serves_the_steps_to_come(shapes: Shapes, data: st.DataObject) -> None:
    rows, pages = data.draw(st.integers(1, shapes.max_rows)), data.draw(st.integers(1, shapes.max_pages))
    first = shapes.decode(1, 4, 1, (rows, pages))
    assert first.rows >= rows
    assert first.pages >= pages
    shapes.ready.add(first)
    for fewer in {1, rows}:
        for narrower in {1, pages}:
            assert shapes.decode(fewer, 4, narrower, (fewer, narrower)) == first
    assert shapes.decode(1, 8, 1, (1, 1)).block == 8  # another block is another step


@given(shapes=TABLES)
def test_the_tables_end_with_the_largest_and_fit_the_chunk(shapes: Shapes) -> None:
    assert shapes.rows[-1] == shapes.max_rows
    assert shapes.pages[-1] == shapes.max_pages
    assert list(shapes.pages) == sorted(set(shapes.pages))
    assert (1, shapes.chunk) in shapes.pieces
    for rows, tokens in shapes.pieces:
        assert tokens >= 1
        assert rows * tokens <= shapes.chunk
    every = shapes.all({n: [4] for n in shapes.rows})
    assert len(every) == len(set(every))
    assert [size(s) for s in every] == sorted(map(size, every), reverse=True)
    if not shapes.narrow:
        assert shapes.pages == (shapes.max_pages,)


def test_the_smallest_that_fits_is_taken() -> None:
    shapes = Shapes(max_rows=8, max_pages=64, chunk=512, page_size=16, narrow=True)
    assert (shapes.rows, shapes.pages) == ((1, 2, 4, 8), (16, 64))
    shapes.ready |= set(shapes.all({n: [8] for n in shapes.rows}))
    assert shapes.decode(3, 8, 5, (8, 64)) == DecodeShape(4, 8, 16)
    assert shapes.decode(3, 8, 17, (8, 64)) == DecodeShape(4, 8, 64)
    assert shapes.prefill([20], 2, 64) == PrefillShape(1, 32, 16)
    assert shapes.prefill([20, 20, 20], 2, 64) == PrefillShape(4, 128, 16)
    assert shapes.prefill([500, 20, 20], 17, 64) == PrefillShape(1, 512, 64)


def test_sizes_and_the_least_that_holds() -> None:
    assert (sizes(1, 2), sizes(6, 2), sizes(8, 2), sizes(64, 4)) == ((1,), (1, 2, 4, 6), (1, 2, 4, 8), (1, 4, 16, 64))
    assert at_least((1, 4, 16), 5) == 16
    with pytest.raises(ValueError, match="17 exceeds the largest size 16"):
        at_least((1, 4, 16), 17)
