"""What the engines that run on PyTorch share: the parameters of a model, how a call runs under them, tensors and types.

``parameters`` and ``dtypes`` need no torch; ``execution`` and ``tensors`` import it.
"""

from __future__ import annotations
