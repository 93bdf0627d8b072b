"""Files: what a peer holds, how it is cut into chunks, and how chunks travel."""
