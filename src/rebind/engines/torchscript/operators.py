"""Which of TorchScript's operators return memory of their own, and what they write to without saying so.

A schema says which results share memory with which arguments, and torch does not check that it is true:
``conj_physical(Tensor self) -> Tensor`` returns a real ``self`` as it is. An operator with a kernel for each kind of
tensor has to allocate its results. One that is composed of others (``CompositeImplicitAutograd``) returns whatever the
last of these returns. So the latter are not believed, but for some that were looked at; nor are operators that only the
interpreter knows, nor those of other libraries.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch._C import _dispatch_has_kernel, _dispatch_has_kernel_for_dispatch_key

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEW_THOUGH_COMPOSED = re.compile(
    r"""
    adaptive_avg_pool[123]d|avg_pool1d|max_pool[123]d
    |conv[123]d|conv_transpose[123]d|linear|bilinear|matmul|outer|scaled_dot_product_attention
    |(batch|group|instance|layer|rms)_norm
    |(gru|lstm|rnn_relu|rnn_tanh)(_cell)?
    |prelu|relu6|selu|(log_)?softmax
    |concat|divide|multiply|square|subtract|true_divide|where
    """,
    re.VERBOSE,
)
"""Composed operators that compute something in every case. They are what weights go through in most models."""

_NEW_THOUGH_OUTSIDE_THE_DISPATCHER = {"index", "index_put"}
"""Variants of operators with kernels, for lists in which no entry is None."""

_NOT_NEW_THOUGH_WITH_KERNELS = re.compile(
    r"""(
    _?copy(_from\w*)?|_?lift|data|_foobar|_lazy_clone|_unsafe_view|channel_shuffle|pixel_(un)?shuffle|set|unsafe_split\w*
    |\w*(coalesce|dequant|embedding_bag|jagged|mkldnn|nested|padded|per_channel|quantized|resize|rnn|sparse|values)\w*
    |_(functional|test|to)_\w+
    )""",
    re.VERBOSE,
)
"""Operators that may return their arguments, or keep them in what they return, as sparse tensors do."""

_KEEP_ARGUMENTS = {"aten::set_", "aten::set_data"}
"""Operators that make one argument share the memory of another."""

_TRAINS = ("training", "use_input_stats", "train")
"""Arguments that say of a normalisation whether it updates its statistics."""


def results_are_new(schema: Any) -> bool:
    """Whether results of which the schema says nothing share memory with no argument."""
    namespace, _, name = schema.name.partition("::")
    full_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if namespace != "aten":
        return False
    if not _dispatch_has_kernel(full_name):
        return name in _NEW_THOUGH_OUTSIDE_THE_DISPATCHER
    if _dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd"):
        return _NEW_THOUGH_COMPOSED.fullmatch(name) is not None
    return _NOT_NEW_THOUGH_WITH_KERNELS.fullmatch(name) is None


def joins_everything(schema: Any) -> bool:
    """Whether all arguments and results may share memory, whatever the schema says."""
    return not schema.name.startswith("aten::") or schema.name in _KEEP_ARGUMENTS


def updates_statistics(flags: Mapping[str, Any]) -> bool:
    """Whether an operator writes to its arguments ``running_mean`` and the like, which no schema says.

    ``flags`` are its other arguments by name, as far as their values are known.
    """
    return not any(flags.get(name) is False for name in _TRAINS)
