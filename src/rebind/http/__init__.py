"""Triton's HTTP v2 front end: an asyncio protocol of our own over the data plane (design/frontend.md, spec 01).

A request's way: ``protocol`` (bytes, one request in flight per connection) -> ``head`` (strict parsing) -> ``api``
(what a head meant is remembered; size limits) -> ``routes`` (a handler of a few lines) -> ``codec`` (a body to tensors)
-> the data plane -> ``encode`` (tensors to a body) -> ``protocol``.
"""
