"""Where tensors lie among the arguments and results of a call, read from torch's pytree specs without torch.

A spec is JSON that torch writes (``torch.utils._pytree.treespec_dumps``); its leaves are the tensors in their flat
order. The names that follow from it are those of Triton's PT2 models (spec 04 section 1.7).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Place = tuple[str | int, ...]
"""The keys and indices that lead to a tensor."""


def input_names(in_spec: str) -> tuple[str, ...]:
    """Each input's name in a graph that has none of its own: that of the keyword argument, else ``INPUT__<i>``.

    Raises ``ValueError``, ``KeyError`` or ``TypeError`` for what torch does not write; so do all functions here.
    """
    return tuple(
        str(place[1]) if _is_keyword(place) else f"INPUT__{index}" for index, place in enumerate(_inputs(in_spec))
    )


def input_paths(in_spec: str) -> tuple[tuple[str, ...], ...]:
    """The paths of each input: ``ARGS[0]``, ``KWARGS[k]``, ``ARGS[1][p][0]``, with keys unquoted, quoted, or as fields.

    A keyword argument is also called ``KWARGSk``, as Triton 26.05 spells it.
    """
    paths = []
    for place in _inputs(in_spec):
        spelled = _spellings(("ARGS", "KWARGS")[int(place[0])], place[1:])
        paths.append((*spelled, f"KWARGS{place[1]}") if _is_keyword(place) else spelled)
    return tuple(paths)


def result_names(out_spec: str) -> tuple[str, ...]:
    """Each result's name: its key where the result is a flat dictionary, else ``OUTPUT__<i>``.

    Keys that cannot all be names of tensors are none.
    """
    places = list(_places(_tree(out_spec)))
    keys = [place[0] for place in places if len(place) == 1 and isinstance(place[0], str)]
    if len(keys) == len(places) == len(set(keys)) and all(key and key.isprintable() for key in keys):
        return tuple(keys)
    return tuple(f"OUTPUT__{index}" for index in range(len(places)))


def result_paths(out_spec: str) -> tuple[tuple[str, ...], ...]:
    """The paths of each result: ``RESULT`` if there is but one, else ``RESULT[0]``, ``RESULT[key][1]`` and the like."""
    return tuple(_spellings("RESULT", place) for place in _places(_tree(out_spec)))


def _inputs(in_spec: str) -> Iterator[Place]:
    """The place of each input among ``(args, kwargs)``: ``(0, 1, "p")`` is ``args[1]["p"]``."""
    return _places(_tree(in_spec))


def _is_keyword(place: Place) -> bool:
    return len(place) == 2 and place[0] == 1 and isinstance(place[1], str)


def _tree(spec: str) -> dict[str, Any]:
    _, tree = json.loads(spec)
    if not isinstance(tree, dict):
        raise TypeError(f"{spec[:80]} is no tree")
    return tree


def _places(tree: dict[str, Any]) -> Iterator[Place]:
    """The places of all leaves below a node, in their flat order."""
    if tree["type"] is None:
        yield ()
    children = tree["children_spec"]
    for key, child in zip(_keys(tree, len(children)), children, strict=True):
        yield from ((key, *place) for place in _places(child))


def _keys(tree: dict[str, Any], count: int) -> Sequence[str | int]:
    """What a node calls its children: keys if its type wrote them down as dictionaries do, else positions.

    So do ``OrderedDict`` and the outputs of transformers.
    """
    try:
        context = json.loads(tree["context"])
    except (TypeError, ValueError):  # the type brought its own way to write it
        return range(count)
    if isinstance(context, list) and len(context) == count and all(isinstance(key, str | int) for key in context):
        return context
    return range(count)


def _spellings(root: str, place: Place) -> tuple[str, ...]:
    """A path as Triton spells it, then as Python does, each once."""
    styles: tuple[Callable[[str], str], ...] = ("[{}]".format, "['{}']".format, '["{}"]'.format, ".{}".format)
    return tuple(dict.fromkeys(root + "".join(_step(key, style) for key in place) for style in styles))


def _step(key: str | int, style: Callable[[str], str]) -> str:
    return style(key) if isinstance(key, str) else f"[{key}]"
