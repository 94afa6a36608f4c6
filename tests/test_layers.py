"""The layers hold: a file imports only from its own layer or below, without cycles. Reads sources, imports none."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "orca_hf"
KERNELS = ROOT / "kernels" / "orca_kernels"

# Every module of orca_hf has its place here; a folder has one for all that is in it.
LAYERS = [
    ["config", "errors", "interruption"],
    ["request", "kv_manager"],
    ["scheduler"],
    [
        "adapters",
        "attention",
        "attention_context",
        "attention_name",
        "attention_sources",
        "batch",
        "batch_invariance",
        "decode_graphs",
        "known_code",
        "known_forwards",
        "kv_pool",
        "multinomial",
        "openmp",
        "packed_linear",
        "packed_weights",
        "same_code",
        "fused_forwards",
        "fused_layer",
        "parity",
        "patches",
        "random_state",
        "sampling",
        "sampling_options",
        "warping",
    ],
    ["runner", "trial"],
    ["backoff", "calls", "engines", "outcome", "speculation", "work"],
    ["checkpoint", "concurrent_calls", "eligibility", "generate", "model_eligibility", "prepared_call"],
    ["__init__", "loading", "pipelines", "serving", "wrapping"],
    ["bench", "cli", "demo", "flags", "server"],
]
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
PURE_LAYERS = 3  # the lowest ones: nothing but the standard library
KERNELS_MAY_IMPORT = {"torch", "triton"}


@dataclass(frozen=True)
class Import:
    """One import, resolved: `target` is a dotted module name such as orca_hf.config."""

    target: str
    line: int
    for_types_only: bool

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file: `name` is dotted, orca_hf for the package's __init__."""

    name: str
    file: str
    source: str

    @property
    def place(self) -> str:
        """Its entry in the layer table."""
        return place(self.name)

    def imports(self, modules: set[str]) -> list[Import]:
        """All imports of the file, those inside functions and under TYPE_CHECKING too.

        `from package import name` means package.name where `modules` has one of that name, else the package.
        """
        package = self.name if self.file.endswith("__init__.py") else self.name.rpartition(".")[0]
        found = []
        for node, for_types_only in walk(ast.parse(self.source, self.file)):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno, for_types_only) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join(parents + ([node.module] if node.module else []))
                for alias in node.names:
                    name = f"{base}.{alias.name}"
                    found.append(Import(name if name in modules else base, node.lineno, for_types_only))
        return found


def walk(node: ast.AST, for_types_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below `node`, each with whether it stands under `if TYPE_CHECKING`."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                under = for_types_only or (
                    isinstance(node, ast.If) and name == "body" and "TYPE_CHECKING" in ast.unparse(node.test)
                )
                yield child, under
                yield from walk(child, under)


def place(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def read_modules(package: Path) -> list[Module]:
    modules = []
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(name, str(path.relative_to(ROOT)), path.read_text()))
    return modules


def unplaced(modules: list[Module]) -> list[str]:
    return [f"{m.file} is in no layer: give it its place in LAYERS" for m in modules if m.place not in LAYER_OF]


def arrows_upward(modules: list[Module]) -> list[str]:
    names = {module.name for module in modules}
    faults = []
    for module in modules:
        for found in module.imports(names):
            if found.top != "orca_hf":
                continue
            own, other = LAYER_OF[module.place], LAYER_OF.get(place(found.target))
            if other is None:
                faults.append(f"{module.file}:{found.line} (layer {own}) imports {found.target}, which is in no layer")
            elif other > own:
                faults.append(f"{module.file}:{found.line} (layer {own}) imports {found.target} (layer {other})")
    return faults


def cycle(modules: list[Module]) -> list[str]:
    """Some modules that import each other in a circle, or none."""
    names = {module.name for module in modules}
    graph = {
        module.name: {found.target for found in module.imports(names) if found.target in names} for module in modules
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def foreign_imports(modules: list[Module], allowed: set[str], *, types_too: bool = True) -> list[str]:
    """Imports of anything but the standard library, the file's own package and `allowed`."""
    names = {module.name for module in modules}
    return [
        f"{module.file}:{found.line} imports {found.target}, but may import only "
        f"{', '.join(sorted({module.name.partition('.')[0], *allowed}))} and the standard library"
        for module in modules
        for found in module.imports(names)
        if (types_too or not found.for_types_only)
        and found.top not in {module.name.partition(".")[0], *allowed, *sys.stdlib_module_names}
    ]


@pytest.fixture(scope="module")
def library() -> list[Module]:
    return read_modules(LIBRARY)


@pytest.fixture(scope="module")
def kernels() -> list[Module]:
    return read_modules(KERNELS)


def test_every_file_has_its_place(library: list[Module]) -> None:
    assert len(library) > 10
    assert unplaced(library) == []


def test_no_file_imports_from_a_higher_layer(library: list[Module]) -> None:
    assert arrows_upward([module for module in library if module.place in LAYER_OF]) == []


def test_no_file_of_the_library_imports_itself_through_others(library: list[Module]) -> None:
    assert cycle(library) == []


def test_no_file_of_the_kernels_imports_itself_through_others(kernels: list[Module]) -> None:
    assert cycle(kernels) == []


def test_lowest_layers_import_the_standard_library_only(library: list[Module]) -> None:
    pure = [module for module in library if LAYER_OF.get(module.place, PURE_LAYERS) < PURE_LAYERS]
    assert len(pure) == 6
    assert foreign_imports(pure, allowed=set()) == []


def test_engine_needs_torch_for_its_types_only(library: list[Module]) -> None:
    engine = [module for module in library if module.place == "engines"]
    assert len(engine) == 1
    assert foreign_imports(engine, allowed=set(), types_too=False) == []


def test_kernels_import_torch_and_triton_only(kernels: list[Module]) -> None:
    assert len(kernels) > 5
    assert foreign_imports(kernels, allowed=KERNELS_MAY_IMPORT) == []


# The reader itself, on sources written for it.


def one(name: str, source: str) -> Module:
    return Module(f"orca_hf.{name}", f"orca_hf/{name.replace('.', '/')}.py", source)


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        (
            "scheduler",
            "from orca_hf.runner import ModelRunner",
            "orca_hf/scheduler.py:1 (layer 2) imports orca_hf.runner (layer 4)",
        ),
        (
            "scheduler",
            "from orca_hf import runner",
            "orca_hf/scheduler.py:1 (layer 2) imports orca_hf.runner (layer 4)",
        ),
        ("scheduler", "import orca_hf.runner", "orca_hf/scheduler.py:1 (layer 2) imports orca_hf.runner (layer 4)"),
        ("scheduler", "from .runner import x", "orca_hf/scheduler.py:1 (layer 2) imports orca_hf.runner (layer 4)"),
        ("scheduler", "from . import runner", "orca_hf/scheduler.py:1 (layer 2) imports orca_hf.runner (layer 4)"),
        ("cli.main", "from ..runner import x", None),
        ("scheduler", "import orca_hf", "orca_hf/scheduler.py:1 (layer 2) imports orca_hf (layer 7)"),
        ("engines", "from orca_hf import wrap", "orca_hf/engines.py:1 (layer 5) imports orca_hf (layer 7)"),
        (
            "config",
            "def f():\n    import orca_hf.wrapping",
            "orca_hf/config.py:2 (layer 0) imports orca_hf.wrapping (layer 7)",
        ),
        (
            "runner",
            "if TYPE_CHECKING:\n    from orca_hf.engines import Engine",
            "orca_hf/runner.py:2 (layer 4) imports orca_hf.engines (layer 5)",
        ),
        (
            "engines",
            "from orca_hf.novelty import x",
            "orca_hf/engines.py:1 (layer 5) imports orca_hf.novelty, which is in no layer",
        ),
        ("engines", "from orca_hf.runner import x\nfrom orca_hf.config import y\nimport torch", None),
        ("patches", "from orca_hf.attention import x", None),
        ("cli", "from orca_hf import __version__", None),
    ],
)
def test_reader_names_the_file_the_import_and_both_layers(name: str, source: str, fault: str | None) -> None:
    modules = [one(name, source), one("runner" if name != "runner" else "config", ""), one("novelty", "")]
    assert arrows_upward(modules[:2]) == ([fault] if fault else [])


def test_reader_finds_a_file_without_a_place() -> None:
    assert unplaced([one("novelty", ""), one("engines", "")]) == [
        "orca_hf/novelty.py is in no layer: give it its place in LAYERS"
    ]


def test_reader_finds_a_circle() -> None:
    circle = [one("wrapping", "from .loading import x"), one("loading", "def f():\n    from orca_hf.wrapping import y")]
    assert set(cycle(circle)) == {"orca_hf.wrapping", "orca_hf.loading"}
    assert cycle(circle[:1]) == []


def test_reader_tells_an_import_for_types_from_one_at_run_time() -> None:
    for_types = one("engines", "if TYPE_CHECKING:\n    from torch import Tensor\nelse:\n    import enum")
    at_run_time = one("engines", "if TYPE_CHECKING:\n    import enum\nelse:\n    import torch")
    assert foreign_imports([for_types], set(), types_too=False) == []
    for module, types_too in [(for_types, True), (at_run_time, False)]:
        (fault,) = foreign_imports([module], set(), types_too=types_too)
        assert "imports torch, but may import only orca_hf" in fault


@pytest.mark.parametrize("source", ["import orca_hf", "from orca_hf.config import x", "import transformers.utils as u"])
def test_reader_finds_what_the_kernels_may_not_import(source: str) -> None:
    kernel = Module("orca_kernels.tiles", "kernels/orca_kernels/tiles.py", f"import torch\n{source}")
    (fault,) = foreign_imports([kernel], KERNELS_MAY_IMPORT)
    assert fault.startswith(f"kernels/orca_kernels/tiles.py:2 imports {source.split()[1]}")
