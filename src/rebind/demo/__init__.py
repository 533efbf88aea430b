"""``rebind demo``: a network learns to read digits while a server answers with it.

Four processes, as in a real deployment:

* ``trainer`` trains the network of ``digits`` and publishes weights into the model repository every few steps;
* the server (``rebind serve``, as a user starts it) watches the repository and refits;
* ``client`` sends held-out images at a constant rate, and writes down what comes back;
* this process (``session``) starts the three, keeps the ``timeline`` of what they tell, and shows it (``view``,
  ``plot``).

Only ``digits`` and ``trainer`` import torch.
"""
