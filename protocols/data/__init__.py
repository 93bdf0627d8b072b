"""Files: the blobs of a peer, their chunks, and transfers between peers."""
