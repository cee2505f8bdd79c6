"""The checks behind test_structure.py: each takes source text and returns what is wrong with it, one line per fault."""

import ast
from collections.abc import Iterator

# Each module may import only from those above it. A folder (families, models) counts as one entry.
ORDER = (
    "errors",
    "layout",
    "split",
    "shared",
    "comm",
    "moves",
    "dtensor",
    "params",
    "gradients",
    "context",
    "precision",
    "recompute",
    "linear",
    "embedding",
    "norm",
    "dropout",
    "loss",
    "head",
    "region",
    "model",
    "become",
    "rules",
    "resolved",
    "totality",
    "adapters",
    "resolve",
    "init",
    "families",
    "checks",
    "parallelize",
    "figures",
    "plan_tree",
    "plan_advice",
    "plan_report",
    "planning",
    "state",
    "together",
    "adapter_files",
    "storage",
    "checkpoint",
    "folder",
    "folder_out",
    "weights",
    "pretrained",
    "launch",
    "verdict",
    "trial",
    "places",
    "recording",
    "causes",
    "divergence",
    "verification",
    "user_model",
    "static",
    "traced",
    "words",
    "observe",
    "formula",
    "picture",
    "report",
    "scene",
    "svg",
    "excalidraw",
    "matrices",
    "rows",
    "bands",
    "draw",
    "markup",
    "page",
    "__init__",  # the public names: what stands above is the library, what stands below uses it
    "models",
    "source",
    "options",
    "model_options",
    "data",
    "show",
    "show_trace",
    "runs",
    "sample",
    "text",
    "loop",
    "generate",
    "train",
    "finetune",
    "cli",
    "__main__",
)
FREE = "__init__"  # re-exports, so it may import anything
ISOLATED = "models"  # plain PyTorch: knows nothing of parallelism

MAX_FILE = 300
MAX_FUNCTION = 60
MAX_BY_FILE = {"models/gpt.py": 150, "train.py": 249}
MAY_CALL_TO_LOCAL = {"params.py"}
MAY_USE_PRIVATE_TORCH = {"comm.py", "gradients.py", "dtensor.py"}


def import_direction(source: str, path: str) -> list[str]:
    """Imports that point upward. `path` is relative to the package: "linear.py", "families/llama.py"."""
    parts = path.removesuffix(".py").split("/")
    own = parts[0]
    if own not in ORDER:
        return [f"{path}: the module {own!r} has no place in ORDER (tests/structure.py): add it where it belongs"]
    if own == FREE:
        return []
    faults = []
    for line, imported in _package_imports(ast.parse(source), package=["colrow", *parts[:-1]]):
        inside_folder = imported == own and len(parts) > 1
        if imported not in ORDER:
            faults.append(f"{path}:{line}: imports {imported!r}, which has no place in ORDER (tests/structure.py)")
        elif own == ISOLATED and not (inside_folder and parts[-1] == "__init__"):
            faults.append(f"{path}:{line}: imports {imported!r}; a model knows nothing of colrow")
        elif not inside_folder and ORDER.index(imported) >= ORDER.index(own):
            faults.append(f"{path}:{line}: {own} imports {imported}, which stands below it")
    return faults


def _package_imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, first name below colrow) of every import of the package, relative or absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name.split(".")
                if module[0] == "colrow":
                    yield node.lineno, module[1] if len(module) > 1 else FREE
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            if base == ["colrow"]:  # from colrow import rules, move: a module, or one of the public names
                yield from ((node.lineno, alias.name if alias.name in ORDER else FREE) for alias in node.names)
            elif base[0] == "colrow":
                yield node.lineno, base[1]


def size(source: str, path: str) -> list[str]:
    """A file or a function that does not fit on the screens we give it."""
    lines, most = len(source.splitlines()), MAX_BY_FILE.get(path, MAX_FILE)
    faults = [f"{path}: {lines} lines; at most {most}"] if lines > most else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                faults.append(f"{path}:{node.lineno}: {node.name} has {lines} lines; at most {MAX_FUNCTION}")
    return faults


def statements(source: str, path: str) -> list[str]:
    """`global`; `assert` as validation (`python -O` removes it); an `except` that would swallow our own mistakes."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Global):
            faults.append(f"{path}:{node.lineno}: global {', '.join(node.names)}")
        elif isinstance(node, ast.Assert):
            faults.append(f"{path}:{node.lineno}: assert; raise a ColrowError with its four clauses")
        elif isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises_again(node):
            faults.append(f"{path}:{node.lineno}: a broad except; name the errors that are expected here")
    return faults


def _is_broad(kind: ast.expr | None) -> bool:
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(name is None or _dotted(name)[-1:] in (["Exception"], ["BaseException"]) for name in names)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Cleaning up after any error is fine, if the error goes on."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def to_local(source: str, path: str) -> list[str]:
    """A bare `.to_local()` gives silently wrong gradients: parameters are read through `local(param, grad=...)`."""
    if path in MAY_CALL_TO_LOCAL:
        return []
    return [
        f"{path}:{node.lineno}: .to_local; read parameters with params.local, which asks for the gradient's layout"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "to_local"
    ]


def private_torch(source: str, path: str) -> list[str]:
    """A private part of torch, imported or reached by attributes: only where a new torch is checked for it."""
    if path in MAY_USE_PRIVATE_TORCH:
        return []
    tree = ast.parse(source)
    torch_names, faults = {"torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full_names = {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full_names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        for name, full_name in full_names.items():
            if full_name.split(".")[0] == "torch":
                torch_names.add(name)
                if _has_private(full_name.split(".")):
                    faults.append(f"{path}:{node.lineno}: imports {full_name}")
    for node in ast.walk(tree):
        chain = _dotted(node)
        if chain and chain[0] in torch_names and chain[-1].startswith("_") and _has_private(chain[1:]):
            faults.append(f"{path}:{node.lineno}: uses {'.'.join(chain)}")  # type: ignore[attr-defined]
    return faults


def _dotted(node: ast.AST) -> list[str]:
    """`a.b.c` as ["a", "b", "c"]; [] for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return [*head, node.attr] if head else []
    return []


def _has_private(names: list[str]) -> bool:
    return any(name.startswith("_") and not name.startswith("__") for name in names)
