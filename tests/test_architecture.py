"""The layers of the package and what each may import, read from the source without running it."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "composer_jax"

# From the ground up: a floor imports from itself and from the floors before it in this list.
FLOORS = (
    "observe",
    "ops",
    "parallel",
    "models",
    "storage",
    "data",
    "checkpoint",
    "train",
    "sampler",
    "serve",
    "sandbox",
    "tasks",
    "agent",
    "rl",
    "evals",
    "realtime",
    "schema",
    "stages",
    "scale",
    "demo",
)
EVERYWHERE = ("atomic_write", "errors", "event_loop", "extensions", "frames", "git", "host_port", "python_ast", "seeds")

# Floors and modules that work where no JAX is: a sandbox host, a grading machine, a data worker.
WITHOUT_JAX = (
    "agent",
    "data",
    "sandbox",
    "storage",
    "tasks",
    "sampler.drafts",
    "sampler.policy",
    "sampler.scheduler",
    "checkpoint.gguf.virtual_folder",
    "checkpoint.weight_chain",
    "rl.engines.ray_engines",
    "rl.rollout",
    "rl.workers",
    "serve.traffic.folder",
    "serve.traffic.redaction",
    "serve.traffic.retention",
    "evals.suite",
    "realtime.batches",
    "realtime.http_client",
    "realtime.labels",
    "realtime.simulation",
    "realtime.release",
    "realtime.track",
)
JAX_WORLD = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
# The agent talks to whatever samples through one protocol.
ONLY_MODULE = {("agent", "sampler"): "sampler.policy"}
# Heavy or optional: imported inside the function that needs them.
LAZY = {"torch", "transformers", "gguf", "gcsfs", "google", "ray", "vllm", "tensorflow"}
CATCH_ALL_NAMES = {"util", "utils", "helper", "helpers", "misc", "common"}
# Numerics follow from the fields of a config, never from what a model is called.
NETWORK = ("ops", "parallel", "models", "train", "sampler", "rl")
MODEL_NAMES = {"model_name", "model_type", "model_id", "architecture", "architectures"}
# One concept per file and function.
FILE_LINES, FUNCTION_LINES, FRAGMENT_LINES = 600, 60, 40
OUTSIDE = ("launch", "configs", "benchmarks", "examples")


@dataclass(frozen=True)
class Import:
    module: str  # dotted, absolute
    line: int
    at_import: bool  # runs when the importing module is imported, rather than in a function or for types only
    for_types: bool  # below `if TYPE_CHECKING`


def module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imports_of(file: Path, root: Path) -> list[Import]:
    """Every import of a file; `from a import b` counts as a.b where that is a module, else as a."""
    here = module_name(file, root).split(".")
    package = here if file.name == "__init__.py" else here[:-1]
    imports = []

    def visit(node: ast.AST, at_import: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import):
            imports.extend(Import(alias.name, node.lineno, at_import, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                inner = root.joinpath(*base.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                module = f"{base}.{alias.name}" if is_module else base
                imports.append(Import(module, node.lineno, at_import, for_types))
        for child in ast.iter_child_nodes(node):
            in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_type_check = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            types_only = for_types or (is_type_check and child in node.body)
            visit(child, at_import and not in_function and not types_only, types_only)

    visit(tree_of(file), at_import=True, for_types=False)
    return imports


def path_in_package(module: str) -> str | None:
    """'models.decoder' for 'composer_jax.models.decoder'; None for a module of another package."""
    if module == PACKAGE:
        return ""
    return module.removeprefix(f"{PACKAGE}.") if module.startswith(f"{PACKAGE}.") else None


def is_or_is_in(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def files_of(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def floor_violations(root: Path) -> Iterator[str]:
    for file in files_of(root):
        name = path_in_package(module_name(file, root))
        floor = name.split(".")[0]
        where = file.relative_to(root)
        if name == "":
            continue  # the package's front door may name any floor
        if floor not in FLOORS:
            if name not in EVERYWHERE:
                yield f"{where}: {floor} is not a floor; the floors are {', '.join(FLOORS)}"
            allowed = ()
        else:
            allowed = FLOORS[: FLOORS.index(floor) + 1]
        for imported in imports_of(file, root):
            if is_or_is_in(imported.module, ("launch", "configs", "benchmarks", "examples", "tests")):
                yield f"{where}:{imported.line}: the library imports {imported.module}, which imports the library"
            target = path_in_package(imported.module)
            if target is None or target in EVERYWHERE:
                continue
            target_floor = target.split(".")[0]
            if target == "":
                yield f"{where}:{imported.line}: imports the front door of the package; import the module itself"
            elif target_floor not in allowed:
                yield f"{where}:{imported.line}: {floor or name} may not import {target_floor}, a floor above"
            only = ONLY_MODULE.get((floor, target_floor))
            if only and target != only:
                yield f"{where}:{imported.line}: {floor} may import {only} only, not {target}"


def demo_violations(root: Path) -> Iterator[str]:
    """Import paths of the demo in the library: a user can delete demo/, so only a config names what is in it."""
    for file in files_of(root):
        if is_or_is_in(path_in_package(module_name(file, root)) or "", ("demo",)):
            continue
        tree = tree_of(file)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                if f"{PACKAGE}.demo" in node.value:
                    yield f"{file.relative_to(root)}:{node.lineno}: names {node.value!r}; a config does that"


def jax_violations(root: Path) -> Iterator[str]:
    """Modules of WITHOUT_JAX that import JAX, themselves or through what they import."""
    files = {module_name(file, root): file for file in files_of(root)}
    for name, file in files.items():
        if not is_or_is_in(path_in_package(name), WITHOUT_JAX):
            continue
        for imported in imports_of(file, root):
            if imported.module.split(".")[0] in JAX_WORLD:
                yield f"{file.relative_to(root)}:{imported.line}: imports {imported.module}; there is no JAX here"
        seen, queue = {name}, [(name, name)]
        while queue:
            module, path = queue.pop()
            if module not in files:
                continue
            for imported in imports_of(files[module], root):
                if not imported.at_import:
                    continue
                if module != name and imported.module.split(".")[0] in JAX_WORLD:
                    yield f"{file.relative_to(root)}: reaches {imported.module} through {path}"
                # Importing a.b.c runs a, a.b and a.b.c.
                parts = imported.module.split(".")
                for end in range(1, len(parts) + 1):
                    reached = ".".join(parts[:end])
                    if reached in files and reached not in seen:
                        seen.add(reached)
                        queue.append((reached, f"{path} -> {reached}"))


def circle_violations(root: Path) -> Iterator[str]:
    """Modules that import each other in a circle; an import inside a function counts, one for types only does not."""
    files = {module_name(file, root): file for file in files_of(root)}
    imports = {
        name: {imported.module for imported in imports_of(file, root) if not imported.for_types} & files.keys()
        for name, file in files.items()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        # Its second argument is one circle, each module imported by the next.
        yield f"{' <- '.join(error.args[1])}: a circle; move what two of them need into a module below both"


def lazy_violations(root: Path) -> Iterator[str]:
    for file in files_of(root):
        for imported in imports_of(file, root):
            if imported.at_import and imported.module.split(".")[0] in LAZY:
                where = f"{file.relative_to(root)}:{imported.line}"
                yield f"{where}: imports {imported.module} with the module; import it where it is used"


def name_violations(root: Path) -> Iterator[str]:
    for folder in (PACKAGE, "launch", "configs", "benchmarks", "examples", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.stem in CATCH_ALL_NAMES and "__pycache__" not in path.parts:
                yield f"{path.relative_to(root)}: name a file after the one thing it is about"


def class_name_violations(root: Path) -> Iterator[str]:
    """Classes of one name in two places, private ones and those inside functions included: one word, one thing."""
    declared: dict[str, str] = {}
    for file in files_of(root):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                where = f"{file.relative_to(root)}:{node.lineno}"
                if (first := declared.setdefault(node.name, where)) != where:
                    yield f"{where}: {first} declares a class {node.name}, too; give one of them another name"


def model_name_violations(root: Path) -> Iterator[str]:
    """Comparisons of, or look-ups by, what a model is called, on the floors that compute."""

    def is_model_name(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).split(".")[-1]
            return node.attr in MODEL_NAMES or (node.attr == "name" and owner.endswith(("config", "cfg")))
        return isinstance(node, ast.Name) and node.id in MODEL_NAMES

    for file in files_of(root):
        if not is_or_is_in(path_in_package(module_name(file, root)), NETWORK):
            continue
        for node in ast.walk(tree_of(file)):
            suspects: list[ast.AST] = []
            if isinstance(node, ast.Compare):
                suspects = [node.left, *node.comparators]
            elif isinstance(node, ast.Match):
                suspects = [node.subject]
            elif isinstance(node, ast.Subscript):
                suspects = [node.slice]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("startswith", "endswith", "find", "index", "count", "get", "pop"):
                    suspects = [node.func.value, *node.args]
            for suspect in suspects:
                if any(is_model_name(inner) for inner in ast.walk(suspect)):
                    where = f"{file.relative_to(root)}:{node.lineno}"
                    yield f"{where}: decides by a model's name; add a config field"
                    break


def package_violations(root: Path) -> Iterator[str]:
    """Folders that setup.py would leave out of the wheel, because they are not packages."""
    for folder in (PACKAGE, "launch", "configs", "benchmarks"):
        for file in sorted((root / folder).rglob("*.py")):
            if not (file.parent / "__init__.py").exists():
                yield f"{file.parent.relative_to(root)}: has Python files but no __init__.py"
                break


def length_violations(root: Path) -> Iterator[str]:
    """Files and functions that are longer than one concept needs."""
    for folder in (PACKAGE, "launch", "configs", "benchmarks", "examples", "tests"):
        for file in sorted((root / folder).rglob("*.py")):
            where, source = str(file.relative_to(root)), file.read_text(encoding="utf-8")
            if (lines := len(source.splitlines())) > FILE_LINES:
                yield f"{where}: {lines} lines; split what is over {FILE_LINES}"
            for node in ast.walk(tree_of(file)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > FUNCTION_LINES:
                        yield f"{where}:{node.lineno}: {node.name} has {lines} lines, over {FUNCTION_LINES}; split it"


def fragment_violations(root: Path) -> Iterator[str]:
    """Small files that only one other file of their folder uses; not extension points, nor entries of a table."""
    guide = root / "CONTRIBUTING.md"
    extension_points = guide.read_text(encoding="utf-8") if guide.exists() else ""
    files = {module_name(file, root): file for file in files_of(root)}
    outside = [file for folder in OUTSIDE for file in (root / folder).rglob("*.py")]
    used_outside = {imported.module for file in outside for imported in imports_of(file, root)}
    for name, file in files.items():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        where = str(file.relative_to(root))
        if lines >= FRAGMENT_LINES or file.name == "__init__.py" or name in used_outside or where in extension_points:
            continue
        importers = [other for other in files.values() if any(i.module == name for i in imports_of(other, root))]
        if len(importers) != 1 or importers[0].parent != file.parent or importers[0].name == "__init__.py":
            continue
        if not is_in_table(name, importers[0]) and not any(f"{name}:" in other.read_text() for other in outside):
            yield f"{where}: {lines} lines that only {importers[0].name} imports; merge it into that"


def is_in_table(module: str, importer: Path) -> bool:
    """Whether a value at the top level of the importing file names what it imports from a module."""
    statements = tree_of(importer).body
    values = [node.value for node in statements if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    named = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
    imports = [node for node in statements if isinstance(node, ast.ImportFrom) and node.module == module]
    return any(alias.name in named for node in imports for alias in node.names)


RULES = {
    "lengths": length_violations,
    "fragments": fragment_violations,
    "floors": floor_violations,
    "demo by name": demo_violations,
    "without jax": jax_violations,
    "circles": circle_violations,
    "lazy imports": lazy_violations,
    "file names": name_violations,
    "class names": class_name_violations,
    "model names": model_name_violations,
    "packages": package_violations,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_holds(rule):
    assert files_of(ROOT)
    assert list(RULES[rule](ROOT)) == []


BAD_EXAMPLES = [
    # rule, file, its source, what the complaint says
    ("floors", "models/a.py", "import composer_jax.tasks.task", "models may not import tasks"),
    ("floors", "models/a.py", "from composer_jax import data", "models may not import data"),
    ("floors", "ops/a.py", "from ..parallel.mesh import make", "ops may not import parallel"),
    ("floors", "data/a.py", "def f():\n    from composer_jax.agent import x", "data may not import agent"),
    (
        "floors",
        "train/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import composer_jax.rl",
        "a.py:3: train may not import rl",
    ),
    ("floors", "rl/a.py", "from composer_jax import Decoder", "front door"),
    ("floors", "rl/a.py", "from launch import flags", "launch, which imports the library"),
    ("floors", "agent/a.py", "from composer_jax.sampler.engine import E", "sampler.policy only"),
    ("floors", "errors.py", "import composer_jax.ops", "errors may not import ops"),
    ("floors", "tools.py", "", "tools is not a floor"),
    ("floors", "rl/a.py", "import composer_jax.demo.bugfix", "a floor above"),
    ("demo by name", "rl/a.py", "x = 'composer_jax.demo.bugfix:Bugfix'", "a config does that"),
    ("without jax", "tasks/a.py", "import jax.numpy as jnp", "tasks/a.py:1: imports jax.numpy"),
    ("without jax", "data/a.py", "def f():\n    import optax", "imports optax"),
    ("without jax", "agent/a.py", "from composer_jax.sampler.policy import S", "reaches jax through"),
    ("circles", "sampler/engine.py", "from composer_jax import sampler", "composer_jax.sampler <- "),
    ("circles", "sampler/engine.py", "def f():\n    from composer_jax import sampler", "composer_jax.sampler <- "),
    ("lazy imports", "checkpoint/a.py", "try:\n    import torch\nexcept ImportError: pass", "imports torch"),
    ("file names", "data/utils.py", "", "data/utils.py"),
    ("class names", "rl/a.py", "class A: pass\ndef f():\n    class A: pass", "a.py:3: composer_jax/rl/a.py:1 declares"),
    ("model names", "models/a.py", "def f(c): return c.model_name.startswith('k2')", "decides by"),
    ("model names", "models/a.py", "def f(config): return 2 if config.name == 'k2' else 1", "decides by"),
    ("model names", "train/a.py", "def f(model_type): return {'k2': 1}[model_type]", "decides by"),
    ("lengths", "data/a.py", "x = 1\n" * 600 + "y = 2", "data/a.py: 601 lines"),
    ("lengths", "data/a.py", "def f():\n" + "    x = 1\n" * 60, "data/a.py:1: f has 61 lines"),
    ("fragments", "sampler/engine.py", "from composer_jax.sampler import policy", "policy.py: 0 lines"),
    ("packages", "data/deep/a.py", "", "data/deep: has Python files but no __init__.py"),
]


def make_package(root: Path) -> Path:
    """Returns a package with every floor, in which no rule is broken but that the sampler needs JAX."""
    package = root / PACKAGE
    for floor in FLOORS:
        (package / floor).mkdir(parents=True)
        (package / floor / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "errors.py").touch()
    (package / "sampler" / "__init__.py").write_text("from composer_jax.sampler import engine\n")
    (package / "sampler" / "engine.py").write_text("import jax\n")
    (package / "sampler" / "policy.py").touch()
    return package


@pytest.mark.parametrize(("rule", "file", "source", "expected"), BAD_EXAMPLES)
def test_a_violation_is_reported(tmp_path, rule, file, source, expected):
    package = make_package(tmp_path)
    before = list(RULES[rule](tmp_path)) if rule != "without jax" else []
    assert before == []
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(source + "\n")
    tree_of.cache_clear()
    imports_of.cache_clear()
    complaints = list(RULES[rule](tmp_path))
    assert any(expected in complaint for complaint in complaints), complaints


GOOD_EXAMPLES = [
    ("lengths", "data/a.py", "def f():\n" + "    x = 1\n" * 59 + "y = 2\n" * 539),
    (
        "floors",
        "rl/a.py",
        "from composer_jax.errors import UserError\nfrom composer_jax.agent import episode",
    ),
    ("floors", "evals/a.py", "from . import suites\nfrom composer_jax.evals.suites import x\nimport jax"),
    ("floors", "__init__.py", "from composer_jax.rl import algorithm"),
    ("class names", "data/a.py", "class Row: pass\nclass _Row: pass\nrow = Row()"),
    ("demo by name", "stages/a.py", '"""Such as composer_jax.demo.bugfix:Bugfix."""'),
    ("demo by name", "demo/a.py", "x = 'composer_jax.demo.bugfix:Bugfix'"),
    (
        "circles",
        "sampler/__init__.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from composer_jax import sampler",
    ),
    ("fragments", "rl/a.py", "from composer_jax.sampler import policy"),
    ("fragments", "sampler/engine.py", "from composer_jax.sampler.policy import User\nPOLICIES = {'user': User}"),
    ("lazy imports", "checkpoint/a.py", "def f():\n    import torch"),
    ("model names", "models/a.py", "def f(config): return config.n_experts == 8, log.info(config.name)"),
    ("model names", "checkpoint/a.py", "def f(h): return h.model_type == 'deepseek_v3'"),
]


@pytest.mark.parametrize(("rule", "file", "source"), GOOD_EXAMPLES)
def test_what_is_allowed_is_not_reported(tmp_path, rule, file, source):
    (make_package(tmp_path) / file).write_text(source + "\n")
    assert list(RULES[rule](tmp_path)) == []


def test_importing_the_package_is_quick_and_light():
    code = (
        "import sys, time; start = time.perf_counter(); import composer_jax; "
        "print(time.perf_counter() - start, *(sys.modules.keys() & set(sys.argv[1:])))"
    )
    heavy = ["jax", "flax", "grain", "matplotlib", "tokenizers", *LAZY]
    best = 1e9
    for _ in range(3):  # the fastest of three, because the machine may be busy
        command = [sys.executable, "-c", code, *heavy]
        seconds, *loaded = subprocess.check_output(command, cwd=ROOT, text=True).split()
        assert loaded == []
        best = min(best, float(seconds))
    assert best < 0.5
