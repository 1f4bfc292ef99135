"""The reference that `make docs` builds from the docstrings: a page for each public module, and one for the magics.

``python -m tests.reference FOLDER``. The pages are pdoc's, which takes docstrings as Markdown.
"""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from IPython.core.magic_arguments import MagicArgumentParser
from pdoc import doc, render

import tfnb
from tfnb.magics.extension import TfnbMagics

MODULES = ("tfnb", "tfnb.train", "tfnb.nn", "tfnb.datasets", "tfnb.summary", "tfnb.errors")
MAGICS = "tfnb_magics"


def magic_parsers() -> dict[str, MagicArgumentParser]:
    """The parser of each magic's options, by the magic's name."""
    names = sorted(set(TfnbMagics.magics["line"]) | set(TfnbMagics.magics["cell"]))
    return {name: getattr(TfnbMagics, name).parser for name in names}


def help_text(parser: MagicArgumentParser) -> str:
    """The help of a magic in lines of a page's width, without the mark of a literal block before it."""
    lines = parser.format_help().removeprefix("::\n\n").splitlines()
    return "\n".join(textwrap.fill(line, 100, replace_whitespace=False) for line in lines)


def magics_page() -> ModuleType:
    """A module whose docstring is the help of all magics."""
    page = ModuleType(MAGICS)
    begin = "The magics of `%load_ext tfnb`. Each is a line and a cell magic; `%tfgraph -h` shows the same in a cell."
    parts = (f"## %{name}\n\n```text\n{help_text(parser)}\n```" for name, parser in magic_parsers().items())
    page.__doc__ = "\n\n".join([begin, *parts])
    return page


def pages() -> Iterator[tuple[str, str]]:
    """The name of each file of the reference, and its HTML."""
    for name in tfnb.__all__:
        getattr(tfnb, name)  # loaded when first used, and pdoc looks at what is loaded
    render.configure(docformat="markdown", show_source=False, footer_text=f"tfnb {tfnb.__version__}")
    modules = {name: doc.Module.from_name(name) for name in MODULES}
    modules[MAGICS] = doc.Module(magics_page())
    for module in modules.values():
        # A public function hides the room of its name, as in `tfnb.gradients`: no rooms, but the pages that there are.
        module.__dict__["submodules"] = [page for page in modules.values() if page is not module]
    # Names that only type checkers import are shown as they are written, and members of torch's class without a link.
    warnings.filterwarnings("ignore", "Error parsing type annotation|Cannot determine where")
    for name, module in modules.items():
        yield f"{name.replace('.', '/')}.html", render.html_module(module, modules)
    yield "index.html", render.html_index(modules)
    yield "search.js", render.search_index(modules)


def build(folder: Path) -> None:
    """Write the reference."""
    for name, text in pages():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
