"""Promise: `import orca_hf` costs next to nothing, and every public name is there."""

import subprocess
import sys
from types import ModuleType

import pytest

import orca_hf


def test_importing_brings_in_neither_pytorch_nor_transformers():
    code = "import orca_hf, sys; print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", orca_hf.__all__)
def test_a_public_name_is_what_it_says(name):
    assert name in dir(orca_hf)
    assert not isinstance(getattr(orca_hf, name), ModuleType), "a submodule has taken the name of a function"
    assert getattr(orca_hf, name).__doc__


def test_other_names_are_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        orca_hf.no_such_name  # noqa: B018
