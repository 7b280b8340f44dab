"""A fault suite for checkpoint transports: what networks, peers and processes do to them, and how receives end.

It tests any ``CheckpointTransport`` whose metadata is a URL, torchft's ``HTTPTransport`` included::

    PYTHONPATH=tests python -m faults --transports tensorferry,torchft --repeats 3

:class:`faults.proxy.proxy.FaultProxy` can be used alone, in other tests: it stands between a receiver and its source.
"""
