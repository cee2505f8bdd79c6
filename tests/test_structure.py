"""The package keeps its shape: imports flow downward, files and functions stay short, and known traps stay out.

Every check is also shown a bad sample, so that none of them can pass by not looking.
"""

from pathlib import Path

import pytest

import structure

PACKAGE = Path(__file__).parent.parent / "src" / "colrow"
CHECKS = [
    structure.import_direction,
    structure.size,
    structure.statements,
    structure.to_local,
    structure.private_torch,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_has_no_fault(check):
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no modules under {PACKAGE}"
    faults = [fault for file in files for fault in check(file.read_text("utf-8"), file.relative_to(PACKAGE).as_posix())]
    assert not faults, "\n".join(["", *faults])


def lines(count):
    return "x = 1\n" * count


def function(count):
    return "def f():\n" + "    x = 1\n" * (count - 1)


BAD = [
    (structure.import_direction, "linear.py", "from .rules import Plan", "linear imports rules"),
    (structure.import_direction, "linear.py", "from . import rules", "linear imports rules"),
    (structure.import_direction, "linear.py", "from colrow.rules import Plan", "linear imports rules"),
    (structure.import_direction, "linear.py", "from colrow import rules", "linear imports rules"),
    (structure.import_direction, "linear.py", "import colrow.rules", "linear imports rules"),
    (structure.import_direction, "linear.py", "def f():\n    from .cli import main", "linear.py:2: linear imports cli"),
    (structure.import_direction, "linear.py", "import colrow", "linear imports __init__"),
    (structure.import_direction, "linear.py", "from colrow import move", "linear imports __init__"),
    (structure.import_direction, "linear.py", "from .linear import f", "linear imports linear"),
    (structure.import_direction, "linear.py", "from .nowhere import f", "imports 'nowhere', which has no place"),
    (structure.import_direction, "nowhere.py", "", "'nowhere' has no place"),
    (structure.import_direction, "nowhere/__init__.py", "", "'nowhere' has no place"),
    (structure.import_direction, "families/gpt.py", "from ..parallelize import f", "families imports parallelize"),
    (structure.import_direction, "families/gpt.py", "from .. import train", "families imports train"),
    (structure.import_direction, "models/gpt.py", "from ..errors import ColrowError", "knows nothing of colrow"),
    (structure.import_direction, "models/gpt.py", "import colrow", "knows nothing of colrow"),
    (structure.import_direction, "models/gpt.py", "from .other import f", "knows nothing of colrow"),
    (structure.size, "linear.py", lines(301), "301 lines; at most 300"),
    (structure.size, "models/gpt.py", lines(151), "151 lines; at most 150"),
    (structure.size, "train.py", lines(250), "250 lines; at most 249"),
    (structure.size, "linear.py", function(61), "f has 61 lines; at most 60"),
    (structure.size, "linear.py", "class C:\n    async def g(self):\n" + "        x = 1\n" * 60, "g has 61 lines"),
    (structure.statements, "linear.py", "def f():\n    global x\n    x = 1", "linear.py:2: global x"),
    (structure.statements, "linear.py", "assert x, 'no'", "assert"),
    (structure.statements, "linear.py", "try:\n    f()\nexcept:\n    pass", "broad except"),
    (structure.statements, "linear.py", "try:\n    f()\nexcept Exception as e:\n    log(e)", "broad except"),
    (structure.statements, "linear.py", "try:\n    f()\nexcept (OSError, BaseException):\n    raise E()", "broad"),
    (structure.statements, "linear.py", "import builtins\ntry:\n    f()\nexcept builtins.Exception:\n    0", "broad"),
    (structure.to_local, "linear.py", "w = self.weight.to_local()", ".to_local"),
    (structure.to_local, "linear.py", "read = DTensor.to_local", ".to_local"),
    (structure.private_torch, "linear.py", "import torch._C", "imports torch._C"),
    (structure.private_torch, "linear.py", "from torch import _C", "imports torch._C"),
    (structure.private_torch, "linear.py", "from torch._utils import f", "imports torch._utils.f"),
    (structure.private_torch, "linear.py", "import torch.distributed._tensor as t", "torch.distributed._tensor"),
    (structure.private_torch, "linear.py", "import torch\ntorch._C.f()", "linear.py:2: uses torch._C"),
    (structure.private_torch, "linear.py", "import torch.distributed as dist\ndist._x()", "uses dist._x"),
    (structure.private_torch, "linear.py", "import torch as t\nt.nn.functional._f()", "uses t.nn.functional._f"),
    (
        structure.private_torch,
        "linear.py",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(f)",
        "uses Variable._execution_engine",
    ),
]


@pytest.mark.parametrize(("check", "path", "source", "message"), BAD)
def test_a_check_catches_what_it_is_for(check, path, source, message):
    faults = check(source, path)
    assert len(faults) == 1
    assert message in faults[0]


GOOD = [
    (structure.import_direction, "__init__.py", "from .cli import main\nimport colrow.train"),
    (structure.import_direction, "rules.py", "import torch\nfrom .errors import E\nfrom colrow.layout import R, S"),
    (structure.import_direction, "families/gpt.py", "from ..rules import Plan\nfrom .other import f\nfrom . import g"),
    (structure.import_direction, "train.py", "import colrow\nfrom colrow import move\nfrom .models.gpt import GPT"),
    (structure.import_direction, "models/__init__.py", "from .gpt import GPT"),
    (structure.import_direction, "errors.py", "import colrowed\nfrom plan import x"),
    (structure.size, "linear.py", lines(300)),
    (structure.size, "linear.py", function(60)),
    (structure.statements, "linear.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (structure.statements, "linear.py", "try:\n    f()\nexcept BaseException:\n    close()\n    raise"),
    (structure.to_local, "params.py", "w = self.weight.to_local()"),
    (structure.to_local, "linear.py", "w = local(self.weight, grad=R)  # not weight.to_local()"),
    (structure.private_torch, "comm.py", "from torch import _C"),
    (structure.private_torch, "gradients.py", "from torch.autograd import Variable\nVariable._execution_engine"),
    (structure.private_torch, "linear.py", "import torch\ntorch.nn.Module.__init__(self)\nself._x = x._y\ntorch.f()"),
]


@pytest.mark.parametrize(("check", "path", "source"), GOOD)
def test_a_check_lets_good_code_pass(check, path, source):
    assert check(source, path) == []
