"""The engine that enacts workflows. It decides and sends messages; disks, files and processes are
handed in as the small interfaces of `ports`."""
