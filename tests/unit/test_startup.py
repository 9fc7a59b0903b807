"""What processes leave out while they start, and have afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlcore.startup import leaving_out

SCRIPT = """
import sys
from rlcore.startup import making_what_stays

with making_what_stays():
    from transformers import AutoModelForCausalLM
    import rlcore.models.torch_policy
print(sorted({"scipy", "sklearn", "torch"} & sys.modules.keys()))
import scipy.stats, sklearn
"""


def test_what_is_left_out_is_back_behind_it_and_what_is_loaded_stays() -> None:
    with leaving_out("scipy.odr", "json"):
        with pytest.raises(ModuleNotFoundError):
            __import__("scipy.odr")
        assert __import__("json") is sys.modules["json"]
    assert "scipy.odr" not in sys.modules


def test_transformers_comes_without_what_nobody_here_asks_of_it() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["['torch']"]
