"""The weights ring: what a plan's slots are, how weights files are read, and where weight sets live.

* ``slots``: the places of a plan that weights go to, and the check that a set of tensors fits them;
* ``source``: what an opened weights file is, whatever its form; ``formats`` finds the reader: ``safetensors``,
  ``sharded``, ``wts``, ``npz``, ``torch_pickle``; files are validated before a byte of a tensor is read;
* ``pinned``, ``zipped``, ``strided``, ``pickled``: what readers are made of;
* ``names``: names in files that differ from those of slots by what wrappers put before them;
* ``writing``: weights from any source to a file of any form;
* ``reading``, ``finite``: tensors on their way into memory: copied, digested and looked through in one pass;
* ``segment``, ``layout``: sealed shared memory, recycled but never under anything that still refers to it;
* ``weight_set``, ``live``, ``fillings``, ``assembly``: immutable weight sets, and how they are made: equal tensors are
  held once;
* ``reception``, ``incoming``: tensors that arrive over the network; ``region``: those that a trainer writes into shared
  memory; ``in_memory`` reads either;
* ``store``: all of this for the rest of the server.

Blocking and safe to call from any thread; knows neither torch nor asyncio.
"""
