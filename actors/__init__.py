"""The system: Ray actors around the classes of `solrl_ray`. One actor a file, each a thin shell."""

import os

# Ray reads its authentication mode when it is imported, and its own default differs between ways of starting it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
