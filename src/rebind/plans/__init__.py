"""Plans on disk: how they are named, where they are kept between runs, and the child processes that make them.

* :mod:`rebind.plans.key`: the plan key, and what of this machine goes into it;
* :mod:`rebind.plans.cache`: the plan cache, shared by any number of threads and processes;
* :mod:`rebind.plans.sealed` and :mod:`rebind.plans.lock`: what the cache is made of;
* :mod:`rebind.plans.build`: work in a child process that may crash, hang or eat memory without harm to the server.

Nothing here knows an engine: a plan is a directory of files with a manifest.
"""
