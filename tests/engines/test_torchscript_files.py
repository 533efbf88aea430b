"""TorchScript files as files: equal graphs have equal digests, damaged ones are refused and end nothing (case T1)."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from rebind.engines.torchscript.archive import ScriptArchive
from rebind.engines.torchscript.attributes import Attributes
from rebind.engines.torchscript.fingerprint import _Names, graph_digest
from rebind.errors import Internal, ModelInvalid, RebindError, StorageFailed
from tests.engines.tampering import rewrite
from tests.engines.torchscript_models import Opener, Recurrent, Scaled, load, script, trace

if TYPE_CHECKING:
    from rebind.plans.cache import PlanCache


@pytest.fixture
def opener(plan_cache: PlanCache) -> Opener:
    return Opener(plan_cache)


def digest(path: Path) -> str:
    with ScriptArchive(path) as archive:
        return graph_digest(archive, Attributes(archive))


class Net(nn.Module):
    """Classes of one name more than once, a constant, a list of tensors, strings that look like class names."""

    def __init__(self, constant: float = 0.5, listed: float = 1.0, hidden: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3), Scaler(constant))
        self.listed = [torch.full((3,), listed)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x) + self.listed[0]
        return y


class Scaler(nn.Module):
    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.constant + torch.tensor([1.0, 2.0, 3.0])


def differences() -> list[nn.Module]:
    """``first * weight - second`` with arguments whose names look generated: in each order, and other ones."""

    class Net(nn.Module):
        def forward(self, _1: torch.Tensor, _2: torch.Tensor) -> torch.Tensor:
            return _1 * self.weight - _2  # type: ignore[operator]

    first = Net

    class Net(nn.Module):  # type: ignore[no-redef]
        def forward(self, _2: torch.Tensor, _1: torch.Tensor) -> torch.Tensor:
            return _2 * self.weight - _1  # type: ignore[operator]

    second = Net

    class Net(nn.Module):  # type: ignore[no-redef]
        def forward(self, _1: torch.Tensor, _3: torch.Tensor) -> torch.Tensor:
            return _1 * self.weight - _3  # type: ignore[operator]

    models: list[nn.Module] = [first(), second(), Net()]
    for model in models:
        model.weight = nn.Parameter(torch.ones(2))
    return models


X = torch.ones(2, 4)


class TestDigest:
    def test_two_traces_in_one_process_have_one(self, tmp_path: Path) -> None:
        first, second = (trace(Net(), tmp_path / f"{n}.pt", X) for n in "ab")
        names = [{name for name in zipfile.ZipFile(p).namelist() if "mangle" in name} for p in (first, second)]
        assert names[0] != names[1], "nothing to see here: torch gave the same names to both"
        assert digest(first) == digest(second)

    def test_two_processes_have_one(self, tmp_path: Path) -> None:
        code = (
            "import sys, warnings\nwarnings.simplefilter('ignore')\nfrom pathlib import Path\n"
            "from tests.engines.test_torchscript_files import *\n"
            "for _ in range(int(sys.argv[2])): torch.jit.trace(Net(), X), torch.jit.script(Scaler(0.1))\n"
            "directory = Path(sys.argv[1])\ndirectory.mkdir()\n"
            "script(Net(), directory / 'scripted.pt'), trace(Net(), directory / 'traced.pt', X)"
        )
        for name, before in (("first", "0"), ("second", "2")):
            command = [sys.executable, "-c", code, str(tmp_path / name), before]
            environment = {**os.environ, "PYTHONHASHSEED": before}  # the order of sets is another one too
            subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[2], env=environment)
        for how in ("scripted", "traced"):
            assert digest(tmp_path / "first" / f"{how}.pt") == digest(tmp_path / "second" / f"{how}.pt")

    def test_weights_and_the_files_name_do_not_count(self, tmp_path: Path) -> None:
        torch.manual_seed(1)
        assert digest(script(Net(), tmp_path / "a.pt")) == digest(script(Net(), tmp_path / "other.pt"))

    @pytest.mark.parametrize("change", [{"constant": 0.25}, {"listed": 2.0}, {"hidden": 6}])
    def test_everything_else_does(self, tmp_path: Path, change: dict[str, Any]) -> None:
        assert digest(script(Net(), tmp_path / "a.pt")) != digest(script(Net(**change), tmp_path / "b.pt"))

    @pytest.mark.parametrize("change", [{"constant": 0.25}, {"hidden": 6}])
    def test_everything_that_a_trace_sees_does(self, tmp_path: Path, change: dict[str, Any]) -> None:
        assert digest(trace(Net(), tmp_path / "a.pt", X)) != digest(trace(Net(**change), tmp_path / "b.pt", X))

    def test_names_of_arguments_do_even_if_they_look_generated(self, tmp_path: Path) -> None:
        files = [script(model, tmp_path / f"{i}.pt") for i, model in enumerate([*differences(), *differences()])]
        digests = [digest(file) for file in files]
        assert len(set(digests)) == 3
        assert digests[:3] == digests[3:]

    @pytest.mark.parametrize(
        ("text", "other"),
        [
            ("def f(_1, _2):\n  _3 = _1\n  return _2\n", "def f(_2, _1):\n  _3 = _2\n  return _1\n"),
            ("def f(_0, x):\n  _1 = x\n  return _0\n", "def f(_0, x):\n  _1 = x\n  return _1\n"),
            ("def f(x):\n  _1 = x\n  _2 = 1\n  return _1\n", "def f(x):\n  _1 = x\n  _2 = 1\n  return _2\n"),
            ("class C(Module):\n  _1 : int\n  _2 : float\n", "class C(Module):\n  _2 : int\n  _1 : float\n"),
            ("class C(Module):\n  _1 : Final[int] = 1\n", "class C(Module):\n  _2 : Final[int] = 1\n"),
        ],
    )
    def test_no_renaming_makes_two_codes_equal(self, text: str, other: str) -> None:
        assert _Names().renamed(text) != _Names().renamed(other)

    def test_generated_names_of_variables_do_not(self) -> None:
        first = "def f(x):\n  _1 = x\n  _2 = _1\n  return _2\n"
        assert _Names().renamed(first) == _Names().renamed(first.replace("_2", "_7").replace("_1", "_2"))

    def test_constants_of_a_graph_do(self, tmp_path: Path) -> None:
        file = trace(Net(), tmp_path / "a.pt", X)

        def change(records: dict[str, bytes]) -> None:
            records["constants/0"] = np.array([1, 2, 4], np.float32).tobytes()

        assert digest(rewrite(file, tmp_path / "b.pt", change)) != digest(file)

    def test_debug_information_and_extra_files_do_not(self, tmp_path: Path) -> None:
        file = script(Net(), tmp_path / "a.pt")

        def change(records: dict[str, bytes]) -> None:
            for name in [name for name in records if name.endswith(".debug_pkl")]:
                del records[name]
            records["extra/step.txt"] = b"17"

        assert digest(rewrite(file, tmp_path / "b.pt", change, zipfile.ZIP_DEFLATED)) == digest(file)


class TestDamage:
    """Every test of this class opens files in this very process, which has to live on."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return script(Recurrent(), tmp_path / "good.pt")

    def edited(self, file: Path, record: str, edit: Any) -> Path:
        def change(records: dict[str, bytes]) -> None:
            records[record] = edit(records[record])

        return rewrite(file, file.with_name("bad.pt"), change)

    def test_a_file_cut_short_anywhere_is_refused(self, opener: Opener, file: Path) -> None:
        data = file.read_bytes()
        cut = file.with_name("cut.pt")
        for length in (0, 1, 100, len(data) // 2, len(data) - 30, len(data) - 1):
            cut.write_bytes(data[:length])
            with pytest.raises(ModelInvalid, match=r"cut\.pt"):
                opener.open(cut)

    def test_flipped_bytes_anywhere_are_refused_or_harmless(self, opener: Opener, file: Path) -> None:
        data = bytearray(file.read_bytes())
        bad = file.with_name("bad.pt")
        refused = 0
        for position in range(0, len(data), 997):
            damaged = bytearray(data)
            damaged[position] ^= 0x55
            bad.write_bytes(damaged)
            try:
                opener.bind(bad)
            except RebindError:
                refused += 1
        assert refused > 10

    def test_a_record_that_claims_gigabytes_is_refused(self, opener: Opener, file: Path) -> None:
        huge = 2_200_000_000
        small = self.edited(file, "data/0", lambda data: data)
        data = bytearray(small.read_bytes())
        entry = data.index(b"PK\1\2")
        name = bytes(data[entry + 46 : entry + 46 + data[entry + 28]])
        assert name.endswith(b"/data/0")
        data[entry + 20 : entry + 28] = huge.to_bytes(4, "little") * 2
        small.write_bytes(data)
        with pytest.raises(ModelInvalid, match="data/0"):
            opener.open(small)

    def test_a_deflated_record_that_claims_gigabytes_is_refused(
        self, opener: Opener, file: Path, tmp_path: Path
    ) -> None:
        small = rewrite(file, tmp_path / "bad.pt", lambda records: None, zipfile.ZIP_DEFLATED)
        data = bytearray(small.read_bytes())
        entry = data.index(b"PK\1\2")
        data[entry + 24 : entry + 28] = (2_200_000_000).to_bytes(4, "little")
        small.write_bytes(data)
        with pytest.raises(ModelInvalid, match=r"claims to inflate from \d+ to 2200000000 bytes"):
            opener.open(small)

    def test_weights_for_which_there_is_no_memory_are_refused_before_any_is_taken(
        self, opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rebind.engines.torchscript.engine.available_memory_bytes", lambda: 1000)
        with pytest.raises(StorageFailed, match="its weights take 1200 bytes, 1000 are available"):
            opener.open(script(Scaled(300), tmp_path / "m.pt"))

    def test_a_tensor_larger_than_its_record_is_refused(self, opener: Opener, file: Path) -> None:
        bad = self.edited(file, "data/0", lambda data: data[:8])
        with pytest.raises(ModelInvalid, match="but its record has 8 bytes"):
            opener.open(bad)

    def test_broken_debug_sources_do_not_matter(self, opener: Opener, file: Path) -> None:
        def breaks(records: dict[str, bytes]) -> None:
            names = [name for name in records if name.endswith(".debug_pkl")]
            assert names
            for name in names:
                records[name] = b"\x80\2garbage"

        bad = rewrite(file, file.with_name("bad.pt"), breaks)
        ids = np.arange(8).reshape(2, 4)
        torch.set_num_threads(1)
        with torch.inference_mode():
            expected = load(file)(torch.from_numpy(ids)).numpy()
        assert opener.bind(bad).execute([ids])[0].tobytes() == expected.tobytes()

    def test_code_that_torch_cannot_read_is_torchs_reason(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Scaled(), tmp_path / "good.pt")
        record = "code/__torch__/tests/engines/torchscript_models.py"
        bad = self.edited(file, record, lambda data: data.replace(b"torch.mul", b"torch.no_such_operator"))
        with pytest.raises(Internal, match=r"(?s)^failed to load model 'm': .*no_such_operator"):
            opener.open(bad)

    def test_a_file_that_crashes_torch_is_refused(self, opener: Opener, tmp_path: Path) -> None:
        """Torch's parser of code calls itself for every parenthesis, until the stack ends."""
        file = script(Scaled(), tmp_path / "good.pt")
        record = "code/__torch__/tests/engines/torchscript_models.py"
        deep = b"(" * 300_000
        bad = self.edited(file, record, lambda data: data.replace(b"torch.mul(", b"torch.mul(" + deep))
        with pytest.raises(ModelInvalid, match=r"torch does not survive loading it: .*signal 11"):
            opener.open(bad)

    def test_a_pickle_that_would_execute_something_is_refused(self, opener: Opener, file: Path) -> None:
        bad = self.edited(file, "data.pkl", lambda data: b"\x80\2cposix\nsystem\n(X\4\0\0\0truetR.")
        with pytest.raises(ModelInvalid, match=r"names the Python object 'posix\.system'"):
            opener.open(bad)

    def test_what_is_something_else_is_named(self, opener: Opener, tmp_path: Path) -> None:
        torch.save({"weight": X}, tmp_path / "state.pt")
        with pytest.raises(ModelInvalid, match=r"it is a torch\.save file: weights or a pickled module"):
            opener.open(tmp_path / "state.pt")
        (tmp_path / "text.pt").write_text("no model")
        with pytest.raises(ModelInvalid, match="zip"):
            opener.open(tmp_path / "text.pt")
        with pytest.raises(ModelInvalid, match="cannot be opened"):
            opener.open(tmp_path / "missing.pt")

    def test_values_that_go_round_in_circles_are_refused(self, opener: Opener, file: Path) -> None:
        circle = b"\x80\2c__torch__.M\nN\n)\x81}X\1\0\0\0a]q\0h\0asb."  # a list that contains itself
        bad = self.edited(file, "data.pkl", lambda data: circle)
        with pytest.raises(ModelInvalid, match="describes more than 1000000 values"):
            opener.open(bad)

    def test_a_short_file_of_endlessly_many_values_is_refused(self, opener: Opener, file: Path) -> None:
        """A list that is 100,000 times in itself."""
        pickled = b"\x80\x02c__torch__\nM\n)\x81}(X\1\0\0\0l]q\1(" + b"h\1" * 100_000 + b"eub."
        with pytest.raises(ModelInvalid, match="more than 1000000 values"):
            opener.open(self.edited(file, "data.pkl", lambda _: pickled))
