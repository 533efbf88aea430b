"""The weights ring: what a plan's slots are, how weights files are read, and where weight sets live.

* ``slots``: the places of a plan that weights go to, and the check that a set of tensors fits them;
* ``source``: what an opened weights file is, whatever its form; ``formats`` finds the reader: ``safetensors``,
  ``sharded``, ``wts``, ``npz``, ``torch_pickle``; files are validated before a byte of a tensor is read;
* ``pinned``, ``zipped``, ``strided``, ``pickled``: what readers are made of;
* ``names``: names in files that differ from those of slots by what wrappers put before them;
* ``writing``: weights from any source to a file of any form; ``progress``: how far that is, or the reading;
* ``reading``, ``finite``: tensors read from files: copied, digested and searched for NaN in one pass;
* ``segment``, ``layout``: sealed shared memory, recycled but never under anything that still refers to it;
* ``weight_set``, ``live``, ``fillings``, ``assembly``: immutable weight sets, and how they are made: equal tensors are
  held once;
* ``reception``, ``incoming``, ``arrival``: files that arrive over the network, straight into memory; ``spool``: those
  that wait on the disk; ``region``: tensors that a trainer writes into shared memory;
* ``in_memory``: tensors in memory, as a source;
* ``store``: all of this for the rest of the server.

Blocking and safe to call from any thread; knows neither torch nor asyncio.
"""
