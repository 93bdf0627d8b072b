"""THE DAEMON: sockets, TLS, HTTP, SQLite, worker processes, blobs on disk; drives `protocols/`."""
