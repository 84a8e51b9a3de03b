"""Reads the imports of the source tree without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Import:
    """One import of a Stageline module.

    Args:
        importer, imported: dotted module names.
        is_lazy: inside a function.
        is_for_types: under `if TYPE_CHECKING`, never executed.
    """

    importer: str
    imported: str
    line: int
    is_lazy: bool
    is_for_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> dict[str, Path]:
    """Dotted name to file, for every module of the package."""
    return {_dotted_name(path): path for path in sorted((SOURCE / "stageline").rglob("*.py"))}


def room_of(module: str) -> str:
    """The package or top-level module right below `stageline`; "__init__" for `stageline` itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def stageline_imports() -> list[Import]:
    known = modules()
    return [found for name, path in known.items() for found in _imports(name, ast.parse(path.read_text()), set(known))]


def _dotted_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(importer: str, tree: ast.Module, known: set[str]) -> Iterator[Import]:
    def visit(node: ast.AST, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
        for imported in _imported_modules(node, known):
            yield Import(importer, imported, node.lineno, is_lazy, is_for_types)  # type: ignore[attr-defined]
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_type_check = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_lazy or is_function, is_for_types or is_type_check)

    yield from visit(tree, False, False)


def _imported_modules(node: ast.AST, known: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports would escape the table"
        # `from package import name` is an import of the submodule where there is one.
        full_names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [full if full in known else str(node.module) for full in full_names]
    else:
        return []
    return sorted({name for name in names if name.split(".")[0] == "stageline"})
