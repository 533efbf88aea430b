"""What is believed of operators, against what they are seen to do to memory."""

# mypy: disallow-untyped-calls=False, warn-return-any=False
from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from rebind.engines.torchscript.operators import joins_everything, results_are_new
from rebind.weights.store import WeightStore
from tests.engines.torchscript_models import Opener, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rebind.plans.cache import PlanCache


def f(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


IMAGE, SEQUENCE = f(1, 4, 2, 2), f(1, 2, 4)
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(kind: str) -> tuple[Any, ...]:
    state = [f(1, 1, 4)] * 2 if kind == "lstm" else f(1, 1, 4)
    return SEQUENCE, state, [f(4 * GATES[kind], 4)] * 2, False, 1, 0.0, False, False, True


def cell(kind: str) -> tuple[Any, ...]:
    return f(1, 4), [f(1, 4)] * 2 if kind == "lstm" else f(1, 4), f(4 * GATES[kind], 4), f(4 * GATES[kind], 4)


HARMLESS: dict[str, tuple[Any, ...]] = {
    "adaptive_avg_pool1d": (SEQUENCE, [4]),
    "adaptive_avg_pool2d": (IMAGE, [2, 2]),
    "adaptive_avg_pool3d": (f(1, 1, 2, 2, 2), [2, 2, 2]),
    "avg_pool1d": (SEQUENCE, [1]),
    "batch_norm": (IMAGE, None, None, f(4) * 0, f(4), False, 0.1, 0.0, False),
    "bilinear": (f(1, 1), f(1, 1), f(1, 1, 1)),
    "concat": ([f(4)],),
    "conv1d": (SEQUENCE, f(2, 2, 1)),
    "conv2d": (IMAGE, f(4, 4, 1, 1)),
    "conv3d": (f(1, 1, 2, 2, 2), f(1, 1, 1, 1, 1)),
    "conv_transpose1d": (SEQUENCE, f(2, 2, 1)),
    "conv_transpose2d": (IMAGE, f(4, 4, 1, 1)),
    "conv_transpose3d": (f(1, 1, 2, 2, 2), f(1, 1, 1, 1, 1)),
    "divide": (f(4), 1),
    "group_norm": (IMAGE, 1),
    "instance_norm": (IMAGE, None, None, f(4) * 0, f(4), False, 0.1, 0.0, False),
    "layer_norm": (f(1, 1), [1]),
    "linear": (f(1, 1), f(1, 1)),
    "log_softmax": (f(4, 1), 0),
    "matmul": (f(1, 1), f(1, 1)),
    "max_pool1d": (SEQUENCE, [1]),
    "max_pool2d": (IMAGE, [1, 1]),
    "max_pool3d": (f(1, 1, 2, 2, 2), [1, 1, 1]),
    "multiply": (f(4), 1),
    "outer": (f(1), f(1)),
    "prelu": (f(4), f(1)),
    "relu6": (f(4),),
    "rms_norm": (f(1, 4), [4]),
    "scaled_dot_product_attention": (f(1, 1, 1, 1), f(1, 1, 1, 1), f(1, 1, 1, 1)),
    "selu": (f(4),),
    "softmax": (f(4, 1), 0),
    "square": (f(4),),
    "subtract": (f(4), 0),
    "true_divide": (f(4), 1),
    "where": (f(4) > 0, f(4), f(4)),
    **{kind: recurrent(kind) for kind in GATES},
    **{f"{kind}_cell": cell(kind) for kind in GATES},
}
"""Composed operators that are believed, with arguments by which they change as little as they can."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def storages(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(value) if tensor.numel()}


def believed_though_composed() -> set[str]:
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        full_name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if results_are_new(schema) and torch._C._dispatch_has_kernel(full_name):
            composed = torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd")
            names |= {schema.name.removeprefix("aten::")} if composed else set()
    return names


def test_every_composed_operator_that_is_believed_is_called_below() -> None:
    assert believed_though_composed() == HARMLESS.keys()


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("inference", [True, False])
def test_composed_operators_that_are_believed_return_memory_of_their_own(name: str, inference: bool) -> None:
    arguments = HARMLESS[name]
    with torch.inference_mode(inference):
        results = getattr(torch.ops.aten, name)(*arguments)
    assert storages(results)
    assert not storages(results) & storages(arguments)


@pytest.mark.parametrize(
    "text",
    [
        "aten::conj_physical(Tensor self) -> Tensor",
        "aten::_unsafe_view(Tensor self, SymInt[] size) -> Tensor",
        "aten::dequantize.self(Tensor self) -> Tensor",
        "aten::dequantize.tensor(Tensor qtensor) -> Tensor",
        "aten::einsum.sublist(Tensor a, ...) -> Tensor",
        "aten::sparse_coo_tensor.indices(Tensor indices, Tensor values) -> Tensor",
        "mkldnn::_linear_pointwise(Tensor X, Tensor W) -> Tensor",
    ],
)
def test_other_operators_are_not_believed(text: str) -> None:
    assert not results_are_new(torch._C.parse_schema(text))


def test_operators_of_other_libraries_join_everything() -> None:
    assert joins_everything(torch._C.parse_schema("mkldnn::_linear_pointwise_(Tensor(a!) X, Tensor W) -> Tensor(a!)"))
    assert not joins_everything(torch._C.parse_schema("aten::relu_(Tensor(a!) self) -> Tensor(a!)"))


SCRIBBLES = (
    "aten.conj_physical({}).mul_(2)",
    "{}.sum_to_size([4]).mul_(2)",
    "aten.cartesian_prod([{}]).mul_(2)",
    "aten.dequantize({}).mul_(2)",
    "aten._unsafe_view({}, [4]).mul_(2)",
    "aten.flatten_dense_tensors([{}]).mul_(2)",
    "aten._cast_Float({}).mul_(2)",
    "aten._saturate_weight_to_fp16({}.view([2, 2])).mul_(2)",
    "aten.lift({}).mul_(2)",
    "{}.data.mul_(2)",
    "{}.contiguous().mul_(2)",
    "{}.float().mul_(2)",
    "{}.to(torch.float32).mul_(2)",
    "{}.type_as(new).mul_(2)",
    "{}.expand_as(new).mul_(2)",
    "{}.reshape([2, 2]).mul_(2)",
    "aten.broadcast_tensors([{}])[0].mul_(2)",
    "aten.meshgrid([{}])[0].mul_(2)",
    "aten.atleast_1d({}).mul_(2)",
    "aten.atleast_2d([{}])[0].mul_(2)",
    "aten.einsum('i->i', [{}]).mul_(2)",
    "aten.real({}).mul_(2)",
    "aten.positive({}).mul_(2)",
    "aten.resolve_conj({}).mul_(2)",
    "aten.split({}, 2)[0].mul_(2)",
    "aten.unsafe_chunk({}, 2)[0].mul_(2)",
    "aten.unsafe_split({}, 2)[0].mul_(2)",
    "aten.tensor_split({}, 2)[0].mul_(2)",
    "aten.dropout({}, 0.5, False).mul_(2)",
    "aten.feature_dropout({}, 0.5, False).mul_(2)",
    "aten.sparse_coo_tensor(torch.arange(4).unsqueeze(0), {}, [4])._values().mul_(2)",
    "aten.set_(torch.empty([4]), {}).mul_(2)",
    "held.mul_(2)",
    "aten.batch_norm_update_stats(new.view([1, 4]), {}, None, 0.5)[0]",
    "aten.native_batch_norm(new.view([1, 4, 1]).expand([1, 4, 2]), None, None, {}, torch.ones([4]), True, 0.5, 0.1)[0]",
    "aten.batch_norm(new.view([2, 2]), None, None, {}[:2], {}[2:], True, 0.5, 0.1, False)",
    "aten.instance_norm(new.view([1, 2, 2]), None, None, {}[:2], {}[2:], True, 0.5, 0.1, False)",
    "aten.rrelu_with_noise(new, {}, 0.1, 0.3, True)",
    "aten.embedding_renorm_({}.view([2, 2]), torch.arange(2), 0.01, 2.0)",
    "aten.add(new, 1.0, out={})",
    "aten.index_put_({}, [torch.arange(2)], new[:2])",
    "aten.fused_moving_avg_obs_fake_quant(new, observed, observed, {}[:1], {}[1:2], scale, zero, 0.5, 0, 9, -1)",
)
"""Ways to write to a buffer of four numbers. ``held`` is a tensor whose data was set to be the buffer's.

Nothing is used by two of them, since whatever shares memory with what is written to counts as written.
"""


class Numbers(nn.Module):
    """Buffers ``b0``, ``b1`` ... of four numbers each, and one of which nothing is written."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_buffer(f"b{number}", torch.arange(4.0) + 1.5)
        self.register_buffer("read", torch.ones(4))


def scribbling(path: Path) -> Path:
    """A model that writes to buffer ``i`` in the ``i``-th of these ways, and returns what came of it."""
    buffers = [f"self.b{number}" for number in range(len(SCRIBBLES))]
    values = [
        text.replace("{}", name).replace("new", "x.clone()") for text, name in zip(SCRIBBLES, buffers, strict=True)
    ]
    held = f"aten.set_data(held, {buffers[SCRIBBLES.index('held.mul_(2)')]})"
    lines = [
        "observed = torch.ones([1]).long()",
        "zero = torch.zeros([1]).int()",
        "scale = torch.ones([1])",
        "held = torch.empty([4])",
        held,
    ]
    lines += ["y = x * self.read"]
    lines += [f"y += {value}.sum() + {name}" for value, name in zip(values, buffers, strict=True)]
    lines += ["return y"]
    body = "\n    ".join(lines).replace("aten.", "torch.ops.aten.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.script(Numbers(len(SCRIBBLES)).eval())
        module.define(f"def forward(self, x: Tensor) -> Tensor:\n    {body}\n")
        module.save(str(path))
    return path


def test_whatever_operators_do_the_stores_memory_stays_as_it_is(plan_cache: PlanCache, tmp_path: Path) -> None:
    opener, file = Opener(plan_cache), scribbling(tmp_path / "model.pt")
    graph = opener.open(file)
    with graph.embedded_weights() as embedded:
        weights = WeightStore().put(graph.slots, embedded).weights
    before = {name: bytes(weights.buffer(name)) for name in weights.tensors}
    plan = graph.cached_plan()
    assert plan is not None
    assert plan.state == set(before) - {"read"}  # type: ignore[attr-defined]
    bound, expected, x = plan.bind(weights), load(file), np.full(4, 1.25, np.float32)
    for _ in range(3):
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = expected(torch.from_numpy(x)).numpy()
            (answer,) = bound.execute([x])
        assert answer.tobytes() == wanted.tobytes()
    changed = {name for name, tensor in expected.named_buffers() if tensor.numpy().tobytes() != before[name]}
    assert changed >= {f"b{number}" for number in range(len(SCRIBBLES))}, "torch itself does not write"
    assert {name: bytes(weights.buffer(name)) for name in weights.tensors} == before
