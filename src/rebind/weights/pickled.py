"""The pickles in torch's files, read by an interpreter of our own that knows data only and executes nothing.

A pickle is a program. What ``torch.save`` and ``torch.jit.save`` write of tensors takes some thirty opcodes of
protocol 2 and a handful of globals; these have a meaning here, everything else is a refusal. Memory and time are
bounded by the length of the pickle and by a number of opcodes, of which each takes constant time: lengths are held
against the data that is there, what is shared is not copied, recursion is not used, and keys are text or short numbers,
since others could be made to hash slowly or alike.

The opcodes are those of ``pickletools``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.errors import Fault
from rebind.weights.slots import refusal
from rebind.weights.torch_globals import (
    CALLS,
    SCRIPT_CLASSES,
    Global,
    PickledObject,
    PickledTensor,
    Refused,
    check_known,
    described,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Loaded", "PickledObject", "PickledTensor", "load_one_pickle", "load_pickle"]

_MOST_OPCODES = 5_000_000
"""About as many as 100,000 tensors take; each makes an object of a hundred bytes at most."""
_LONGEST_GLOBAL = 1000
_LONGEST_KEY = 100
"""Characters of what a storage is called, mostly a number."""
_MOST_ARGUMENTS = 8
_MOST_INTEGER_KEY = 1 << 53
_LONGEST_INTEGER = 16
"""Bytes; the magic number of old files has ten."""


def load_pickle(data: bytes, subject: str, where: str, *, quantized: bool = False) -> Any:
    """The value of the pickle ``data``: plain Python values, :class:`PickledTensor`, :class:`PickledObject`.

    ``subject`` is the file for messages; ``where`` the name of the pickle in it (``archive/data.pkl``), and without
    ``.pkl`` the directory of the records that tensors name (``archive/data/0``). Containers that are shared in the
    pickle are shared in the result, which may even contain itself: who walks it has to bound the walk. Raises
    :class:`rebind.errors.WeightsRefused` for anything but data, and for what is damaged. Tensors that are ``quantized``
    are data only if that is said.
    """
    return load_one_pickle(data, 0, subject, where, quantized=quantized).value


@dataclass(frozen=True, slots=True)
class Loaded:
    """One of several pickles: its ``value``, the ``end`` of it, and the dtype of each storage in it (None: bytes)."""

    value: Any
    end: int
    storages: Mapping[str, str | None]


def load_one_pickle(data: bytes, start: int, subject: str, where: str, *, quantized: bool = False) -> Loaded:
    """The pickle that begins at ``start``, whatever follows it; otherwise as :func:`load_pickle`."""
    interpreter = _Interpreter(data, start, where.removesuffix(".pkl"), quantized=quantized)
    try:
        return Loaded(interpreter.run(), interpreter.position, interpreter.storages)
    except Refused as refused:
        raise refusal(subject, [Fault(where, str(refused), refused.remedy)]) from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        problem = f"is damaged: its pickle makes no sense at byte {interpreter.position}"
        raise refusal(subject, [Fault(where, problem, "copy the file again")]) from error


_MARK = object()


class _Interpreter:
    """One run over ``data``, from ``position`` on."""

    def __init__(self, data: bytes, position: int, directory: str, *, quantized: bool) -> None:
        self.position = position
        self.storages: dict[str, str | None] = {}
        self._data = data
        self._directory = directory
        self._quantized = quantized
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MOST_OPCODES):
            opcode = self._take(1)
            if opcode == b".":
                return self._stack.pop()
            action = _ACTIONS.get(opcode)
            if action is None:
                raise Refused(f"has the opcode {opcode!r} at byte {self.position - 1}, which torch.save does not write")
            action(self)
        raise Refused(f"has more than {_MOST_OPCODES} opcodes")

    def _take(self, nbytes: int) -> bytes:
        data = self._data[self.position : self.position + nbytes]
        if len(data) != nbytes:
            raise Refused(f"is cut short or damaged: {nbytes} bytes are missing at its end", "copy the file again")
        self.position += nbytes
        return data

    def _unpack(self, form: str) -> Any:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return value

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def check_protocol(self) -> None:
        """PROTO: torch writes protocol 2 unless told otherwise."""
        protocol = self._unpack("B")
        if protocol != 2:
            raise Refused(f"is of pickle protocol {protocol}", "save it without the argument pickle_protocol")

    def push_number(self, form: str) -> None:
        self.push(self._unpack(form))

    def push_integer(self) -> None:
        nbytes = self._unpack("B")
        if nbytes > _LONGEST_INTEGER:
            raise Refused(f"has an integer of {nbytes} bytes")
        self.push(int.from_bytes(self._take(nbytes), "little", signed=True))

    def push_text(self, form: str, encoding: str) -> None:
        self.push(self._take(self._unpack(form)).decode(encoding))

    def push_global(self) -> None:
        module, name = self._line(), self._line()
        known = Global(f"{module}.{name}")
        check_known(known.name, quantized=self._quantized)
        self.push(known)

    def _line(self) -> str:
        end = self._data.find(b"\n", self.position, self.position + _LONGEST_GLOBAL)
        if end < 0:
            raise Refused("is damaged: it has a name without end", "copy the file again")
        line = self._take(end + 1 - self.position)
        return line[:-1].decode()

    def get(self, form: str) -> None:
        self.push(self._memo[self._unpack(form)])

    def put(self, form: str) -> None:
        self._memo[self._unpack(form)] = self._stack[-1]

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError("nothing above the mark")
        return value

    def _pop_to_mark(self) -> list[Any]:
        start = len(self._stack) - 1
        while self._stack[start] is not _MARK:
            start -= 1
        values = self._stack[start + 1 :]
        del self._stack[start:]
        return values

    def push_tuple(self, count: int | None) -> None:
        values = self._pop_to_mark() if count is None else [self._pop() for _ in range(count)][::-1]
        self.push(tuple(values))

    def append(self, values: Sequence[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("no list to append to")
        target.extend(values)

    def set_items(self, pairs: Sequence[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise TypeError("no dictionary to fill")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not (isinstance(key, str) or (isinstance(key, int) and abs(key) <= _MOST_INTEGER_KEY)):
                raise Refused("has a dictionary whose keys are neither text nor numbers")
            target[key] = value

    def append_one(self) -> None:
        self.append([self._pop()])

    def append_many(self) -> None:
        self.append(self._pop_to_mark())

    def set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self.set_items([key, value])

    def set_many(self) -> None:
        self.set_items(self._pop_to_mark())

    def make(self) -> None:
        """NEWOBJ: only TorchScript's classes, whose attributes follow."""
        arguments, made = self._pop(), self._pop()
        if not isinstance(made, Global) or not made.name.startswith(SCRIPT_CLASSES) or arguments != ():
            raise TypeError("not a class that is made so")
        self.push(PickledObject(made.name))

    def call(self) -> None:
        """REDUCE: the few functions that torch writes, by what they mean."""
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Global) or type(arguments) is not tuple or len(arguments) > _MOST_ARGUMENTS:
            raise TypeError("not a function that is called so")
        if function.name.startswith(SCRIPT_CLASSES):
            self.push(PickledObject(function.name, {"": arguments}))
        else:
            self.push(CALLS[function.name](*arguments))

    def build(self) -> None:
        """BUILD: attributes of a TorchScript object; those of a dictionary (its ``_metadata``) are dropped."""
        state, built = self._pop(), self._stack[-1]
        if isinstance(built, PickledObject):
            built.state = state if type(state) is dict else {"": state}
        elif type(built) is not dict:
            raise TypeError("nothing that has a state")

    def push_storage(self) -> None:
        """BINPERSID: ``("storage", type, key, location, elements)``; in old files a view of another may follow."""
        identity = self._pop()
        if type(identity) is not tuple or not 5 <= len(identity) <= 6 or identity[0] != "storage":
            raise Refused("refers to something else than the storage of a tensor")
        _, kind, key, location = identity[:4]
        if not isinstance(kind, Global) or type(key) is not str or len(key) > _LONGEST_KEY:
            raise TypeError("not the name of a storage")
        if identity[5:] not in ((), (None,)):
            raise Refused("has a storage that is a part of another, as torch before 0.4 wrote it")
        if location == "meta":
            raise Refused("has tensors without values, on the meta device")
        storage = described(f"{self._directory}/{key}", kind)
        self.storages[storage.record] = storage.dtype
        self.push(storage)


_ACTIONS: Mapping[bytes, Callable[[_Interpreter], None]] = {
    b"\x80": lambda run: run.check_protocol(),
    b"(": lambda run: run.push(_MARK),
    b"N": lambda run: run.push(None),
    b"\x88": lambda run: run.push(True),
    b"\x89": lambda run: run.push(False),
    b")": lambda run: run.push(()),
    b"]": lambda run: run.push([]),
    b"}": lambda run: run.push({}),
    b"K": lambda run: run.push_number("B"),
    b"M": lambda run: run.push_number("<H"),
    b"J": lambda run: run.push_number("<i"),
    b"G": lambda run: run.push_number(">d"),
    b"\x8a": _Interpreter.push_integer,
    b"X": lambda run: run.push_text("<I", "utf-8"),
    b"U": lambda run: run.push_text("B", "latin-1"),
    b"T": lambda run: run.push_text("<i", "latin-1"),
    b"c": _Interpreter.push_global,
    b"h": lambda run: run.get("B"),
    b"j": lambda run: run.get("<I"),
    b"q": lambda run: run.put("B"),
    b"r": lambda run: run.put("<I"),
    b"\x85": lambda run: run.push_tuple(1),
    b"\x86": lambda run: run.push_tuple(2),
    b"\x87": lambda run: run.push_tuple(3),
    b"t": lambda run: run.push_tuple(None),
    b"a": _Interpreter.append_one,
    b"e": _Interpreter.append_many,
    b"s": _Interpreter.set_one,
    b"u": _Interpreter.set_many,
    b"\x81": _Interpreter.make,
    b"R": _Interpreter.call,
    b"b": _Interpreter.build,
    b"Q": _Interpreter.push_storage,
}
"""What the opcodes of torch's pickles do."""
