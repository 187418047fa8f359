"""`python -m mla_var3.lab.devlog`, the same as `mla-var3 devlog`."""

from __future__ import annotations

import sys

from mla_var3.errors import EXIT_USER_ERROR, UserError
from mla_var3.lab.devlog.cli import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"mla-var3: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
