"""`python -m master`: the task queue."""

import sys

from .main import main

sys.exit(main())
