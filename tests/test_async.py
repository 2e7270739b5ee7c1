"""AsyncLLM: LLM's answers, streams that can be left, one engine for all, an end that leaves nobody waiting."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from test_llm import GREEDY, PAIR, PROMPTS, write_tokenizer

from serving import LLM, Chunk, Completion, FinishReason, SamplingParams
from serving.async_llm import AsyncLLM, EngineError, Mailbox

ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(PAIR / "target", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return LLM(folder, PAIR / "draft", dtype="float32", seed=5, max_num_seqs=4, block_size=8)


def said(completions: list[Completion]) -> list[Any]:
    """What must not depend on who asks; the rounds may, since blocks follow the load."""
    return [(c.index, c.sample, c.text, c.token_ids, c.finish_reason) for c in completions]


def run(llm: LLM, scenario: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    """A scenario's result; whatever it does, it has a minute."""

    async def main() -> Any:
        async with AsyncLLM(llm) as front:
            return await asyncio.wait_for(scenario(front), 60)

    return asyncio.run(main())


async def idle(front: AsyncLLM) -> None:
    """Wait until no request is left and all pages are back."""
    scheduler = front.llm.engine.scheduler
    async with asyncio.timeout(20):
        while front.llm.engine.busy or front.mailboxes or front.inbox:
            await asyncio.sleep(0.01)
    cached = scheduler.tree.pages if scheduler.tree else 0
    assert scheduler.pool.free + cached == scheduler.pool.total


def test_answers_are_those_of_llm(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    assert said(run(llm, lambda front: front.generate(PROMPTS, GREEDY))) == said(expected)

    async def each_alone(front: AsyncLLM) -> list[Any]:
        return await asyncio.gather(*(front.generate(prompt, GREEDY) for prompt in PROMPTS))

    assert [done[0].text for done in run(llm, each_alone)] == [done.text for done in expected]


def test_samples_of_several_prompts_come_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3, n=2)
    done = run(llm, lambda front: front.generate(PROMPTS, params))
    assert said(done) == said(llm.generate(PROMPTS, params))


def test_streams_hold_every_token_once(llm: LLM) -> None:
    expected = llm.generate(PROMPTS * 3, GREEDY)

    async def follow(front: AsyncLLM, prompt: str, pause: float) -> list[Chunk]:
        chunks = []
        async for chunk in front.stream(prompt, GREEDY):
            chunks.append(chunk)
            await asyncio.sleep(pause)
        return chunks

    async def scenario(front: AsyncLLM) -> list[list[Chunk]]:
        return await asyncio.gather(*(follow(front, p, 0.02 * i) for i, p in enumerate(PROMPTS * 3)))

    for chunks, whole in zip(run(llm, scenario), expected, strict=True):
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
        assert [chunk.completion is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_who_fetches_late_gets_all_in_one_chunk(llm: LLM) -> None:
    async def scenario(front: AsyncLLM) -> list[Chunk]:
        stream = front.stream(PROMPTS[0], GREEDY)
        chunks = [await anext(stream)]
        await idle_engine(front)
        return chunks + [chunk async for chunk in stream]

    async def idle_engine(front: AsyncLLM) -> None:
        while front.llm.engine.busy:
            await asyncio.sleep(0.01)

    chunks = run(llm, scenario)
    assert len(chunks) <= 3  # the first, perhaps one that had been fetched with it, and all the rest
    assert "".join(chunk.text for chunk in chunks) == llm.generate(PROMPTS[0], GREEDY)[0].text


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    async def scenario(front: AsyncLLM) -> None:
        async with aclosing(front.stream(PROMPTS[0], ENDLESS)) as stream:
            await anext(stream)
        await idle(front)

    before = llm.engine.stats.tokens
    run(llm, scenario)
    assert llm.engine.stats.tokens - before < 400  # of the 490 that would have come


def test_cancelling_who_waits_aborts_what_runs_and_what_waits(llm: LLM) -> None:
    async def scenario(front: AsyncLLM) -> None:
        tasks = [asyncio.create_task(front.generate(PROMPTS[i % 3], ENDLESS)) for i in range(8)]
        while not llm.engine.scheduler.waiting:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await idle(front)

    run(llm, scenario)


def test_a_lower_priority_value_runs_first(llm: LLM) -> None:
    order = []

    async def ask(front: AsyncLLM, name: str, priority: int) -> None:
        await front.generate(
            PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), priority=priority
        )
        order.append(name)

    async def scenario(front: AsyncLLM) -> None:
        with llm.lock:  # no step until all are in
            tasks = [asyncio.create_task(ask(front, f"late {i}", 1)) for i in range(8)]
            tasks.append(asyncio.create_task(ask(front, "urgent", 0)))
            while len(front.mailboxes) < 9:
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)

    run(llm, scenario)
    assert "urgent" in order[:4]  # with the first four rows


def test_prompts_that_cannot_run_answer_with_an_error_and_bad_ones_raise(llm: LLM) -> None:
    async def scenario(front: AsyncLLM) -> None:
        done = await front.generate([[5] * 512, PROMPTS[0]], GREEDY)
        assert [c.finish_reason is FinishReason.ERROR for c in done] == [True, False]
        with pytest.raises(ValueError, match="prompt 0"):
            await front.generate([[1.5]], GREEDY)
        with pytest.raises(ValueError, match="prompt 0"):
            await anext(front.stream([[1.5]], GREEDY))

    run(llm, scenario)


def test_llm_may_be_used_beside_it(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    beside: list[Any] = []

    async def scenario(front: AsyncLLM) -> None:
        thread = threading.Thread(target=lambda: beside.append(llm.generate(PROMPTS, GREEDY)))
        tasks = [asyncio.create_task(front.generate(PROMPTS, GREEDY)) for _ in range(4)]
        thread.start()
        for done in await asyncio.gather(*tasks):
            assert [c.text for c in done] == [c.text for c in expected]
        await asyncio.to_thread(thread.join)

    run(llm, scenario)
    assert [c.text for c in beside[0]] == [c.text for c in expected]


def test_closing_aborts_and_refuses_and_leaves_the_llm_usable(llm: LLM) -> None:
    async def main() -> None:
        front = AsyncLLM(llm)
        task = asyncio.create_task(front.generate(PROMPTS[0], ENDLESS))
        while not llm.engine.scheduler.rows:
            await asyncio.sleep(0)
        await front.aclose()
        assert (await task)[0].finish_reason is FinishReason.ABORT
        assert not front.healthy
        assert not front.thread.is_alive()
        with pytest.raises(EngineError, match="closed"):
            await front.generate(PROMPTS[0], GREEDY)
        await front.aclose()

    asyncio.run(main())
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason is FinishReason.STOP


def test_a_failing_step_reaches_every_caller(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("the device is full")

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            with monkeypatch.context() as patch:
                patch.setattr(llm.engine, "step", broken)
                results = await asyncio.gather(
                    *(front.generate(prompt, GREEDY) for prompt in PROMPTS), return_exceptions=True
                )
            assert [type(result) for result in results] == [EngineError] * 3
            assert isinstance(results[0].__cause__, MemoryError)
            assert not front.healthy
            with pytest.raises(EngineError, match="the device is full"):
                await front.generate(PROMPTS[0], GREEDY)

    asyncio.run(main())
    assert "the device is full" in capfd.readouterr().err
    for request in list(llm.engine.scheduler.waiting):  # the broken engine's; the next test wants a clean one
        llm.engine.abort(request)


def test_an_end_right_behind_a_chunk_is_heard(llm: LLM) -> None:
    """Both come before the caller gets its turn; the first must not swallow the second."""
    made = llm.requests(PROMPTS[0], GREEDY, None)

    async def main() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), made)
        for word in ("first", "last"):
            made[0].text += word
            await asyncio.to_thread(mailbox.put, made[0])
            if word == "last":
                await asyncio.to_thread(mailbox.stop)
            taken = await asyncio.wait_for(mailbox.take(), 5)
            assert [chunk.text for chunk in taken] == [word]
        assert await asyncio.wait_for(mailbox.take(), 5) == []

    asyncio.run(main())


def test_an_event_loop_that_is_gone_disturbs_nobody(llm: LLM) -> None:
    front = AsyncLLM(llm)
    lost = asyncio.new_event_loop()
    stream = front.stream(PROMPTS[0], ENDLESS)
    lost.run_until_complete(anext(stream))
    lost.close()

    async def others() -> None:
        assert (await front.generate(PROMPTS[0], GREEDY))[0].text == llm.generate(PROMPTS[0], GREEDY)[0].text
        await front.aclose()

    asyncio.run(others())
    del stream


def test_options_go_to_an_llm_that_is_made_here_only(llm: LLM) -> None:
    with pytest.raises(TypeError, match="made already"):
        AsyncLLM(llm, dtype="float32")
