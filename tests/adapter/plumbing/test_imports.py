"""The public names of a package are read from its code in any form of installation."""

import compileall
import shutil
import subprocess
import sys

import pytest

PACKAGE = '''
"""A package, with text that looks like code: from .absent import Absent."""

from typing import TYPE_CHECKING

from genlight.adapter.plumbing.imports import lazy_exports

if TYPE_CHECKING:
    from json import dumps as dumps

    from .inner.part import (
        One as One,
        Two as Two,
    )
    from .other import Three as Three, four as four
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, ("Two",))
'''


def optimized_without_source(folder):
    compileall.compile_dir(folder, quiet=1, legacy=True, optimize=2)
    for path in folder.rglob("*.py"):
        path.unlink()
    return folder


def zipped(folder):
    return shutil.make_archive(str(folder), "zip", folder)


@pytest.mark.parametrize("form", [None, optimized_without_source, zipped])
def test_names_resolve_with_and_without_source_files(tmp_path, form):
    package = tmp_path / "site" / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "inner" / "__init__.py").touch()
    (package / "inner" / "part.py").write_text("One, Two = 1, 2\n")
    (package / "other.py").write_text("Three, four = 3, 4\n")
    site = package.parent if form is None else form(package.parent)
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import package\n"
        "assert 'package.other' not in sys.modules\n"
        "from package import One, Two, Three, four, dumps\n"
        "assert (One, Two, Three, four, dumps([])) == (1, 2, 3, 4, '[]')\n"
        "assert package.__all__ == ['One', 'Three', 'dumps', 'four'], package.__all__\n"
        "assert not hasattr(package, 'Absent')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
