"""Reading compiled AOTInductor packages (``model.pt2``): a library, its source, and what they are for.

A package is a zip file that ``torch._inductor.aoti_compile_and_package`` writes::

    <name>/archive_format, archive_version, byteorder
    <name>/data/aotinductor/<model>/<hash>.wrapper.so            the library, mostly with the weights inside
    <name>/data/aotinductor/<model>/<hash>.wrapper.cpp           its source
    <name>/data/aotinductor/<model>/<hash>.wrapper_metadata.json what it was compiled for
    <name>/data/aotinductor/<model>/<hash>.wrapper_weights.blob  weights, if kept aside as one block
    <name>/data/aotinductor/<model>/weights_config.json, <name>/data/weights/weight_<i>  or as pickled tensors

Nothing here runs any of it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from blake3 import blake3

from rebind.engines.aot_inductor.compile_child import MAY_RAISE
from rebind.engines.aot_inductor.package_source import read_source, tensor_numbers
from rebind.engines.aot_inductor.program import mutation_fault
from rebind.errors import Fault, ModelInvalid, WeightsRefused
from rebind.plans.key import target_parts
from rebind.weights.zipped import ZipArchive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.engines.aot_inductor.package_source import PackageSource
    from rebind.weights.zipped import Member

LIBRARY = "model.so"
"""The library in the directory that :meth:`PackageArchive.extract` fills."""
WEIGHTS = "weights.safetensors"
"""The values of constants, which a child process takes out."""
TRYING_ONE = "trying a batch of one"
"""What the child reports before it runs the package in a way that may well be its end."""
_CODE = re.compile(r"([^/]+/)data/aotinductor/([^/]+)/(.+)")
_PROGRAM = re.compile(r"[^/]+/models/[^/]+\.json")
_MOST_TEXT_BYTES = 256 << 20
_CPU_FEATURES = {
    "AVX2": ("avx2", "fma"),
    "AVX512": ("avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AMX_TILE": ("amx_tile", "amx_bf16", "amx_int8"),
    "ASIMD": ("asimd",),
}
"""What names of torch's ``AOTI_CPU_ISA`` ask of a processor, in the kernel's spelling. Others are left to the child."""
_PROXY = "aoti_torch_proxy_executor_call_function"
"""Called for operators without a C interface; only torch's own runner has such an executor."""
_INTERFACE = "_inductor/codegen/aoti_runtime/interface.cpp"


def is_package(path: Path) -> bool:
    """Whether a model file is a compiled package, and no torch.export archive. False for what is neither."""
    try:
        with ZipArchive(path) as archive:
            names = list(archive.members)
    except WeightsRefused:
        return False
    return any(map(_CODE.fullmatch, names)) and not any(map(_PROGRAM.fullmatch, names))


class PackageArchive:
    """An open package that was compiled for this machine and this torch. ``source`` is what its source says.

    ``built_in`` says what of its weights was built into it, so that it can take no others; it is empty for nothing.

    Raises :class:`rebind.errors.ModelInvalid` for a damaged file, one without what is needed, or one that was compiled
    for another machine or torch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._model_errors():
            self._archive = ZipArchive(path)
        try:
            self._root, self._directory = self._find_model()
            self._check_target()
            self._library, self._text = self._only(r"\.so"), self._only(r"\.wrapper\.cpp")
            text = self._read_text(self._text)
            self._check_version(text)
            codes = [self._read_text(member) for member in self._members(r"\.cpp")]
            self._check_loops(codes)
            self.source = self._read_source(text)
            self.built_in = self.source.built_in or self._numbers_built_in(codes)
            self.digest = self._digest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; harmless when repeated."""
        self._archive.close()

    def extract(self, directory: Path) -> dict[str, str]:
        """Writes what a child needs into ``directory``: the library, its source, and weights beside it.

        Returns their paths as ``library``, ``source``, and ``blob`` or ``weights`` (a directory) if there is such.
        """
        written = {
            "library": str(self._write(self._library, directory / LIBRARY)),
            "source": str(self._write(self._text, directory / "model.cpp")),
        }
        blob = self._members(r"_weights\.blob")
        if blob:
            written["blob"] = str(self._write(blob[0], directory / "weights.blob"))
        config = self._archive.members.get(f"{self._directory}weights_config.json")
        if config is not None:
            weights = directory / "weights"
            weights.mkdir()
            self._write(config, weights / "weights_config.json")
            prefix = f"{self._root}data/weights/"
            for name, member in self._archive.members.items():
                if re.fullmatch(re.escape(prefix) + r"weight_\d+", name):
                    self._write(member, weights / name.removeprefix(prefix))
            written["weights"] = str(weights)
        return written

    @property
    def has_weights_aside(self) -> bool:
        """Whether the values of constants are in the package, but not in its library."""
        return bool(self._members(r"_weights\.blob") or self._members(r"weights_config\.json"))

    def refuse(self, problem: str, remedy: str = "") -> NoReturn:
        """Raises :class:`rebind.errors.ModelInvalid` for this file."""
        raise ModelInvalid(str(self.path), [Fault("", problem, remedy)])

    def _find_model(self) -> tuple[str, str]:
        """The archive's root, and the directory of the model ``model``, or of the only one."""
        found = {(match[1], match[2]) for match in map(_CODE.fullmatch, self._archive.members) if match}
        chosen = {model for model in found if model[1] == "model"} if len(found) > 1 else found
        if len(chosen) != 1:
            names = ", ".join(sorted(repr(name) for _, name in found))
            self.refuse(f"has the models {names}, and none that is called 'model'", "package one model alone")
        root, name = chosen.pop()
        return root, f"{root}data/aotinductor/{name}/"

    def _check_target(self) -> None:
        order = self._archive.members.get(f"{self._root}byteorder")
        if order is not None and self._read_text(order).strip() != sys.byteorder:
            self.refuse(f"was written on a machine of another byte order than this one ({sys.byteorder})")
        for member in self._members(r"_metadata\.json"):
            metadata = self._read_json(member)
            for what, key, here in (
                ("device", "AOTI_DEVICE_KEY", "cpu"),
                ("platform", "AOTI_PLATFORM", sys.platform),
                ("machine", "AOTI_MACHINE", platform.machine()),
            ):
                if metadata.get(key, here) != here:
                    self._refuse_target(f"{what} {metadata[key]}", here)
            self._check_processor(str(metadata.get("AOTI_CPU_ISA", "")))

    def _check_processor(self, isa: str) -> None:
        here = set(target_parts()["isa"].split())
        lacking = [feature for name in isa.split() for feature in _CPU_FEATURES.get(name, ()) if feature not in here]
        if lacking:
            self._refuse_target(f"a processor with {isa}", f"one without {', '.join(lacking)}")

    def _refuse_target(self, there: str, here: str) -> NoReturn:
        self.refuse(
            f"was compiled for {there}, this is {here}",
            "compile it on a machine like this one, or serve the torch.export archive, which is compiled here",
        )

    def _check_version(self, text: str) -> None:
        """The source begins with torch's own part, as its version has it, so any other version shows."""
        package = importlib.util.find_spec("torch")
        assert package is not None
        assert package.submodule_search_locations is not None
        interface = Path(package.submodule_search_locations[0]) / _INTERFACE
        version = importlib.metadata.version("torch")
        if interface.read_text().strip() not in text:
            self.refuse(
                f"was compiled by another torch than {version}, which is installed here",
                f"compile it again with torch {version}, or serve the torch.export archive, which is compiled here",
            )

    def _numbers_built_in(self, codes: list[str]) -> str:
        """What was small, or was computed when the package was compiled and is small, is in the code as numbers."""
        numbers = [] if self.source.keeps_small_constants else tensor_numbers(codes)
        if not numbers:
            return ""
        more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
        return f"its code holds numbers that were weights, or were computed from them ({', '.join(numbers[:3])}{more})"

    def _check_loops(self, codes: list[str]) -> None:
        """An exception within a parallel loop ends the process, and an index of a request may raise one."""
        for code in codes:
            functions = code.split('extern "C"')
            if any("#pragma omp" in function and MAY_RAISE.search(function) for function in functions):
                self.refuse(
                    "has loops that run in parallel and check indices: one index out of range would end the server",
                    "compile it with inductor_configs={'cpp.threads': 1, ...}, or serve the torch.export archive",
                )

    def _read_source(self, text: str) -> PackageSource:
        if _PROXY in text:
            self.refuse(
                "has operators that compiled code can only call through torch's own runner",
                "serve the torch.export archive, or compile without custom operators",
            )
        try:
            source = read_source(text)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            self.refuse(f"has a source that is not understood: {error}", "serve the torch.export archive instead")
        if source.written:
            raise ModelInvalid(str(self.path), [mutation_fault(name) for name in source.written])
        for argument in source.arguments:
            if argument.element.wire is None:
                self.refuse(f"{argument.name} has the dtype {argument.element.torch}, which no protocol carries")
        return source

    def _only(self, suffix: str) -> Member:
        found = self._members(suffix)
        if len(found) != 1:
            name = suffix.replace("\\", "")
            self.refuse(
                f"has {len(found)} files *{name} where one is needed",
                "package it with torch._inductor.aoti_compile_and_package, which writes one",
            )
        return found[0]

    def _members(self, suffix: str) -> list[Member]:
        """The files of the model whose names end so."""
        pattern = re.compile(re.escape(self._directory) + rf"[^/]*{suffix}")
        return [member for name, member in self._archive.members.items() if pattern.fullmatch(name)]

    def _read_json(self, member: Member) -> dict[str, Any]:
        try:
            document = json.loads(self._read_text(member))
        except (ValueError, RecursionError) as error:
            self.refuse(f"{member.name} is not JSON: {error}")
        if not isinstance(document, dict):
            self.refuse(f"{member.name} is no JSON object")
        return document

    def _read_text(self, member: Member) -> str:
        with self._model_errors():
            return self._archive.read(member, _MOST_TEXT_BYTES).decode(errors="replace")

    def _write(self, member: Member, path: Path) -> Path:
        """Copies a member out, piece by piece."""
        with path.open("xb") as file:
            for piece in self._pieces(member):
                file.write(piece)
        return path

    def _digest(self) -> str:
        """Over all that is in the package, by content."""
        digest = blake3()
        for name in sorted(self._archive.members):
            member = self._archive.members[name]
            digest.update(json.dumps([name.removeprefix(self._root), member.nbytes]).encode())
            for piece in self._pieces(member):
                digest.update(piece)
        return digest.hexdigest(32)

    def _pieces(self, member: Member) -> Iterator[bytes]:
        """As :meth:`rebind.weights.zipped.MemberFile.pieces`."""
        if member.compressed:
            self.refuse(f"{member.name} is compressed", "write the package with torch, which stores it plain")
        with self._model_errors():
            yield from self._archive.pieces(member)

    @contextlib.contextmanager
    def _model_errors(self) -> Iterator[None]:
        """What the weights ring says of a file is said of a model here."""
        try:
            yield
        except WeightsRefused as error:
            raise ModelInvalid(str(self.path), error.faults) from error
