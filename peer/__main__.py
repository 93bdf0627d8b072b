import sys

from valence.peer.main import main

sys.exit(main())
