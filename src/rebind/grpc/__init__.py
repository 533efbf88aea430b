"""gRPC: HTTP/2 over an I/O-free core, calls, and the services."""
