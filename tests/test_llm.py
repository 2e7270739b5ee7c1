"""LLM on a trained pair: prompts of every kind, seeds, limits, errors of single items, logprobs."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.reference import full_pass
from serving import LLM, Completion, FinishReason, SamplingParams

PAIR = Path(__file__).parent / "golden" / "pairs" / "trained_pair"
PROMPTS = ["Q: add 18 and 19\nA:", "Q: count from 11 to 16\nA:", "Q: tell me about sam and the red bike\nA:"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one id a character, its code: what the pair was trained on."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {chr(i): i for i in range(3, 128)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(PAIR / "target", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def dflash(target: Path) -> LLM:
    return LLM(target, PAIR / "draft", dtype="float32", block_size=8, seed=5)


@pytest.fixture(scope="module")
def plain(target: Path) -> LLM:
    return LLM(target, dtype="float32", seed=5)


def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


def test_text_comes_out_the_same_with_fewer_steps(dflash: LLM, plain: LLM) -> None:
    fast, slow = dflash.generate(PROMPTS, GREEDY), plain.generate(PROMPTS, GREEDY)
    assert ids(fast) == ids(slow)
    assert [c.text for c in fast] == [c.text for c in slow]
    assert fast[0].text == " 18 plus 19 is 36. so 18 + 19 = 36."  # arithmetic is not what this pair is for
    assert all(c.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for c in fast)
    for f, s in zip(fast, slow, strict=True):
        assert (f.index, f.prompt_tokens, f.output_tokens) == (s.index, s.prompt_tokens, s.output_tokens)
        assert s.acceptance_length == 1.0
        assert f.acceptance_length > 2
        assert 1 + sum(f.acceptance_lengths) >= f.output_tokens


def test_streamed_text_is_the_generated_text(dflash: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["."])
    texts, done = {}, {}
    for chunk in dflash.stream(PROMPTS, params):
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        if chunk.completion:
            done[chunk.index] = chunk.completion
    assert [done[i] for i in range(3)] == dflash.generate(PROMPTS, params)
    assert [texts[i] for i in range(3)] == [done[i].text for i in range(3)]
    assert not any("." in text for text in texts.values())


def test_prompts_of_every_kind_and_bad_ones_among_them(dflash: LLM) -> None:
    as_ids = [ord(c) for c in PROMPTS[0]]
    as_messages = [{"role": "user", "content": PROMPTS[0]}]
    prompts = [PROMPTS[0], [], as_ids, [5] * 512, as_messages, [200], "", [5] * 511]
    out = dflash.generate(prompts, GREEDY)
    assert [c.index for c in out] == list(range(8))
    assert out[0].token_ids == out[2].token_ids == out[4].token_ids
    assert [c.error is None for c in out] == [True, False, True, False, True, False, False, True]
    assert all(c.finish_reason is FinishReason.ERROR and c.token_ids == () for c in out if c.error)
    assert "empty" in str(out[1].error)
    assert "512" in str(out[3].error)
    assert "127" in str(out[5].error)
    assert (out[7].output_tokens, out[7].finish_reason) == (1, FinishReason.LENGTH)


def test_a_small_pool_ends_the_context_and_says_so(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(target, dtype="float32", num_pages=4, max_num_seqs=1)
    holder = "the K/V pool of 64 tokens (4 pages of 16)"
    assert f"{holder} ends prompts and outputs, not max_model_len 512" in capsys.readouterr().err
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    out = llm.generate([[5] * 64, [5] * 60, [5] * 700], params)
    assert [c.error for c in out] == [
        f"the prompt has 64 tokens; {holder} leaves no room for output",
        None,
        f"the prompt has 700 tokens; {holder} leaves no room for output",
    ]
    assert (out[1].output_tokens, out[1].finish_reason) == (4, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "prompt", [PROMPTS[0], [ord(c) for c in PROMPTS[0]], [{"role": "user", "content": PROMPTS[0]}]]
)
def test_one_prompt_needs_no_list(dflash: LLM, prompt: object) -> None:
    assert len(dflash.generate(prompt, GREEDY)) == 1


def test_no_prompts_give_no_answers(dflash: LLM) -> None:
    assert dflash.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([PROMPTS[0], [1.5]], r"prompt 1: .*not \[1.5\]"),
        ([[None]], "prompt 0"),
        ([b"bytes"], "prompt 0"),
        (b"bytes", "prompt 0"),
        ([True, False], "prompt 0"),
        ([2.5], "prompt 0"),
        (None, "prompts must be"),
        (5, "prompts must be"),
        ({"role": "user", "content": "x"}, "prompt 0"),
        ([{"role": "user"}], "role and a content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "role and a content"),
        ([{"role": "user", "content": "x"}, "y"], "role and a content"),
    ],
)
def test_a_prompt_of_another_kind_is_refused_by_its_index(dflash: LLM, prompts: object, message: str) -> None:
    for call in (dflash.generate, dflash.stream):
        with pytest.raises(ValueError, match=message):
            call(prompts, GREEDY)


def test_params_of_another_kind_are_refused(dflash: LLM) -> None:
    with pytest.raises(ValueError, match="params must be SamplingParams"):
        dflash.generate(PROMPTS[:1], [{"temperature": 0}])
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
        dflash.generate(PROMPTS[0], [GREEDY, GREEDY])


def test_calls_that_overlap_do_not_disturb_one_another(dflash: LLM) -> None:
    alone = [dflash.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    streams = [dflash.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    last = [[next(stream), next(stream)][1] for stream in streams]
    assert dflash.generate(PROMPTS[2], GREEDY)[0] == alone[2]
    for chunks in zip_longest(*streams):
        last = [chunk or before for chunk, before in zip(chunks, last, strict=True)]
    assert [chunk.completion for chunk in last] == alone[:2]
    with ThreadPoolExecutor(3) as threads:
        assert [done[0] for done in threads.map(lambda prompt: dflash.generate(prompt, GREEDY), PROMPTS)] == alone


def test_the_same_seed_draws_the_same_in_every_row_and_others_differ(dflash: LLM, plain: LLM) -> None:
    seeded = SamplingParams(temperature=3.0, max_tokens=24, seed=7, ignore_eos=True)
    free = SamplingParams(temperature=3.0, max_tokens=24, ignore_eos=True)
    params = [seeded, free, free, seeded, free, free, free, seeded]
    out = ids(dflash.generate([PROMPTS[2]] * 8, params))
    assert out[0] == out[3] == out[7]
    assert len({out[i] for i in (0, 1, 2, 4, 5, 6)}) == 6
    assert out == ids(plain.generate([PROMPTS[2]] * 8, params))  # an engine seed repeats, whatever the decoding
    assert out[0] == dflash.generate(PROMPTS[2], seeded)[0].token_ids


def test_n_samples_differ_and_stand_side_by_side(dflash: LLM) -> None:
    params = SamplingParams(temperature=3.0, max_tokens=24, seed=7, n=3, ignore_eos=True)
    out = dflash.generate([PROMPTS[2], PROMPTS[0]], params)
    assert [(c.index, c.sample) for c in out] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({c.token_ids for c in out[:3]}) == 3


def test_unseeded_calls_differ_without_an_engine_seed(target: Path) -> None:
    llm = LLM(target, dtype="float32")
    params = SamplingParams(temperature=3.0, max_tokens=24, ignore_eos=True)
    assert llm.generate(PROMPTS[2], params)[0].token_ids != llm.generate(PROMPTS[2], params)[0].token_ids


def test_prompts_up_to_the_context_end_get_the_room_that_is_left(target: Path) -> None:
    llms = [LLM(target, d, dtype="float32", max_model_len=64) for d in (None, PAIR / "draft")]
    prompts = [[32 + i % 90 for i in range(64 - room)] for room in range(1, 18)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outs = [llm.generate(prompts, params) for llm in llms]
    assert ids(outs[0]) == ids(outs[1])
    assert [c.output_tokens for c in outs[1]] == list(range(1, 18))
    assert all(c.finish_reason is FinishReason.LENGTH for c in outs[1])


def test_both_config_files_name_stop_ids_and_ignore_eos_overrides(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": ord("3")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord("3"), ord("9")]}))
    llm = LLM(tmp_path, PAIR / "draft", dtype="float32")
    free = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    assert llm.eos_token_ids == (ord("3"), ord("9"))
    assert free.output_tokens == 30
    done = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30))[0]
    assert (done.text, done.stop_reason) == (" 18 plus 1", ord("9"))
    assert done.token_ids == free.token_ids[: done.output_tokens]
    six = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[ord("6")])
    assert llm.generate(PROMPTS[0], six)[0].text == " 18 plus 19 is 3"


def test_logprobs_equal_a_teacher_forced_pass(dflash: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=20, logprobs=3)
    done = dflash.generate(PROMPTS[2], params)[0]
    prompt = [ord(c) for c in PROMPTS[2]]
    runner = dflash.engine.runner
    _, logits = full_pass(runner.params.target, runner.model.target, jnp.array([prompt + list(done.token_ids)]))
    wide = np.asarray(logits[0], np.float64)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    assert done.logprobs is not None
    for i, (token, entry) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + i]
        assert next(iter(entry)) == token
        assert set(entry) == {token, *np.argsort(-row)[:3].tolist()}
        assert all(abs(value - row[t]) < 1e-4 for t, value in entry.items())
    assert dflash.generate(PROMPTS[2], GREEDY)[0].logprobs is None


def test_a_request_with_nan_errors_alone(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    embed = weights["model.embed_tokens.weight"].astype(np.float32)
    weights["lm_head.weight"] = embed.copy()  # an own head, so that the bad row is in the input alone
    embed[ord("@")] = np.nan
    weights["model.embed_tokens.weight"] = embed
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path, PAIR / "draft", dtype="float32")
    good = ids(llm.generate(PROMPTS[:2], GREEDY))
    out = llm.generate([PROMPTS[0], "a bad @ here", PROMPTS[1]], GREEDY)
    assert ids([out[0], out[2]]) == good
    assert out[1].finish_reason is FinishReason.ERROR
    assert "finite" in str(out[1].error)


def test_options_that_do_not_exist_or_fit_are_refused(target: Path) -> None:
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM(target, gpu_memory_utilization=0.9)
    with pytest.raises(ValueError, match="513 exceeds the target's 512"):
        LLM(target, max_model_len=513)
    with pytest.raises(ValueError, match="dtype"):
        LLM(target, dtype="int8")
    with pytest.raises(ValueError, match="block_size 4 needs a drafter"):
        LLM(target, block_size=4)
    with pytest.raises(ValueError, match="kernels='cuda'"):
        LLM(target, kernels="cuda")
    with pytest.raises(ValueError, match="99 devices"):
        LLM(target, tensor_parallel_size=99)


def test_a_block_above_the_trained_size_warns_once_and_gives_the_same_ids(target: Path, plain: LLM) -> None:
    with pytest.warns(UserWarning, match="block_size 12 is above the 8") as caught:
        llm = LLM(target, PAIR / "draft", dtype="float32", block_size=12, seed=5)
    assert len(caught) == 1
    assert ids(llm.generate(PROMPTS, GREEDY)) == ids(plain.generate(PROMPTS, GREEDY))


def test_a_target_without_tokenizer_takes_ids_only() -> None:
    llm = LLM(PAIR / "target", dtype="float32")
    assert llm.generate([[81, 58]], GREEDY)[0].text == ""
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate("hello", GREEDY)
    with pytest.raises(ValueError, match="stop strings"):
        llm.generate([[81]], SamplingParams(stop="x"))


def test_defaults_come_from_generation_config(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    )
    params = LLM(tmp_path, dtype="float32").default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.95, 16)


def test_what_is_left_out_of_the_files_is_said(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    save_file(weights, tmp_path / "model.safetensors")
    LLM(tmp_path)
    assert "skipped lm_head.weight: the head is tied" in capsys.readouterr().err


@pytest.mark.devices(2)
def test_ids_equal_on_two_devices(target: Path, plain: LLM) -> None:
    llm = LLM(target, PAIR / "draft", dtype="float32", tensor_parallel_size=2, seed=5)
    assert ids(llm.generate(PROMPTS, GREEDY)) == ids(plain.generate(PROMPTS, GREEDY))
