"""WHAT USERS TOUCH: the command line, and the Python client.

from valence import Client
run = Client().submit("examples/word-count.yaml")
run.wait()
print(run.read("total"))
"""

from .client import Client, Problem, Unreachable, Workflow

__all__ = ["Client", "Problem", "Unreachable", "Workflow"]
