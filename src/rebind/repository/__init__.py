"""The model repository on disk: what lies in it, which files make a version, what changed, and how to add to it.

``scan`` lists models and versions; ``versions`` picks the plan and the weights of a version; ``snapshot`` looks at
every file's stamp, and ``watch`` decides which differences are complete enough to act on; ``publish`` writes weights so
that no reader ever sees half of them, and ``manifest`` is what it tells its readers.
"""
