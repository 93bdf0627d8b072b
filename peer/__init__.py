"""The daemon of a peer: sockets, TLS, HTTP, SQLite, processes and files; it drives `protocols/`."""
