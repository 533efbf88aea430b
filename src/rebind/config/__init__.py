"""Configuration, of models and of the server: read, checked and completed here; nothing here opens a model or a socket.

    schema      Triton's ``ModelConfig`` as a table, in a descriptor pool of its own
    pbtxt       its two written forms, ``config.pbtxt`` and JSON
    wording     near matches and hints of their errors
    validation  Triton's rules, with Triton's texts
    model       the checked configuration as frozen dataclasses
    naming      which configured tensor is which argument or result of the graph
    complete    what is filled in from the opened model, and normalisation
    server      the values of the command line's flags

A model's configuration takes this way: ``pbtxt.read_pbtxt`` (or ``parse_json``) -> ``model.FileRules.from_message``, by
which files are found -> the engine opens the graph -> ``complete.complete`` -> ``model.ModelConfig.from_message``.
"""
