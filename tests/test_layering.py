"""The architecture as a test: who may import whom, read from the sources with ``ast``."""

import ast
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
# What a package may import of the others: a module named here, and what lies in it.
LAYERS: Mapping[str, tuple[str, ...]] = {
    "pallas_kernels": (),
    "dflash_jax": ("pallas_kernels",),
    "convert": ("dflash_jax",),
    "serving": ("convert.load", "dflash_jax"),
}
# Third-party packages: everywhere in a package, and in the files that a pattern names.
THIRD_PARTY: Mapping[str, tuple[str, ...]] = {
    "pallas_kernels": ("jax", "numpy"),
    "dflash_jax": ("jax", "flax.struct", "numpy"),
    "convert": ("transformers", "safetensors", "ml_dtypes", "numpy", "huggingface_hub", "rich", "typer"),
    "serving": ("rich", "numpy"),
}
IN_FILES: Mapping[str, tuple[str, ...]] = {
    "dflash_jax/checkpoint.py": ("orbax",),
    "dflash_jax/training/*.py": ("optax", "rich", "orbax"),
    "serving/batch.py": ("typer",),
    "serving/command.py": ("typer",),
    "serving/runner.py": ("jax",),
    "serving/tokenizer.py": ("transformers",),
    "serving/server*.py": ("starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "jinja2", "typer"),
}
ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "jax.experimental.pallas.triton": ("pallas_kernels/backend.py",),
    "jax.experimental.pallas.mosaic_gpu": ("pallas_kernels/backend.py",),
    "pallas_kernels": ("pallas_kernels/*", "dflash_jax/cache.py", "dflash_jax/layers.py"),
}
# Host bookkeeping: nothing that these reach may be jax.
HOST = ("serving.scheduler", "serving.pages", "serving.radix", "serving.request")
BANNED_NAMES = ("utils", "common", "helpers", "manager", "v2", "_new")


def sources() -> dict[str, str]:
    """Every module of the four packages: {path: text}."""
    files = [path for package in LAYERS for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def imports(tree: ast.AST) -> list[str]:
    """Every imported name, dotted: ``from a.b import c`` is a.b.c."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return found


def within(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the modules or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def hidden_imports(tree: ast.AST) -> list[str]:
    """Imports that do not stand at the top of the module, and the ways round that."""
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If | ast.Try):
            inside = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            faults += [f"line {n.lineno}: an import that is not at the top" for n in inside]
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in ("TYPE_CHECKING", "__import__", "import_module"):
            faults.append(f"line {node.lineno}: {name}")
    return faults


def violations(path: str, text: str) -> list[str]:
    """What a module does that its place forbids."""
    package, tree = path.split("/")[0], ast.parse(text)
    allowed = THIRD_PARTY[package] + tuple(
        name for pattern, names in IN_FILES.items() if matches(path, (pattern,)) for name in names
    )
    faults = hidden_imports(tree)
    for name in imports(tree):
        top = name.split(".")[0]
        if name.startswith("."):
            faults.append(f"{name}: a relative import")
        elif top in LAYERS:
            if top != package and not within(name, LAYERS[package]):
                faults.append(f"{name}: {package} may not import it")
        elif top not in sys.stdlib_module_names and not within(name, allowed):
            faults.append(f"{name}: not allowed in {path}")
        for module, files in ONLY_IN.items():
            if within(name, (module,)) and not matches(path, files):
                faults.append(f"{name}: only in {', '.join(files)}")
    faults += [
        f"a module called {PurePosixPath(path).stem}" for word in BANNED_NAMES if word in PurePosixPath(path).stem
    ]
    return faults


def closure(start: str, texts: Mapping[str, str]) -> set[str]:
    """Every dotted name that importing a module imports, through modules of ours; its own package's entry apart."""
    modules = {path.removesuffix(".py").replace("/", "."): text for path, text in texts.items()}
    seen, todo = {f"{start.split('.')[0]}.__init__"}, [start]
    while todo:
        module = todo.pop()
        for name in imports(ast.parse(modules[module])) if module in modules else ():
            parts = name.split(".")
            for prefix in (".".join(parts[: i + 1]) for i in range(len(parts))):  # importing a.b.c imports a and a.b
                new = {prefix, f"{prefix}.__init__"} - seen
                seen |= new
                todo += new
    return seen


@pytest.mark.parametrize("path", sorted(sources()))
def test_every_module_keeps_to_its_layer(path: str) -> None:
    assert violations(path, sources()[path]) == []


@pytest.mark.parametrize("module", HOST)
def test_host_bookkeeping_knows_no_jax(module: str) -> None:
    texts = sources()
    if f"{module.replace('.', '/')}.py" not in texts:
        pytest.skip("not built yet")
    assert not [name for name in closure(module, texts) if within(name, ("jax",))]


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("pallas_kernels/a.py", "import dflash_jax", "dflash_jax: pallas_kernels may not import it"),
        ("pallas_kernels/a.py", "from flax import struct", "flax.struct: not allowed"),
        (
            "pallas_kernels/a.py",
            "from jax.experimental.pallas import triton",
            "only in pallas_kernels/backend.py",
        ),
        ("dflash_jax/step.py", "from pallas_kernels import inject_kv", "only in pallas_kernels/*, dflash_jax/cache.py"),
        ("dflash_jax/step.py", "import convert.load", "dflash_jax may not import it"),
        ("dflash_jax/step.py", "from flax import linen", "flax.linen: not allowed"),
        ("dflash_jax/step.py", "from orbax.checkpoint import v1", "not allowed in dflash_jax/step.py"),
        ("dflash_jax/step.py", "import optax", "optax: not allowed"),
        ("convert/a.py", "import jax.numpy as jnp", "jax.numpy: not allowed"),
        ("convert/a.py", "from serving import LLM", "convert may not import it"),
        ("serving/llm.py", "import jax", "jax: not allowed in serving/llm.py"),
        ("serving/llm.py", "from convert.rules import match", "convert.rules.match: serving may not import it"),
        ("serving/llm.py", "import transformers", "transformers: not allowed"),
        ("serving/llm.py", "from . import pages", ".pages: a relative import"),
        ("serving/llm.py", "def f():\n    import json", "line 2: an import that is not at the top"),
        ("serving/llm.py", "try:\n    import json\nexcept ImportError:\n    pass", "line 2: an import that is not"),
        ("serving/llm.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass", "line 2: TYPE_CHECKING"),
        ("serving/llm.py", "import importlib\nimportlib.import_module('jax')", "line 2: import_module"),
        ("dflash_jax/cache_utils.py", "", "a module called cache_utils"),
    ],
)
def test_each_rule_can_fail(path: str, text: str, fault: str) -> None:
    assert any(fault in found for found in violations(path, text)), violations(path, text)


def test_allowed_places_are_allowed() -> None:
    assert violations("pallas_kernels/backend.py", "from jax.experimental.pallas import triton") == []
    assert violations("dflash_jax/cache.py", "from pallas_kernels import inject_kv\nfrom flax import struct") == []
    assert violations("dflash_jax/training/trainer.py", "import optax") == []
    assert violations("serving/runner.py", "import jax\nfrom convert.load import load") == []
    assert violations("serving/server_openai.py", "import pydantic") == []


def test_a_detour_to_jax_is_seen() -> None:
    texts = {
        "serving/__init__.py": "from serving.runner import Runner",
        "serving/runner.py": "import jax",
        "serving/pages.py": "from serving import radix",
        "serving/radix.py": "from dflash_jax.config import pair",
        "dflash_jax/__init__.py": "import numpy",
        "dflash_jax/config.py": "import json",
    }
    assert not [name for name in closure("serving.pages", texts) if within(name, ("jax",))]
    for path, text in (("dflash_jax/config.py", "import jax.numpy"), ("dflash_jax/__init__.py", "import jax")):
        assert [name for name in closure("serving.pages", {**texts, path: text}) if within(name, ("jax",))]
