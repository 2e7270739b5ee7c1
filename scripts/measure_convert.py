"""Measures the converter on a synthetic checkpoint of many shards: peak anonymous memory, GB/s, bit-exact round trip.

    python scripts/measure_convert.py /tmp/measure --gigabytes 4

Writes random bf16 weights of a Llama shape, converts them there and back in processes of their own, and samples RssAnon
(mapped files do not count). Exits non-zero where the peak is not below twice the largest tensor plus 500 MB, or where a
byte differs.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from convert import rules
from convert.hf_config import target_config
from convert.tensors import INDEX, open_shelf

ALLOWED = 500_000_000
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def write_checkpoint(folder: Path, nbytes: int, vocab: int) -> int:
    """Random weights in one shard a layer. Returns the bytes of the largest tensor."""
    folder.mkdir(parents=True)
    table = 2 * vocab * 2048 * 2
    layer = 2 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    layers = max(1, (nbytes - table) // layer)
    hf = {**SHAPE, "num_hidden_layers": layers, "vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(hf))
    random = np.random.default_rng(0)
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for path, (rule, name, leaf) in rules.rules_of(target_config(hf)).items():
        number = int(path.split(".")[1]) + 2 if path.startswith("layers.") else ["embed", "head"].count(path)
        file = f"model-{number + 1:05d}-of-{layers + 2:05d}.safetensors"
        shards.setdefault(file, []).append((name, rule.transform.shape(leaf.shape)))
    largest = 0
    for file, tensors in shards.items():
        header, offset = {}, 0
        for name, shape in tensors:
            size = int(np.prod(shape)) * 2
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            offset, largest = offset + size, max(largest, size)
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, offset, 1 << 24):
                opened.write(random.bytes(min(1 << 24, offset - start)))
    index = {"weight_map": {name: file for file, tensors in shards.items() for name, _ in tensors}}
    (folder / INDEX).write_text(json.dumps(index))
    return largest


def run(*arguments: str) -> tuple[int, float]:
    """Runs the converter; returns its peak RssAnon in bytes and its seconds."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "convert", *arguments])
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.002)
    if process.wait():
        sys.exit(f"the converter ended with status {process.returncode}")
    return peak, time.monotonic() - began


def same(first: Path, second: Path) -> bool:
    """Whether two folders hold the same tensors, byte for byte."""
    mine, other = open_shelf(first), open_shelf(second)
    if mine.faults or other.faults or mine.tensors.keys() != other.tensors.keys():
        return False
    return all(
        tensor.dtype == other.tensors[name].dtype
        and tensor.shape == other.tensors[name].shape
        and np.array_equal(tensor.view().view(np.uint16), other.tensors[name].view().view(np.uint16))
        for name, tensor in mine.tensors.items()
    )


def main(
    folder: Annotated[Path, typer.Argument(help="where to work; removed at the end")],
    gigabytes: Annotated[float, typer.Option(help="size of the checkpoint")] = 4.0,
    vocab: Annotated[int, typer.Option(help="vocabulary: 128256 makes the embedding the largest tensor")] = 128256,
) -> None:
    """Prints one line a direction and exits 1 on any miss."""
    if folder.exists():
        sys.exit(f"{folder} exists already")
    try:
        largest = write_checkpoint(folder / "hf", int(gigabytes * 1e9), vocab)
        total = sum(tensor.nbytes for tensor in open_shelf(folder / "hf"))
        limit = 2 * largest + ALLOWED
        good = True
        for name, arguments in (
            ("to-orbax", ["--target", str(folder / "hf"), "--out", str(folder / "ours")]),
            ("to-hf", [str(folder / "ours"), "--out", str(folder / "back")]),
        ):
            peak, seconds = run(name, *arguments)
            good &= peak < limit
            print(
                f"{name}: {total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, "
                f"peak RssAnon {peak / 1e6:.0f} MB (limit {limit / 1e6:.0f} MB), "
                f"{seconds:.1f} s, {total / seconds / 1e9:.2f} GB/s"
            )
        exact = same(folder / "hf", folder / "back")
        print(f"round trip: {'bit for bit' if exact else 'DIFFERENT'}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if good and exact else 1)


if __name__ == "__main__":
    typer.run(main)
