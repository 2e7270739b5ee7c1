"""LLM: a target, perhaps with a drafter, that answers prompts."""

import dataclasses
import secrets
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from convert.load import Loaded, open_checkpoint
from dflash_jax.cache import resolve
from dflash_jax.generate import row_key
from dflash_jax.sharding import Mesh, make_mesh
from serving.build import build_engine, packed, policy_of, warm_up
from serving.config import EngineConfig
from serving.engine import Engine
from serving.request import Chunk, Completion, Request, SamplingParams
from serving.tokenizer import IncrementalText, Prompt, Tokenizer, is_messages, token_ids

Prompts = Prompt | Sequence[Prompt]


class LLM:
    """Loads a target and answers prompts; with a drafter the same tokens come faster.

    Args:
        target: a Hugging Face folder, a hub id, or a folder written by ``python -m convert``, which may hold a drafter.
        drafter: a DFlash drafter in the same forms.
        tokenizer: a tokenizer folder, where the target's own has none.
        options: the fields of ``EngineConfig``.

    Raises:
        ValueError: anything about the files, the pair or the options that does not fit, before weights are placed.
        TypeError: an unknown option.
    """

    def __init__(
        self,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(**options)
        mesh = make_mesh(model=self.config.tensor_parallel_size)
        kernels = resolve(self.config.kernels, mesh.devices.flat[0].platform, mesh.size)
        checkpoint = open_checkpoint(target, drafter)
        positions = checkpoint.target.max_position_embeddings
        self.max_model_len = self.config.max_model_len or positions
        if self.max_model_len > positions:
            raise ValueError(f"max_model_len {self.max_model_len} exceeds the target's {positions} positions")
        policy = policy_of(checkpoint.drafter, self.config, mesh)
        folder = checkpoint.tokenizer if tokenizer is None else Path(tokenizer)
        self.tokenizer = None if folder is None else Tokenizer(folder)

        loaded = checkpoint.place(self.config.dtype, mesh)
        self.vocab_rows, self.eos_token_ids = loaded.target.vocab_rows, loaded.eos_token_ids
        self.generation_config = dict(loaded.generation_config)
        params, model = packed(loaded, mesh, kernels)
        self.engine = build_engine(params, model, mesh, self.config, self.max_model_len, policy=policy)
        self.lock = threading.Lock()  # calls may come from several threads: one at a time drives the engine
        self.unwanted: deque[Request] = deque()
        for line in (*loaded.notes, start_line(loaded, self.engine, mesh)):
            print(line, file=sys.stderr)
        if self.context < self.max_model_len:
            print(f"{self.holder} ends prompts and outputs, not max_model_len {self.max_model_len}", file=sys.stderr)

    @property
    def context(self) -> int:
        """Tokens that a prompt and its output may have together: max_model_len, or what the page pool holds."""
        return min(self.max_model_len, self.engine.scheduler.capacity)

    @property
    def holder(self) -> str:
        """What sets ``context``, in words."""
        if self.context == self.max_model_len:
            return f"max_model_len {self.max_model_len}"
        pages = self.engine.scheduler.pool.total
        return f"the K/V pool of {self.context} tokens ({pages} pages of {self.config.page_size})"

    def warm_up(self, progress: bool | None = None) -> None:
        """Compile every step that can occur, so that nothing compiles later, and measure when drafting pays.

        progress: a progress bar; default: when stderr is a terminal.
        """
        with self.lock:
            warm_up(self.engine, progress)

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what generation_config.json sets, as vLLM takes them; ``do_sample: false`` is greedy."""
        names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
        names["max_new_tokens"] = "max_tokens"
        stored = self.generation_config
        given = {ours: stored[theirs] for theirs, ours in names.items() if stored.get(theirs) is not None}
        if stored.get("do_sample") is False:
            given["temperature"] = 0.0
        return SamplingParams(**given)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answers in the order of the prompts, the n samples of a prompt side by side.

        Args:
            prompts: one prompt or a list of them; a prompt is a text, a list of token ids or a list of messages.
            params: for all prompts or one a prompt; default: ``default_sampling_params()``.
            chat_template_kwargs: passed to the chat template (``enable_thinking=False``, ...).
            progress: a progress bar; default: when stderr is a terminal and there is more than one request.

        A prompt that cannot be answered (empty, too long) gives a Completion with ``error``; the others are answered.
        """
        requests = self.requests(prompts, params, chat_template_kwargs)
        shown = progress if progress is not None else sys.stderr.isatty() and len(requests) > 1
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
            task = bar.add_task("requests", total=len(requests))
            rounds = tokens = 0
            for request in self.run(requests):
                if request.finished:
                    rounds += max(len(request.acceptance_lengths), 1)
                    tokens += len(request.output)
                    rate = tokens / max(bar.tasks[0].elapsed or 0, 1e-9)
                    bar.update(task, advance=1, description=f"{rate:,.0f} tokens/s, {tokens / rounds:.2f} a round")
        return [request.completion() for request in requests]

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Chunk]:
        """As ``generate``, yielding text and ids as they come; a sample's last chunk carries its Completion."""
        requests = self.requests(prompts, params, chat_template_kwargs)  # now, so that errors show here
        return (request.chunk() for request in self.run(requests))

    def run(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Runs requests together with those of other calls; yields one whenever it has something new, the last time
        finished. Whoever stops early aborts the rest."""
        news: deque[Request] = deque()
        finished: set[Request] = set()
        with self.lock:
            for request in requests:
                request.notify = news.append
                self.engine.add(request)
                if request.finished:
                    news.append(request)
        try:
            while len(finished) < len(requests):
                with self.lock:
                    self.drop_unwanted()
                    if not news:  # another call's step may have brought some
                        self.engine.step()
                while news:
                    request = news.popleft()
                    if request not in finished:
                        if request.finished:
                            finished.add(request)
                        yield request
        finally:
            # A generator may be collected anywhere, inside a step of this very thread too: no waiting here.
            self.unwanted.extend(r for r in requests if r not in finished)
            if self.lock.acquire(blocking=False):
                self.drop_unwanted()
                self.lock.release()

    def drop_unwanted(self) -> None:
        """Abort what nobody waits for any more; the caller holds the lock."""
        while self.unwanted:
            self.engine.abort(self.unwanted.popleft())

    def requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[Request]:
        """One Request a sample; those that cannot run have already failed."""
        listed = listed_prompts(prompts)
        each = [params] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(each)} SamplingParams for {len(listed)} prompts")
        wrong = [p for p in each if p is not None and not isinstance(p, SamplingParams)]
        if wrong:
            raise ValueError(f"params must be SamplingParams, not {wrong[0]!r}")
        seed = secrets.randbits(64) if self.config.seed is None else self.config.seed
        made = []
        for index, (prompt, wanted) in enumerate(zip(listed, each, strict=True)):
            chosen = wanted or self.default_sampling_params()
            if chosen.stop and self.tokenizer is None:
                raise ValueError("stop strings need a tokenizer, and this target has none; stop_token_ids work without")
            try:
                ids = self.encode(prompt, chat_template_kwargs or {})
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
            for sample in range(chosen.n):
                key = row_key(f"{seed}/{index}" if chosen.seed is None else chosen.seed, sample)
                made.append(self.request(index, sample, ids, chosen, key))
        return made

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of a prompt of any kind."""
        if self.tokenizer is not None:
            return self.tokenizer.encode(prompt, chat_template_kwargs)
        if isinstance(prompt, str) or is_messages(prompt):
            raise ValueError("text and messages need a tokenizer, and this target has none; pass token ids")
        return token_ids(prompt)

    def request(
        self, index: int, sample: int, ids: tuple[int, ...], params: SamplingParams, key: tuple[int, int]
    ) -> Request:
        """One Request, failed where its prompt cannot be continued."""
        room = self.context - len(ids)
        request = Request(
            index=index,
            sample=sample,
            prompt=ids,
            params=dataclasses.replace(params, n=1) if params.n > 1 else params,
            key=key,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {*self.eos_token_ids}),
            detokenizer=None if self.tokenizer is None else IncrementalText(self.tokenizer),
        )
        if not ids:
            request.fail("the prompt is empty")
        elif room < 1:
            request.fail(f"the prompt has {len(ids)} tokens; {self.holder} leaves no room for output")
        elif min(ids) < 0 or max(ids) >= self.vocab_rows:
            request.fail(f"the prompt has ids outside 0 .. {self.vocab_rows - 1}: {min(ids)} .. {max(ids)}")
        return request


def start_line(loaded: Loaded, engine: Engine, mesh: Mesh) -> str:
    """What runs, in one line; sizes that the devices do not divide are named, since they are replicated."""
    parts = mesh.shape["model"]
    sizes = {
        "KV heads": loaded.target.num_key_value_heads,
        "MLP width": loaded.target.intermediate_size,
        "vocabulary": loaded.target.vocab_rows,
    }
    whole = [f"{size} {name}" for name, size in sizes.items() if size % parts]
    blocks, runner = engine.scheduler.policy.blocks, engine.runner
    tokens, gigabytes = runner.pages * engine.scheduler.page_size, runner.cache_bytes / 1e9
    return (
        f"{loaded.target.model_type} target, {'DFlash drafter' if loaded.drafter else 'no drafter'}, "
        f"block {'/'.join(map(str, dict.fromkeys(blocks.values())))}, {loaded.dtype}, kernels {runner.model.kernels}, "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}, K/V of {tokens:,} tokens ({gigabytes:.2f} GB)"
        + (f"; not divisible by {parts}, so on every device: {', '.join(whole)}" if whole else "")
    )


def listed_prompts(prompts: Any) -> list[Any]:
    """One prompt (a text, messages or ids) or several, as a list. Raises ValueError for what is neither."""
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a prompt or a list of prompts, not {prompts!r}")
    items = list(prompts)
    return [items] if items and isinstance(items[0], Integral | Mapping) else items
