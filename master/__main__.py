"""`python -m master`: the task queue."""

import sys

from valence.master.main import main

sys.exit(main())
